"""How drafts are tried for a target, and what was found of each."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_specx.hub.pair_config import Measurement, PairConfig
from hf_specx.pairs.pair import DraftTargetPair

from .checks import check_runs
from .compatibility import Finding


BATCHES = (1, 8)
LEARNING_ROWS = 8  # texts from which acceptance is learned before anything is chosen


@dataclass
class Study:
    """How drafts are tried, all in the same way; raises a ValueError for batches or repeats with nothing to run."""

    prompts: list[str] = field(default_factory=list)  # without any, drafts are checked and not measured
    batches: Sequence[int] = BATCHES  # their sizes; prompts are repeated where there are not enough
    options: dict[str, Any] = field(default_factory=dict)  # of `generate`; else as the target's own config says
    repeats: int = 3  # timed runs of plain and of ours at each batch size, each on the next prompts
    seed: int = 0
    dtype: str = "auto"  # of all models; "auto" is as they were saved
    device_map: Any = None  # of the target; drafts go to where its last layers are
    trust_remote_code: bool = False
    command: str = "hf_specx.bench.tune.tune(...)"  # what the measurements say that they were made by

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
    """What was found of one draft."""

    name: str  # as it was given
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None  # why it cannot be used
    misread: str = ""  # why its files look as if they were misread, and what to do
    config: PairConfig | None = None  # facts, measurements and recommendations of one that can be used
    pair: DraftTargetPair | None = None  # ready to generate and to be saved; only of the best draft

    @property
    def measurements(self) -> list[Measurement]:
        """One for each batch size, with the recommended number of candidates."""
        return [] if self.config is None else self.config.measurements

    @property
    def speedup(self) -> float:
        """The geometric mean of the measured speed-ups over batch sizes; 0 where nothing was measured."""
        return statistics.geometric_mean(m.measured_speedup for m in self.measurements) if self.measurements else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "draft": self.name,
            "error": self.error,
            "misread": self.misread or None,
            "findings": [finding._asdict() for finding in self.findings],
            "speedup": self.speedup or None,
            "config": None if self.config is None else asdict(self.config),
        }
