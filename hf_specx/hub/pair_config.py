"""`specx_config.json`: what is known of a draft-target pair. Reading it opens no other file and runs no code."""

import json
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from hf_specx.common.drafts import HUB_ID
from hf_specx.common.errors import is_int, require
from hf_specx.common.model_files import FULL_COMMIT
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.engine.check_options import MAX_NODES, VERIFICATIONS
from hf_specx.models.choose import LAYOUTS

from .schema import MAX_CONFIG_BYTES, SAVE_ANEW, of_items, read, read_text, validator


SCHEMA = 1
WeightlessDraft = SuffixDraft | EarlyExitDraft
MAX_RECOMMENDED = 64  # candidates a round that a config may recommend
MAX_LAYERS = 10_000  # more than any model has; whether the target has so many is checked in a call
NUMBER = re.compile(r"[1-9][0-9]{0,8}")
COMMIT_OR_NAME = re.compile(r"(?!.*\.\.)\w[\w./-]{0,254}")
SUBFOLDER = re.compile(r"(?=.{0,255}$)(\w[\w.+ -]*(/\w[\w.+ -]*)*)?")
ROUNDS = {str(number) for number in range(MAX_RECOMMENDED + 1)}
EARLIER_FIELDS = ("predicted_speedup", "why_not_predicted")  # of a measurement by an earlier version, not kept
RARE_SAMPLING = ("min_p", "repetition_penalty")  # of a measurement, in a file where they are not None
NO_ID = (
    "no id on the Hub; a config may name repositories only, so pass the model yourself, as target= or draft=, or save "
    "the pair with it inside"
)
MEASURE_ANEW = "measure it anew with specx tune"
SLOWER = "its draft was slower than plain generate at every batch size, so it is not used"
NO_TREE = f"neither 'auto' nor false nor an int from 1 to {MAX_NODES}; give one of these"
NO_NUMBER = f"neither 'auto' nor an int from 0 to {MAX_RECOMMENDED}; give one of these"

check_number_text = validator(NUMBER.fullmatch, f"no number of rows or tokens; {MEASURE_ANEW}")
check_measured = validator(lambda x: 0 < x <= sys.float_info.max, f"no positive finite number; {MEASURE_ANEW}")
check_probability = validator(lambda p: 0 <= p <= 1, f"no probability; {MEASURE_ANEW}")
check_candidates = validator(ROUNDS.__contains__, f"no number of candidates; {MEASURE_ANEW}")
check_times = validator(
    lambda times: {"1"} < times.keys(), f"not for 1 and at least one more number of tokens; {MEASURE_ANEW}"
)

Count = Annotated[int, validator(lambda n: 1 <= n <= MAX_RECOMMENDED, f"no int from 1 to {MAX_RECOMMENDED}; give one")]
Number = Annotated[int, check_measured]
Figure = Annotated[float, check_measured]
MaybeFigure = Annotated[float | None, check_measured]
MaybeAmount = Annotated[float | None, validator(lambda x: 0 <= x <= sys.float_info.max, f"no amount; {MEASURE_ANEW}")]
MaybeCount = Annotated[int | None, validator(lambda n: n >= 0, f"no count; {MEASURE_ANEW}")]
Probability = Annotated[float, check_probability]
Times = Annotated[dict[str, float], of_items(check_number_text, check_measured), check_times]
HubId = Annotated[str | None, validator(HUB_ID.fullmatch, NO_ID)]
CommitOrBranch = Annotated[
    str | None, validator(COMMIT_OR_NAME.fullmatch, f"no name of a commit, branch or tag; {SAVE_ANEW}")
]
Subfolder = Annotated[str, validator(SUBFOLDER.fullmatch, f"no name of a folder inside the pair's; {SAVE_ANEW}")]
ExitLayer = Annotated[int, validator(lambda n: 1 <= n <= MAX_LAYERS, f"no int from 1 to {MAX_LAYERS}; give one")]
NumDraftTokens = Annotated[
    str | int, validator(lambda n: n == "auto" or (is_int(n) and 0 <= n <= MAX_RECOMMENDED), NO_NUMBER)
]
Verification = Annotated[
    str | None, validator(VERIFICATIONS.__contains__, f"none of {', '.join(VERIFICATIONS)}; give one")
]
TreeNodes = Annotated[
    str | bool | int, validator(lambda n: n is False or n == "auto" or (is_int(n) and 1 <= n <= MAX_NODES), NO_TREE)
]
LayoutName = Annotated[str, validator(LAYOUTS.__contains__, f"none of {', '.join(LAYOUTS)}; give one")]


@dataclass
class ModelSource:
    """The place of one model of a pair, and facts about it; None is "not checked"."""

    name: HubId = None  # None is the pair's own folder
    revision: CommitOrBranch = None  # commit on the Hub, so that the files are always the same
    subfolder: Subfolder = ""  # in that folder or repository; "" is its root
    model_type: str | None = None  # of the text config, as in transformers
    vocab_size: int | None = None  # logits at a position, padding included
    parameters: int | None = None  # their number
    max_positions: int | None = None  # `max_position_embeddings`; None also where the model has no such limit
    dtype: str | None = None  # of the files, such as "bfloat16"
    fingerprint: str | None = None  # of the config and weights, see `fetch.fingerprint`
    auto_class: str | None = None  # the class of transformers that loads it, such as "AutoModelForCausalLM"

    @property
    def is_pinned(self) -> bool:
        """Whether the files are always the same: those of the pair itself, or of another repository at a commit."""
        return self.name is None or FULL_COMMIT.fullmatch(self.revision or "") is not None


@dataclass
class SuffixOptions:
    """Options of a `SuffixDraft`; see there."""

    max_candidates: Count = 16
    min_match: Count = 2
    max_match: Count = 32


@dataclass
class EarlyExitOptions:
    """Options of an `EarlyExitDraft`: how many layers draft, and whether the pair has a head of its own for them."""

    exit_layer: ExitLayer
    head: bool = False


@dataclass
class TokenizerFacts:
    """The result of comparing the two tokenizers."""

    method: str  # "content": each token and its id; "one": both models share one; "own": the draft has another one
    tokens: int  # how many there are
    special_tokens: dict[str, str] = field(default_factory=dict)  # {role: token}, such as {"eos_token": "</s>"}
    vocabulary: str | None = None  # SHA-256 of all tokens and ids


@dataclass
class DraftTokenizer:
    """The draft's own tokenizer, where it has other tokens than the target's, as in `TokenizerFacts`."""

    tokens: int
    overlap: Probability  # the part of the target's tokens that the draft has as well
    special_tokens: dict[str, str] = field(default_factory=dict)
    vocabulary: str | None = None


@dataclass
class Measurement:
    """The figures of one batch size over all turns, in each of which plain `generate` ran too; None is "not known"."""

    batch: Number  # rows
    dtype: str  # of the target, such as "float32"
    verification: str
    num_draft_tokens: Number
    layout: str
    alpha: Probability  # mean of sum_x min(p, q) over judged candidates
    cost_coefficient: MaybeFigure  # time of a draft step over that of a target step
    tokens_per_round: Figure  # emitted by a row
    expected_speedup: MaybeFigure  # by Theorem 3.8 of Leviathan et al. 2022
    forward_limited_speedup: MaybeFigure  # by the times of the real forwards, which the theorem assumes equal
    measured_speedup: Figure  # tokens per second over those of plain `generate`
    hardware: str  # the processor, see `devices.hardware`
    versions: dict[str, str]  # {"torch": "2.13.0", ...}
    command: str  # that made these numbers
    plain_tokens_per_second: MaybeFigure = None  # of plain `generate`, over all rows
    interval_low: MaybeFigure = None  # between these ends the measured speed-up lies; see hf_specx/bench/README.md
    interval_high: MaybeFigure = None
    turns: MaybeCount = None  # with one batch of prompts each
    turn_spread: MaybeAmount = None  # the standard deviation of the speed-up from turn to turn
    temperature: MaybeFigure = None  # of sampling, and the next two; None where text was greedy
    top_p: MaybeFigure = None
    top_k: MaybeCount = None
    min_p: MaybeAmount = None
    repetition_penalty: MaybeFigure = None
    max_new_tokens: MaybeCount = None  # which every text has: ends were ignored
    prompts: MaybeCount = None  # how many had a turn
    prompt_tokens: MaybeFigure = None  # the mean
    prompts_digest: str | None = None  # SHA-256 of the token ids of all that were given
    seed: MaybeCount = None  # of the first turn

    @property
    def is_faster(self) -> bool | None:
        """Whether it was shown to be faster than plain `generate`; None where that is not clear."""
        if self.turns is None:  # of a version that measured no interval
            return self.measured_speedup > 1
        if self.interval_low is not None and self.interval_low > 1:
            return True
        if self.interval_high is not None and self.interval_high < 1:
            return False
        return None

    def __str__(self) -> str:
        text = f"batch {self.batch}: {self.measured_speedup:.2f} times as fast as plain generate"
        if self.turns is not None:
            details = [f"{self.turns} turn{'s' * (self.turns != 1)}"]
            if self.interval_low is not None and self.interval_high is not None:
                details.insert(0, f"{self.interval_low:.2f} to {self.interval_high:.2f},")
            if self.plain_tokens_per_second is not None:
                details[-1] += f", plain {self.plain_tokens_per_second:.1f} tokens/s"
            text += f" ({' '.join(details)})"
        return text if self.is_faster is not None else f"{text}; whether it is faster is not clear"


@dataclass
class CostRow:
    """Seconds of bare forwards at one batch size, as `Costs.to_dict` names them."""

    target: Times
    draft: Annotated[
        float, validator(lambda x: 0 <= x <= sys.float_info.max, f"no time; {MEASURE_ANEW}")
    ]  # 0: no forwards


def check_row(row: Any, where: str) -> None:
    """Raise ValueError for what is no `CostRow`."""
    read(CostRow, row, where)


@dataclass
class SavedCosts:
    """The cost table of a pair, as `Costs.to_dict` gives it; for the hardware and dtype that it was measured with."""

    hardware: str
    dtype: str
    # a `CostRow` for each batch size
    table: Annotated[dict[str, dict[str, Any]], of_items(check_number_text, check_row)]
    alpha: Annotated[dict[str, float], of_items(values=check_probability)]
    rounds: Annotated[
        dict[str, dict[str, float]], of_items(check_number_text, of_items(check_candidates, check_measured))
    ] = field(default_factory=dict)


@dataclass
class PairConfig:
    """`specx_config.json`; a file has `tree` and drafts without a model only where they are not None or False."""

    target: ModelSource  # where the models are, and facts from their files
    draft: ModelSource  # nothing is known of one without a model
    tokenizers: TokenizerFacts | None = None  # how they were compared; None is "not checked"
    num_draft_tokens: NumDraftTokens = "auto"  # recommended options of `SpeculativeDecoding`; 0 decodes plainly
    verification: Verification = None
    layout: LayoutName = "auto"
    tree: TreeNodes = False
    costs: SavedCosts | None = None  # the times by which "auto" chooses the number of candidates
    measurements: list[Measurement] = field(default_factory=list)  # one for each batch size and precision
    prompts: list[str] = field(default_factory=list)  # texts to try the pair with
    license: str | None = None  # for the model card
    notes: str = ""  # markdown for the model card: how the pair was made, what it is for
    suffix: SuffixOptions | None = None  # of the draft that there is in place of a model
    early_exit: EarlyExitOptions | None = None  # likewise
    draft_tokenizer: DraftTokenizer | None = None  # the draft's, where its tokens are not the target's
    processor: bool = False  # whether one of sounds or images was saved with the pair
    schema: int = SCHEMA  # version of this format

    @classmethod
    def from_text(cls, text: bytes, where: str) -> "PairConfig":
        """Make a config of the content of a file `where`; a ValueError says what is wrong in it."""
        values = read_text(text, SCHEMA, where)
        measurements = values.get("measurements")
        for measurement in measurements if isinstance(measurements, list) else ():
            for name in EARLIER_FIELDS if isinstance(measurement, dict) else ():
                measurement.pop(name, None)
        config: PairConfig = read(cls, values, where)
        _check_drafts(config, where)
        return config

    @classmethod
    def from_file(cls, path: str | Path) -> "PairConfig":
        """Make a config of a file; errors as in `from_text`."""
        with Path(path).open("rb") as file:
            return cls.from_text(file.read(MAX_CONFIG_BYTES + 1), str(path))

    def to_text(self) -> str:
        """The config as JSON; equal configs give the same text."""
        rare = ("tree", "suffix", "early_exit", "draft_tokenizer", "processor")
        values = {name: value for name, value in asdict(self).items() if name not in rare or value}
        for measurement in values["measurements"]:
            for name in RARE_SAMPLING:
                if measurement[name] is None:
                    del measurement[name]
        if self.early_exit is not None and not self.early_exit.head:
            del values["early_exit"]["head"]
        return json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def weightless_draft(self) -> WeightlessDraft | None:
        """A new draft with the options in `suffix` or `early_exit`, as yet without a head; None if it is a model."""
        if self.suffix is not None:
            return SuffixDraft(**asdict(self.suffix))
        return None if self.early_exit is None else EarlyExitDraft(self.early_exit.exit_layer)

    def set_draft(self, draft: WeightlessDraft | None) -> None:
        """Record the options of a draft without weights; None: the draft is a model."""
        self.suffix = SuffixOptions(**draft.options) if isinstance(draft, SuffixDraft) else None
        self.early_exit = None
        if isinstance(draft, EarlyExitDraft):
            self.early_exit = EarlyExitOptions(draft.exit_layer, draft.head is not None)
        if draft is not None:
            self.draft = ModelSource()

    @property
    def pays(self) -> bool:
        """Whether it may be faster than plain `generate`: False if it was shown to be slower at every batch size."""
        return not self.measurements or any(m.is_faster is not False for m in self.measurements)

    def speeds(self) -> list[str]:
        """Lines that say how fast it was at each batch size, and whether that is worth it."""
        lines = [str(measurement) for measurement in self.measurements]
        return lines if self.pays else [*lines, f"{SLOWER} unless you pass num_draft_tokens='auto'"]

    def forget(self) -> None:
        """Drop all measurements and recommendations, because a model has changed."""
        self.costs, self.measurements = None, []
        self.num_draft_tokens, self.verification, self.layout, self.tree = "auto", None, "auto", False

    def costs_on(self, hardware: str, dtype: str) -> Costs:
        """A copy of the cost table; an empty one if it was measured on other hardware or in another precision."""
        saved = self.costs
        if saved is None or (saved.hardware, saved.dtype) != (hardware, dtype):
            return Costs()
        return Costs.from_dict({"table": saved.table, "alpha": saved.alpha, "rounds": saved.rounds})


def _check_drafts(config: PairConfig, where: str) -> None:
    """Raise ValueError unless a config names one draft, which is not the target a second time."""
    target, draft, suffix = config.target, config.draft, config.suffix
    if suffix is None and config.early_exit is None:
        target_source = (target.name, target.revision, target.subfolder)
        draft_source = (draft.name, draft.revision, draft.subfolder)
        repository = target.name or "the folder of the pair"
        require(
            target_source != draft_source,
            f"{where}: target and draft are both in {repository} under {target.subfolder!r}; a draft needs a folder "
            "of its own.",
        )
        return
    has_both = suffix is not None and config.early_exit is not None
    require(not has_both, f"{where} has both a suffix and an early_exit; take one of them out.")
    require(
        not any(vars(draft).values()),
        f"{where} has a draft without weights, and says where a draft model is; take one of them out.",
    )
    if suffix is not None:
        require(
            suffix.max_match >= suffix.min_match,
            f"{where}: max_match of suffix is {suffix.max_match}, less than min_match={suffix.min_match}; "
            f"{SAVE_ANEW}.",
        )
