"""`specx_config.json`: what is known of a draft-target pair. Reading it opens no other file and runs no code."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_specx.drafting.costs import Costs
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.suffix import SuffixDraft

from .model_files import FULL_COMMIT
from .schema import MAX_CONFIG_BYTES, check_fields, read, read_text


CONFIG_NAME = "specx_config.json"
SCHEMA = 1
WEIGHTLESS = ("suffix", "early_exit")  # fields of drafts that have no weights of their own
WeightlessDraft = SuffixDraft | EarlyExitDraft


@dataclass
class ModelSource:
    """Where one model of a pair is, and facts from its files; None is "not checked".

    Attributes:
        name: id on the Hub; None is the pair's own folder.
        revision: commit on the Hub, so that the files are always the same; None in the pair's own folder.
        subfolder: in that folder or repository; "" is its root.
        model_type: of the text config, as in transformers.
        vocab_size: logits at a position, padding included.
        parameters: their number.
        max_positions: `max_position_embeddings`; None also where the model has no such limit.
        dtype: of the files, such as "bfloat16".
        fingerprint: of the config and weights, see `fetch.fingerprint`.
        auto_class: the class of transformers that loads it, such as "AutoModelForCausalLM".
    """

    name: str | None = None
    revision: str | None = None
    subfolder: str = ""
    model_type: str | None = None
    vocab_size: int | None = None
    parameters: int | None = None
    max_positions: int | None = None
    dtype: str | None = None
    fingerprint: str | None = None
    auto_class: str | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether the files are always the same: those of the pair itself, or of another repository at a commit."""
        return self.name is None or FULL_COMMIT.fullmatch(self.revision or "") is not None


@dataclass
class SuffixOptions:
    """Options of a `SuffixDraft`; see there."""

    max_candidates: int = 16
    min_match: int = 2
    max_match: int = 32


@dataclass
class EarlyExitOptions:
    """Options of an `EarlyExitDraft`; see there.

    Attributes:
        exit_layer: how many layers draft.
        head: whether the pair has a head of its own for them, see `exit_head`. Files of other pairs do not say.
    """

    exit_layer: int
    head: bool = False


@dataclass
class TokenizerFacts:
    """How the two tokenizers were compared.

    Attributes:
        method: "content": each token and its id was compared; "one": both models share one tokenizer; "own": the draft
            has another one.
        tokens: how many there are.
        special_tokens: {role: token}, such as {"eos_token": "</s>"}.
        vocabulary: SHA-256 of all tokens and ids.
    """

    method: str
    tokens: int
    special_tokens: dict[str, str] = field(default_factory=dict)
    vocabulary: str | None = None


@dataclass
class DraftTokenizer:
    """The draft's own tokenizer, where it has other tokens than the target's.

    Attributes:
        tokens, special_tokens, vocabulary: as in `TokenizerFacts`.
        overlap: the part of the target's tokens that the draft has as well.
    """

    tokens: int
    overlap: float
    special_tokens: dict[str, str] = field(default_factory=dict)
    vocabulary: str | None = None


@dataclass
class Measurement:
    """One measured batch size; ratios are medians over runs that alternate with plain `generate`.

    Attributes:
        batch: rows.
        dtype: of the target, such as "float32".
        verification, num_draft_tokens, layout: the options.
        alpha: mean of sum_x min(p, q) over judged candidates.
        cost_coefficient: time of a draft step over that of a target step; None if not timed.
        tokens_per_round: emitted tokens per row and round.
        expected_speedup: by Theorem 3.8 of Leviathan et al. 2022; None if forwards were not timed.
        forward_limited_speedup: by the times of the real forwards, which the theorem assumes equal; None likewise.
        measured_speedup: tokens per second over those of plain `generate`.
        hardware: the processor, see `devices.hardware`.
        versions: {"torch": "2.13.0", ...}.
        command: the command that made these numbers.
    """

    batch: int
    dtype: str
    verification: str
    num_draft_tokens: int
    layout: str
    alpha: float
    cost_coefficient: float | None
    tokens_per_round: float
    expected_speedup: float | None
    forward_limited_speedup: float | None
    measured_speedup: float
    hardware: str
    versions: dict[str, str]
    command: str


@dataclass
class SavedCosts:
    """The cost table of a pair (`strategy.costs`), and the hardware and precision that it was measured with.

    Attributes:
        hardware, dtype: the table is not used with any other.
        table, alpha, rounds: as in `Costs.to_dict`.
    """

    hardware: str
    dtype: str
    table: dict[str, Any]
    alpha: dict[str, float]
    rounds: dict[str, Any] = field(default_factory=dict)


@dataclass
class PairConfig:
    """`specx_config.json`.

    Attributes:
        target, draft: where the models are, and facts from their files; nothing is known of a draft without a model.
        suffix, early_exit: options of the `SuffixDraft` or `EarlyExitDraft` that there is in place of a draft model;
            None for any other draft. A file has these fields only where they are not None.
        tokenizers: how they were compared; None is "not checked".
        draft_tokenizer: the draft's, where its tokens are not the target's. Files of other pairs do not have it.
        num_draft_tokens, verification, layout: recommended options of `SpeculativeDecoding`.
        costs: the times by which "auto" chooses the number of candidates.
        measurements: one for each batch size and precision; [] is "not measured".
        prompts: texts to try the pair with.
        license: for the model card.
        notes: markdown for the model card: how the pair was made, what it is for.
        schema: version of this format.
    """

    target: ModelSource
    draft: ModelSource
    tokenizers: TokenizerFacts | None = None
    num_draft_tokens: str | int = "auto"
    verification: str | None = None
    layout: str = "auto"
    costs: SavedCosts | None = None
    measurements: list[Measurement] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    license: str | None = None
    notes: str = ""
    suffix: SuffixOptions | None = None
    early_exit: EarlyExitOptions | None = None
    draft_tokenizer: DraftTokenizer | None = None
    schema: int = SCHEMA

    @classmethod
    def from_text(cls, text: bytes, where: str) -> "PairConfig":
        """Read the content of a file.

        Args:
            text: the content.
            where: the name of the file, for errors.

        Raises:
            ValueError: it is not JSON of this schema.
        """
        config: PairConfig = read(cls, read_text(text, SCHEMA, where), where)
        check_fields(config, where)
        return config

    @classmethod
    def from_file(cls, path: str | Path) -> "PairConfig":
        """Read a file; errors as in `from_text`."""
        with Path(path).open("rb") as file:
            return cls.from_text(file.read(MAX_CONFIG_BYTES + 1), str(path))

    def to_text(self) -> str:
        """The config as JSON; equal configs give the same text."""
        rare = (*WEIGHTLESS, "draft_tokenizer")
        values = {name: value for name, value in asdict(self).items() if name not in rare or value}
        if self.early_exit is not None and not self.early_exit.head:
            del values["early_exit"]["head"]
        return json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def weightless_draft(self) -> WeightlessDraft | None:
        """A new draft with the options in `suffix` or `early_exit`, as yet without a head; None if it is a model."""
        if self.suffix is not None:
            return SuffixDraft(**asdict(self.suffix))
        return None if self.early_exit is None else EarlyExitDraft(self.early_exit.exit_layer)

    def set_draft(self, draft: WeightlessDraft | None) -> None:
        """Have the options of this draft in place of a draft model, or of neither kind."""
        self.suffix = SuffixOptions(**draft.options) if isinstance(draft, SuffixDraft) else None
        self.early_exit = None
        if isinstance(draft, EarlyExitDraft):
            self.early_exit = EarlyExitOptions(draft.exit_layer, draft.head is not None)
        if draft is not None:
            self.draft = ModelSource()

    def forget(self) -> None:
        """Drop all measurements and recommendations, because a model has changed."""
        self.costs, self.measurements = None, []
        self.num_draft_tokens, self.verification, self.layout = "auto", None, "auto"

    def costs_on(self, hardware: str, dtype: str) -> Costs:
        """A copy of the cost table; an empty one if it was measured on other hardware or in another precision."""
        saved = self.costs
        if saved is None or (saved.hardware, saved.dtype) != (hardware, dtype):
            return Costs()
        return Costs.from_dict({"table": saved.table, "alpha": saved.alpha, "rounds": saved.rounds})
