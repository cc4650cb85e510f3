"""How drafts are tried for a target, which ones need no second model, and what was found of each."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.hub.pair_config import Measurement, PairConfig, WeightlessDraft
from hf_specx.pairs.pair import DraftTargetPair

from .checks import check_runs
from .compatibility import Finding
from .ways import EXIT, SEVERAL_EXITS, SUFFIX, exit_layer_of


BATCHES = (1, 8)
LEARNING_ROWS = 8  # texts from which acceptance is learned before anything is chosen
TRIED_SHARES = (1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of the target's layers; beyond a half nothing is gained


@dataclass
class Study:
    """How drafts are tried, all in the same way.

    Attributes:
        prompts: texts; without any, drafts are checked and not measured.
        batches: sizes of the measured batches; prompts are repeated where there are not enough.
        options: of `generate`, `max_new_tokens` and `do_sample` among them.
        verification: of `SpeculativeDecoding`.
        repeats: timed runs of plain and of ours at each batch size, each on the next prompts.
        seed: of all random numbers.
        dtype: of all models; "auto" is as they were saved.
        device_map: of the target; drafts go to where its last layers are.
        trust_remote_code: whether models and tokenizers may bring code of their own.
        hub: what reading from the Hub takes, like {"token": ...}.
        command: what the measurements say that they were made by.
        keep_prompts: whether the config gets the prompts.

    Raises:
        ValueError: for batches or repeats with nothing to run.
    """

    prompts: list[str] = field(default_factory=list)
    batches: Sequence[int] = BATCHES
    options: dict[str, Any] = field(default_factory=lambda: {"max_new_tokens": 128, "do_sample": True, "top_k": 0})
    verification: str | None = None
    repeats: int = 3
    seed: int = 0
    dtype: str = "auto"
    device_map: Any = None
    trust_remote_code: bool = False
    hub: dict[str, Any] = field(default_factory=dict)
    command: str = "hf_specx.bench.tune.tune(...)"
    keep_prompts: bool = False

    def __post_init__(self) -> None:
        check_runs(self.batches, self.repeats)

    @property
    def learning(self) -> int:
        """Generations, of the largest batch, from which acceptance is learned before anything is chosen."""
        return min(self.repeats, max(1, LEARNING_ROWS // max(self.batches)))

    @property
    def runs(self) -> int:
        """Generations for each draft."""
        return self.learning + 2 * (self.repeats + 1) * len(self.batches) if self.prompts else 0


@dataclass
class DraftTrial:
    """What was found of one draft.

    Attributes:
        name: as it was given.
        findings: both models compared.
        error: why it cannot be used, None if it can.
        config: facts, measurements and recommendations; None where it cannot be used.
        pair: ready to generate and to be saved; only of the best draft.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None
    config: PairConfig | None = None
    pair: DraftTargetPair | None = None

    @property
    def measurements(self) -> list[Measurement]:
        """One for each batch size, with the recommended number of candidates."""
        return [] if self.config is None else self.config.measurements

    @property
    def speedup(self) -> float:
        """The geometric mean of the measured speed-ups over batch sizes; 0 where nothing was measured."""
        return statistics.geometric_mean(m.measured_speedup for m in self.measurements) if self.measurements else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "draft": self.name,
            "error": self.error,
            "findings": [finding._asdict() for finding in self.findings],
            "speedup": self.speedup or None,
            "config": None if self.config is None else asdict(self.config),
        }


def weightless_draft(name: str) -> WeightlessDraft | None:
    """`SuffixDraft()` for "suffix", `EarlyExitDraft(4)` for "exit:4"; None for any other name.

    Raises:
        ValueError: there is no number of layers after "exit:".
    """
    if name == SUFFIX:
        return SuffixDraft()
    layer = exit_layer_of(name)
    return None if layer is None else EarlyExitDraft(layer)


def exit_layers(config: PreTrainedConfig) -> list[int]:
    """Numbers of first layers that are worth trying as a draft of a target with this config."""
    if config.is_encoder_decoder:
        return []
    layers = config.get_text_config(decoder=True).num_hidden_layers
    return sorted({number for share in TRIED_SHARES if 1 <= (number := round(share * layers)) < layers})


def named_drafts(drafts: Sequence[str], config: PreTrainedConfig) -> list[str]:
    """The drafts to try, each once: "exits" stands for an "exit:n" of each number in `exit_layers`.

    Args:
        drafts: names; [] stands for all that need no other model.
        config: of the target.
    """
    exits = [f"{EXIT}{number}" for number in exit_layers(config)]
    stands_for = {SEVERAL_EXITS: exits}
    named = [each for name in drafts or (SUFFIX, SEVERAL_EXITS) for each in stands_for.get(name, [name])]
    return list(dict.fromkeys(named)) if SEVERAL_EXITS in drafts else named
