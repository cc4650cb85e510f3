"""The settings of `specx tune`, and the result of each draft that it tried."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_specx.common.errors import require
from hf_specx.hub.pair_config import Measurement, PairConfig
from hf_specx.pairs.pair import DraftTargetPair

from .checks import MIN_TURNS, SECONDS, check_runs
from .compatibility import Finding
from .sequential_test import SequentialTest


BATCHES = (1, 8)
LEARNING_ROWS = 8  # texts from which acceptance is learned before anything is chosen
FALSE_ALARM = 0.025  # the chance that `tune` recommends a draft that gains nothing, and that of the opposite error


@dataclass
class TuneSettings:
    """The settings of one run of `tune`; a ValueError for batches or repeats with nothing to run."""

    prompts: list[str] = field(default_factory=list)  # without any, drafts are checked and not measured
    batches: Sequence[int] = BATCHES  # their sizes; prompts are repeated where there are not enough
    options: dict[str, Any] = field(default_factory=dict)  # of `generate`; else as the target's own config says
    repeats: int = MIN_TURNS  # turns at each batch size, at least
    seconds: float = SECONDS  # of timed runs of a draft at a batch size, after which no further turn begins
    seed: int = 0
    dtype: str = "auto"  # of all models; "auto" is as they were saved
    device_map: Any = None  # of the target; drafts go to where its last layers are
    trust_remote_code: bool = False
    quantize: str | None = None  # "4bit": so many bits of each weight of the target; None is as saved
    command: str = "hf_specx.bench.tune.tune(...)"  # recorded with the measurements
    drafts: int = 1  # how many are tried; all of their speed-ups share the false alarms of a run

    def __post_init__(self) -> None:
        check_runs(self.batches, self.repeats)
        require(0 <= self.seconds < math.inf, f"seconds={self.seconds} is no time; give 0 or more.")

    @property
    def num_learning_batches(self) -> int:
        """Batches of the largest size from which acceptance is learned before anything is chosen."""
        return max(1, LEARNING_ROWS // max(self.batches))

    def sequential_test(self, num_batches: int) -> SequentialTest:
        """The test of one speed-up, whose interval is first computed after `num_batches` turns, one for each batch."""
        share = FALSE_ALARM / (self.drafts * len(self.batches))
        return SequentialTest(share, max(num_batches, self.repeats), self.repeats, self.seconds)


@dataclass
class DraftTrial:
    """The result of one draft."""

    name: str  # as it was named
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None  # why it cannot be used
    misread: str = ""  # why its files look as if they were misread, and what to do
    config: PairConfig | None = None  # facts, measurements and recommendations of one that can be used
    pair: DraftTargetPair | None = None  # ready to generate and to be saved; only of the best draft

    @property
    def measurements(self) -> list[Measurement]:
        """The figures of each batch size, measured with the recommended number of candidates; [] without any."""
        return [] if self.config is None else self.config.measurements

    @property
    def recommended(self) -> bool:
        """Whether it was shown to be faster than plain `generate` at some batch size."""
        return any(m.is_faster for m in self.measurements)

    @property
    def speedup(self) -> float:
        """The geometric mean of the measured speed-ups over batch sizes; 0 where nothing was measured."""
        if not self.measurements:
            return 0.0
        return statistics.geometric_mean(m.measured_speedup for m in self.measurements)

    @property
    def verdict(self) -> str:
        """ "faster" at some batch size, "slower" at all of them, or "not clear"; "" where nothing was measured."""
        if not self.measurements or self.config is None:
            return ""
        if self.recommended:
            return "faster"
        return "not clear" if self.config.pays else "slower"

    def differs_from(self, other: "DraftTrial") -> bool:
        """Whether its interval and that of another draft are apart at some batch size, so that one is the faster."""
        pairs = zip(self.measurements, other.measurements, strict=False)
        return any(_is_below(mine, theirs) or _is_below(theirs, mine) for mine, theirs in pairs)

    def to_dict(self) -> dict[str, Any]:
        """All attributes but the pair, as JSON has them."""
        return {
            "draft": self.name,
            "error": self.error,
            "misread": self.misread or None,
            "findings": [finding._asdict() for finding in self.findings],
            "recommended": self.recommended,
            "verdict": self.verdict or None,
            "speedup": self.speedup or None,
            "config": None if self.config is None else asdict(self.config),
        }


def _is_below(slower: Measurement, faster: Measurement) -> bool:
    """Whether one speed-up is below another as far as their intervals tell."""
    high, low = slower.interval_high, faster.interval_low
    return high is not None and low is not None and high < low
