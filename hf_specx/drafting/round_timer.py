"""How long rounds take: the seconds of `auto.py`, those of forwards times the overhead that rounds have shown."""

import math
import statistics
from collections import deque

from .costs import MIN_SAMPLES, Costs
from .forward_times import on_grid


MAX_SAMPLES = 15  # last rounds of a size whose median is its time
MIN_TREE_OVERHEAD = 0.5  # no round can take less time: what seems less is noise
ASSUMED_STEP = 0.2  # time that a candidate, or a step of a draft, adds to a round of 1, where no times may be used
ASSUMED_COSTS = Costs({1: {"target": {1: 1.0, 2: 1 + ASSUMED_STEP}, "draft": ASSUMED_STEP}})


class RoundTimer:
    """Expected seconds of the rounds of one call: those of their forwards, times the overhead that rounds have shown.

    Args:
        costs: of the strategy, which get the times of this call at its end.
        online: whether times of this call's rounds are used at once. Where these would change sampled text, they are
            only kept for later calls.

    Attributes:
        costs_at_start: a copy of the costs, which this goes by; `ASSUMED_COSTS` where these are None or know no times.
        samples: seconds of this call's rounds, by rows and candidates.
        tree_samples: the same of rounds with trees, by rows, draft steps and nodes.
        considers_trees: whether the call may have rounds with trees, so that it counts if it has seen none.
        last_end: when the last round ended; None if the time since then does not count.
        last_drafted: candidates of the last round.
    """

    costs_at_start: Costs
    cached_times: dict[tuple[int, int, bool], list[float]]

    def __init__(self, costs: Costs | None, online: bool = False):
        self.costs = costs
        self.online = online
        self.samples: dict[tuple[int, int], deque[float]] = {}
        self.tree_samples: dict[tuple[int, int, int], deque[float]] = {}
        self.considers_trees = False
        self.last_end: float | None = None
        self.last_drafted = 0
        self.start()

    def start(self) -> None:
        """Go by what the costs know now, and not by what they learn from other calls meanwhile."""
        knows_times = self.costs is not None and bool(self.costs.forward_times)
        self.costs_at_start = self.costs.copy() if knows_times else ASSUMED_COSTS  # type: ignore[union-attr]
        self.cached_times = {}

    def times(self, rows: int, max_candidates: int, steps: bool = True) -> list[float]:
        """Seconds of rounds with 0 to `max_candidates` candidates; without `steps` these take no draft steps."""
        key = rows, max_candidates, steps
        if key not in self.cached_times:
            costs, batch_size = self._costs_for(rows)
            plain_ratio, drafting_ratio = self._ratios(rows)
            seconds = [plain_ratio * costs.target_seconds(batch_size, 1)]
            for number in range(1, max_candidates + 1):
                drafting = costs.drafting_seconds(batch_size, number) if steps else 0.0
                seconds.append(drafting_ratio * (costs.target_seconds(batch_size, 1 + number) + drafting))
            self.cached_times[key] = seconds
        return self.cached_times[key]

    def tree_times(self, rows: int, steps: int, max_nodes: int) -> list[float]:
        """Seconds of rounds with so many draft steps and 0 to `max_nodes` candidates, which branch."""
        costs, batch_size = self._costs_for(rows)
        _, drafting_ratio = self._ratios(rows)
        drafting, overheads = costs.drafting_seconds(batch_size, steps), self._tree_overheads(rows)
        seconds = []
        for nodes in range(max_nodes + 1):
            nearest = min(overheads, key=lambda seen: abs(math.log(seen / max(nodes, 1))), default=0)
            forwards = costs.target_seconds(batch_size, 1 + nodes) + drafting
            seconds.append(drafting_ratio * overheads.get(nearest, 1.0) * forwards)
        return seconds

    def _tree_overheads(self, rows: int) -> dict[int, float]:
        """How much longer rounds with trees took than was expected, by number of nodes: in this call or before."""
        costs, batch_size = self._costs_for(rows)
        overheads = dict(costs.tree_overheads.get(batch_size, {}))
        return overheads | self._seen_overheads(rows) if self.online else overheads

    def _seen_overheads(self, rows: int) -> dict[int, float]:
        """The same in this call alone; none where no rounds of chains tell what to expect."""
        costs, batch_size = self._costs_for(rows)
        if all(self._overhead(rows, with_candidates=each) is None for each in (True, False)):
            return {}
        _, drafting_ratio = self._ratios(rows)
        ratios: dict[int, list[float]] = {}
        for (seen_rows, steps, nodes), samples in self.tree_samples.items():
            if seen_rows == rows and len(samples) >= MIN_SAMPLES:
                forwards = costs.target_seconds(batch_size, 1 + nodes) + costs.drafting_seconds(batch_size, steps)
                ratios.setdefault(nodes, []).append(statistics.median(samples) / (drafting_ratio * forwards))
        return {nodes: max(MIN_TREE_OVERHEAD, statistics.mean(each)) for nodes, each in ratios.items()}

    def prefill_seconds(self, rows: int, tokens: int) -> float:
        """Seconds that a draft takes to read so many tokens of each row; they grow as those of the target.

        A step over a block is one over as many tokens.
        """
        if not tokens:
            return 0.0
        costs, batch_size = self._costs_for(rows)
        seconds_per_token = costs.draft_seconds(batch_size) / costs.candidates_per_step
        return seconds_per_token * costs.target_seconds(batch_size, tokens) / costs.target_seconds(batch_size, 1)

    def position_cost(self, rows: int) -> float:
        """What one more position of the target's forward costs, in plain steps."""
        costs, batch_size = self._costs_for(rows)
        plain = costs.target_seconds(batch_size, 1)
        return (costs.target_seconds(batch_size, 9) - plain) / 8 / plain

    def has_seen_plain(self, rows: int) -> bool:
        """Whether plain steps of half to twice as many rows have been timed, in this call or before."""
        costs, _ = self._costs_for(rows)
        sizes = [size for size, seconds in costs.rounds.items() if 0 in seconds]
        for (size, drafted), samples in self.samples.items():
            if drafted == 0 and len(samples) >= MIN_SAMPLES:
                sizes.append(size)
        return any(rows <= 2 * size and size <= 2 * rows for size in sizes)

    def skip(self) -> None:
        """Do not count the time up to the next `observe`: a round of another kind has ended, or a prompt is read."""
        self.last_end = None

    def observe(self, rows: int, drafted: int) -> None:
        """Note that a round with so many candidates has ended.

        The first of a call does not count, nor one in which a draft reads what it has missed.
        """
        if self.costs is None:
            return
        now = self.costs.clock()
        catches_up = drafted > 0 and self.last_drafted == 0
        if self.last_end is not None and not catches_up:
            samples = self.samples.setdefault((rows, drafted), deque(maxlen=MAX_SAMPLES))
            samples.append(now - self.last_end)
            if self.online and len(samples) >= MIN_SAMPLES:
                self._use(rows, drafted, on_grid(statistics.median(samples)))
        self.last_end = now
        self.last_drafted = drafted

    def observe_tree(self, rows: int, steps: int, nodes: int) -> None:
        """Note that a round with a tree has ended."""
        if self.costs is None:
            return
        now = self.costs.clock()
        if self.last_end is not None and not (steps > 0 and self.last_drafted == 0):
            samples = self.tree_samples.setdefault((rows, steps, nodes), deque(maxlen=MAX_SAMPLES))
            samples.append(now - self.last_end)
        self.last_end = now
        self.last_drafted = steps

    def end(self) -> None:
        """End the call: later ones go by what its rounds took."""
        if self.costs is not None:
            self.costs.remember_rounds(self.samples)
            if self.considers_trees:
                sizes = {rows for rows, _, _ in self.tree_samples}
                self.costs.remember_trees({rows: self._seen_overheads(rows) for rows in sizes})

    def _use(self, rows: int, drafted: int, seconds: float) -> None:
        """Go by these seconds of a round from now on."""
        costs, _ = self._costs_for(rows)
        if costs is ASSUMED_COSTS:
            return
        times = costs.rounds.setdefault(rows, {})
        if times.get(drafted) != seconds:
            times[drafted] = seconds
            self.cached_times.clear()

    def _costs_for(self, rows: int) -> tuple[Costs, int]:
        """The costs that this call goes by, and the batch size to look up in them."""
        return self.costs_at_start, 1 if self.costs_at_start is ASSUMED_COSTS else rows

    def _ratios(self, rows: int) -> tuple[float, float]:
        """The overhead of plain steps, and of rounds with candidates; one that was not seen is that of the other."""
        plain = self._overhead(rows, with_candidates=False)
        drafting = self._overhead(rows, with_candidates=True)
        return plain or drafting or 1.0, drafting or plain or 1.0

    def _overhead(self, rows: int, with_candidates: bool) -> float | None:
        """Seconds of rounds over those of their forwards, at the nearest batch size; None if none were seen."""
        costs, batch_size = self._costs_for(rows)
        overhead = None
        nearest = math.inf
        for size, times in costs.rounds.items():
            ratios = []
            for number, seconds in times.items():
                if (number > 0) is with_candidates:
                    ratios.append(seconds / costs.forward_seconds(size, number))
            distance = abs(math.log(size / batch_size))
            if ratios and distance <= nearest:
                overhead = statistics.geometric_mean(ratios)
                nearest = distance
        return overhead
