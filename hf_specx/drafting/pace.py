"""How long the rounds of one call take: what forwards cost, times what rounds were seen to take beside these."""

import math
import statistics
from collections import deque
from collections.abc import Sequence

from .costs import ENOUGH, RECENT, Costs
from .draft_length import best_number


ASSUMED = 0.2  # what a candidate, or a step of a draft, adds to a round, as a part of it, where no times may be used
NOT_TIMED = Costs({1: {"target": {1: 1.0, 2: 1 + ASSUMED}, "draft": ASSUMED}})
ALIKE = 2  # batch sizes up to so many times as large are alike


class Pace:
    """Seconds of the rounds of a call by their number of candidates: linear in it, and apart for plain steps.

    Args:
        costs: of the strategy, complete before the first number is asked for. What other calls add to it later is not
            used. None, or without any times, takes `ASSUMED`; the former where numbers must depend on no clock.
        online: whether times of this call are used at once. If not, since they would change sampled text, they are
            kept for later calls.
    """

    def __init__(self, costs: Costs | None, online: bool = False):
        self.costs, self.online = costs, online
        self.known: Costs | None = None
        self.seen: dict[tuple[int, int], deque[float]] = {}
        self.ended: float | None = None
        self.drafted = 0

    def times(self, rows: int, most: int, steps: bool = True) -> list[float]:
        """T(B, γ), γ = 0 to `most`; without `steps`, of candidates that take no step of a draft model."""
        known, rows = self._known(rows)
        plain, drafting = self._ratios(rows)
        step = known.draft(rows) if steps else 0.0
        longer = [known.target(rows, 1 + number) + step * number for number in range(1, most + 1)]
        return [plain * known.target(rows, 1), *(drafting * seconds for seconds in longer)]

    def best(self, chances: Sequence[Sequence[float]], apart: bool = False) -> int:
        """The number of candidates that is best for rows whose candidates take no step of a draft model.

        Args:
            chances: for each row the chance that its first i candidates are all kept.
            apart: whether the number must not depend on what was timed.
        """
        most = max(map(len, chances))
        means = [sum(row[i] for row in chances if i < len(row)) / len(chances) for i in range(most)]
        pace = Pace(None) if apart else self
        return best_number(means, pace.times(len(chances), most, steps=False))[0]

    def reading(self, rows: int, tokens: int) -> float:
        """Seconds that a draft takes to read so many tokens of each row; they grow as those of the target."""
        known, rows = self._known(rows)
        return known.draft(rows) * known.target(rows, tokens) / known.target(rows, 1)

    def prices(self, rows: int) -> tuple[float, float]:
        """What a step of the draft, and one more position of the target's forward, cost in plain steps."""
        known, rows = self._known(rows)
        plain = known.target(rows, 1)
        return known.draft(rows) / plain, (known.target(rows, 9) - plain) / 8 / plain

    def has_seen_plain(self, rows: int) -> bool:
        """Whether it is known how long plain steps take, of about so many rows."""
        known, _ = self._known(rows)
        sizes = [size for size, seconds in known.rounds.items() if 0 in seconds]
        sizes += [size for (size, drafted), seen in self.seen.items() if not drafted and len(seen) >= ENOUGH]
        return any(rows <= ALIKE * size and size <= ALIKE * rows for size in sizes)

    def skip(self) -> None:
        """A round of another kind has ended, or a prompt is read: the time up to the next `observe` does not count."""
        self.ended = None

    def observe(self, rows: int, drafted: int) -> None:
        """Note that a round has ended. The first of a call, and those in which a draft catches up, do not count."""
        if self.costs is None:
            return
        now = self.costs.clock()
        if self.ended is not None and (not drafted or self.drafted):
            seen = self.seen.setdefault((rows, drafted), deque(maxlen=RECENT))
            seen.append(now - self.ended)
            if self.online and len(seen) >= ENOUGH:
                self._known(rows)[0].rounds.setdefault(rows, {})[drafted] = statistics.median(seen)
        self.ended, self.drafted = now, drafted

    def _known(self, rows: int) -> tuple[Costs, int]:
        """The costs as they were when they were first asked for, and the batch size in them that stands for `rows`."""
        if self.known is None and self.costs is not None and self.costs.table:
            self.known = self.costs.apart()
        return (NOT_TIMED, 1) if self.known is None else (self.known, rows)

    def _ratios(self, rows: int) -> tuple[float, float]:
        """What plain steps, and rounds with candidates, take compared with their forwards: at the nearest size."""
        found: dict[bool, float] = {}
        known, rows = self._known(rows)
        for size in sorted(known.rounds, key=lambda size: -abs(math.log(size / rows))):
            ratios = known.ratios(size)
            for drafting in (False, True):
                of_kind = [ratio for number, ratio in ratios.items() if (number > 0) is drafting]
                found |= {drafting: statistics.geometric_mean(of_kind)} if of_kind else {}
        return found.get(False, found.get(True, 1.0)), found.get(True, found.get(False, 1.0))
