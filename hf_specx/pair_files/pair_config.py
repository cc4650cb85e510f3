"""What is known of a draft-target pair, as its `specx_config.json` holds it. Reading it opens and runs nothing."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hf_specx.drafting.costs import Costs

from .schema import (
    MAX_CONFIG_BYTES,
    check_known_values,
    check_no_other,
    check_object,
    check_schema,
    check_text,
    check_type,
)


CONFIG_NAME = "specx_config.json"
SCHEMA = 1


@dataclass
class ModelSource:
    """Where one model of a pair is, and what was read from its files; None is "not checked".

    Attributes:
        name: id on the Hub; None is the pair's own folder.
        revision: commit on the Hub, so that the files are always the same; None in the pair's own folder.
        subfolder: of that folder or repository; "" is its root.
        model_type: of the text config, as transformers calls it.
        vocab_size: logits a position.
        parameters: their number.
        max_positions: `max_position_embeddings`, where the model has such a limit.
        dtype: of the files, like "bfloat16".
        fingerprint: of the files with the weights; see `fetch.fingerprint`.
        auto_class: of transformers, that loads it, like "AutoModelForCausalLM".
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


@dataclass
class TokenizerFacts:
    """How the two tokenizers were compared.

    Attributes:
        method: "content" is token by token with their ids; "one" where both models share one in the pair's folder.
        tokens: how many there are.
        special_tokens: {role: token}, like {"eos_token": "</s>"}.
        vocabulary: a hash of all tokens with their ids.
    """

    method: str
    tokens: int
    special_tokens: dict[str, str] = field(default_factory=dict)
    vocabulary: str | None = None


@dataclass
class Measurement:
    """One measured batch; every ratio is a median over runs, in turns with plain `generate`.

    Attributes:
        batch: rows.
        dtype: of the target, like "float32".
        verification, num_draft_tokens, layout: what was used.
        alpha: mean of sum min(p, q) over judged positions.
        cost_coefficient: a draft step over a target step, None if not timed.
        tokens_per_round: tokens a row and round.
        expected_speedup: Theorem 3.8; None without times of forwards.
        forward_limited_speedup: the same, without its assumption on the larger forward.
        measured_speedup: our tokens a second over those of plain `generate`.
        hardware: as `hf_specx` names it; a number from another machine says little.
        versions: {"torch": "2.13.0", ...}.
        command: what made these numbers.
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
    """The cost table of a pair (`strategy.costs`), and where it holds.

    Attributes:
        hardware, dtype: times are of no use elsewhere.
        table, alpha, rounds: as `Costs.to_dict` gives them.
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
        target, draft: where they are, and facts from their files.
        tokenizers: how they were compared; None is "not checked".
        num_draft_tokens, verification, layout: recommended options of `SpeculativeDecoding`.
        costs: what "auto" goes by, on the machine where it was measured.
        measurements: one for each batch and precision; none is "not measured".
        prompts: texts to try the pair with.
        license: for the model card.
        notes: markdown for the model card: how the pair was made, what it is for.
        schema: of this file.

    Raises:
        ValueError: on reading, for anything that is not of this schema.
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
    schema: int = SCHEMA

    @classmethod
    def from_text(cls, text: bytes, where: str) -> "PairConfig":
        """Read a file's content; `where` is what errors call it."""
        values = check_text(text, where)
        check_schema(values, SCHEMA, where)
        config: PairConfig = _read(cls, values, where)
        check_known_values(config, where)
        return config

    @classmethod
    def from_file(cls, path: str | Path) -> "PairConfig":
        """Read a file."""
        with Path(path).open("rb") as file:
            return cls.from_text(file.read(MAX_CONFIG_BYTES + 1), str(path))

    def to_text(self) -> str:
        """JSON, the same for equal configs."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def forget(self) -> None:
        """Drop what was measured, and what is recommended for it: a model has changed."""
        self.costs, self.measurements = None, []
        self.num_draft_tokens, self.verification, self.layout = "auto", None, "auto"

    def costs_on(self, hardware: str, dtype: str) -> Costs:
        """The cost table, a new one; empty where it was measured on other hardware or in another precision."""
        saved = self.costs
        if saved is None or (saved.hardware, saved.dtype) != (hardware, dtype):
            return Costs()
        return Costs.from_dict({"table": saved.table, "alpha": saved.alpha, "rounds": saved.rounds})


def _read(wanted: Any, value: Any, where: str) -> Any:
    """A value from JSON as what an annotation says it is."""
    options = get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
    made = next((option for option in options if hasattr(option, "__dataclass_fields__")), None)
    if made is not None and not (value is None and type(None) in options):
        check_object(value, where)
        hints = get_type_hints(made)
        known = {f.name: hints[f.name] for f in fields(made)}
        needed = {f.name for f in fields(made) if f.default is f.default_factory}  # both are MISSING
        check_no_other(value.keys(), known, needed, where)
        return made(**{name: _read(known[name], item, f"{where}: {name}") for name, item in value.items()})
    check_type(value, options, where)
    if get_origin(wanted) is list:
        return [_read(get_args(wanted)[0], item, f"{where}[{place}]") for place, item in enumerate(value)]
    if get_origin(wanted) is dict:
        named = {_read(str, name, where): f"{where}[{name!r}]" for name in value}
        return {name: _read(get_args(wanted)[1], value[name], place) for name, place in named.items()}
    return float(value) if float in options and value is not None else value
