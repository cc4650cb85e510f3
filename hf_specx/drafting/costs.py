"""How long rounds take, and how much was accepted: what a strategy keeps, and how one call reads it."""

import itertools
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .draft_length import MAX_DRAFT_TOKENS, PRIOR_ALPHA, WEIGHT, expected_tokens
from .forward_times import on_grid, timed


MEMORY = 100  # how many candidates the acceptance of earlier calls is worth when another call is added
PAYS_FOR_TIMING = 400  # rounds with candidates; timing the forwards of a batch size takes about as long as 20 of them
RECENT = 15  # at most so many last rounds of a size count; their median is used
ENOUGH = 4  # rounds of a size to be seen before they are used
PROBE_SHARE = 0.01  # of the time of plain steps that may be lost by trying a draft that does not pay
ASSUMED = 0.2  # what a candidate, or a step of a draft, adds to a round, as a part of it, where no times may be used


@dataclass(eq=False, repr=False)
class Costs:
    """What the choice of a number of candidates depends on; a strategy keeps it as `strategy.costs`.

    With the same costs and seed, two processes draft the same numbers under token and block verification.

    Attributes:
        table: seconds of bare forwards, by batch size: {"target": {query length: seconds}, "draft": seconds}.
        assumed: batch sizes whose row is told by the models' sizes, and not timed yet.
        unspent: rounds with candidates in the calls so far; every `PAYS_FOR_TIMING` of them pay for one row.
        alpha: by verification, the chance in the calls so far that a candidate is kept whose predecessors were: the
            `survival_rate` of reports.
        rounds: seconds of whole rounds in the calls so far, by batch size and number of candidates.
        saved: plain steps' worth of time that later calls may lose by trying a draft that does not pay.
        clock: gives seconds; time is read nowhere else.
        measured: rows of earlier tables, by batch size; `prepare` takes one over instead of timing it again.
    """

    table: dict[int, dict[str, Any]] = field(default_factory=dict)
    alpha: dict[str, float] = field(default_factory=dict)
    rounds: dict[int, dict[int, float]] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter
    measured: dict[int, dict[str, Any]] = field(default_factory=dict)
    assumed: set[int] = field(default_factory=set)
    unspent: int = 0
    saved: float = 0.0

    def __repr__(self) -> str:
        """Batch sizes that were timed, and acceptance so far."""
        alpha = ", ".join(f"{verification}: {value:.3f}" for verification, value in self.alpha.items())
        return f"Costs(batch sizes {sorted(self.table.keys() - self.assumed)}, acceptance {{{alpha}}})"

    def knows(self, batch: int) -> bool:
        """Whether times were measured for a batch size."""
        return batch in self.table and batch not in self.assumed

    def apart(self) -> "Costs":
        """A copy that from now on remembers other calls."""
        rounds = {batch: dict(seen) for batch, seen in self.rounds.copy().items()}  # another thread may add to it
        own = set(self.assumed)
        return Costs(dict(self.table), dict(self.alpha), rounds, self.clock, assumed=own, saved=self.saved)

    def remember(self, verification: str, alpha: float, judged: float, rounds: int = 0) -> None:
        """Add the acceptance of a call, as `judged` candidates have shown it, and how many `rounds` had candidates."""
        self.unspent += rounds
        if judged:
            old = self.alpha.get(verification, PRIOR_ALPHA)
            weight = MEMORY if verification in self.alpha else WEIGHT
            self.alpha[verification] = old + (alpha - old) * judged / (judged + weight)

    def remember_rounds(self, seen: Mapping[tuple[int, int], Sequence[float]]) -> None:
        """Add how long the rounds of a call took: seconds, by batch size and number of candidates.

        One that is known moves halfway, so that no call decides alone. Those of numbers of candidates that the call
        did not use are dropped if it used others.
        """
        found: dict[int, dict[int, float]] = {}
        for (batch, drafted), seconds in seen.items():
            if len(seconds) >= ENOUGH:
                found.setdefault(batch, {})[drafted] = statistics.median(seconds)
        for batch, times in found.items():
            known = self.rounds.get(batch, {})
            kept = {n: seconds for n, seconds in known.items() if n == 0 or not any(times)}
            halfway = {n: on_grid(math.sqrt(known.get(n, seconds) * seconds)) for n, seconds in times.items()}
            self.rounds[batch] = kept | halfway

    def target(self, batch: int, query_length: float) -> float:
        """T_t(B, q) in seconds, on a line between measured query lengths.

        For other batch sizes it is that of a forward of the nearest one with equally many tokens in all.
        """
        nearest = self._nearest(batch)
        return _on_line(sorted(self.table[nearest]["target"].items()), query_length * batch / nearest)

    def draft(self, batch: int) -> float:
        """T_d(B, 1) in seconds; for other batch sizes than the measured ones it grows as the target's."""
        nearest = self._nearest(batch)
        return self.table[nearest]["draft"] * self.target(batch, 1) / self.target(nearest, 1)

    def _nearest(self, batch: int) -> int:
        return min(self.table, key=lambda size: abs(math.log(size / batch)))

    def forwards(self, batch: int, num_draft_tokens: int) -> float:
        """T_t(B, γ+1) + γ T_d(B, 1): the forwards of a round."""
        return self.target(batch, num_draft_tokens + 1) + num_draft_tokens * self.draft(batch)

    def cost_coefficient(self, batch: int) -> float:
        """c, the time of a draft step over that of a target step."""
        return self.draft(batch) / self.target(batch, 1)

    def forward_limited_speedup(self, batch: int, tokens_per_round: float, num_draft_tokens: int) -> float:
        """Ê T_t(B, 1) / (T_t(B, γ+1) + γ T_d(B, 1)): Theorem 3.8 without its assumption on the larger forward."""
        return tokens_per_round * self.target(batch, 1) / self.forwards(batch, num_draft_tokens)

    def best_num_draft_tokens(self, batch: int, verification: str, most: int | None = None) -> int:
        """The γ, from 1 to `most`, with the largest `forward_limited_speedup` for a whole call.

        "auto" chooses each round.
        """
        alpha = self.alpha.get(verification, PRIOR_ALPHA)
        numbers = range(1, min(MAX_DRAFT_TOKENS, most or MAX_DRAFT_TOKENS) + 1)
        return max(numbers, key=lambda g: self.forward_limited_speedup(batch, expected_tokens(alpha, g), g))

    def prepare(
        self,
        batch: int,
        target: Callable[[int], object],
        draft: Callable[[int], object],
        prior: dict[str, Any] | None = None,
    ) -> None:
        """Have a row for this batch size before a call goes by it: timed once earlier calls pay for that.

        Until then it is `prior`; without one it is timed at once. The others are as for `measure`.
        """
        if self.knows(batch):
            return
        if batch in self.measured:
            self._keep(batch, self.measured[batch])
        elif prior is None or self.unspent >= PAYS_FOR_TIMING:
            self.unspent -= 0 if prior is None else PAYS_FOR_TIMING
            self.measure(batch, target, draft)
        elif batch not in self.table:
            self.table[batch] = prior
            self.assumed.add(batch)

    def measure(self, batch: int, target: Callable[[int], object], draft: Callable[[int], object]) -> None:
        """Fill in the row of batch size B by 15 target forwards and 30 draft steps.

        `target` and `draft` run one forward of so many tokens of each row, and wait for it.
        """
        self._keep(batch, timed(self.clock, target, draft))

    def _keep(self, batch: int, row: dict[str, Any]) -> None:
        self.table[batch] = self.measured[batch] = row
        self.assumed.discard(batch)

    def to_dict(self) -> dict[str, Any]:
        """Plain values with strings as keys, as JSON has them."""
        table = {batch: row for batch, row in self.table.items() if batch not in self.assumed}
        found: dict[str, Any] = json.loads(json.dumps({"table": table, "alpha": self.alpha, "rounds": self.rounds}))
        return found

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Costs":
        """The inverse of `to_dict`, with a clock of its own."""

        def numbered(times: dict[str, Any], read: Callable[[Any], Any] = float) -> dict[int, Any]:
            return {int(number): read(value) for number, value in times.items()}

        def row(times: dict[str, Any]) -> dict[str, Any]:
            return {"target": numbered(times["target"]), "draft": float(times["draft"])}

        return cls(numbered(values["table"], row), dict(values["alpha"]), numbered(values.get("rounds", {}), numbered))


NOT_TIMED = Costs({1: {"target": {1: 1.0, 2: 1 + ASSUMED}, "draft": ASSUMED}})


class RoundTimer:
    """Seconds of the rounds of one call: what forwards cost, times what rounds were seen to take beside these.

    Args:
        costs: of the strategy, as they are when they are first asked for. None, or without any times, takes `ASSUMED`.
        online: whether times of this call are used at once. If not, since they would change sampled text, they are
            kept for later calls.
    """

    def __init__(self, costs: Costs | None, online: bool = False):
        self.costs, self.online = costs, online
        self.known: Costs | None = None
        self.seen: dict[tuple[int, int], deque[float]] = {}
        self.found: dict[tuple[int, int, bool], list[float]] = {}  # of `times`, until others are known
        self.ended: float | None = None
        self.drafted = 0

    def times(self, rows: int, most: int, steps: bool = True) -> list[float]:
        """T(B, γ), γ = 0 to `most`; without `steps`, of candidates that take no step of a draft model.

        It is the same list again until other times are known.
        """
        asked = rows, most, steps
        if asked not in self.found:
            known, rows = self._known(rows)
            plain, drafting = self._ratios(rows)
            step = known.draft(rows) if steps else 0.0
            longer = [known.target(rows, 1 + number) + step * number for number in range(1, most + 1)]
            self.found[asked] = [plain * known.target(rows, 1), *(drafting * seconds for seconds in longer)]
        return self.found[asked]

    def reading(self, rows: int, tokens: int) -> float:
        """Seconds that a draft takes to read so many tokens of each row; they grow as those of the target."""
        known, rows = self._known(rows)
        return known.draft(rows) * known.target(rows, tokens) / known.target(rows, 1) if tokens else 0.0

    def position(self, rows: int) -> float:
        """What one more position of the target's forward costs, in plain steps."""
        known, rows = self._known(rows)
        plain = known.target(rows, 1)
        return (known.target(rows, 9) - plain) / 8 / plain

    def has_seen_plain(self, rows: int) -> bool:
        """Whether it is known how long plain steps take, of half to twice as many rows."""
        known, _ = self._known(rows)
        sizes = [size for size, seconds in known.rounds.items() if 0 in seconds]
        sizes += [size for (size, drafted), seen in self.seen.items() if not drafted and len(seen) >= ENOUGH]
        return any(rows <= 2 * size and size <= 2 * rows for size in sizes)

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
            if self.online and len(seen) >= ENOUGH and self._known(rows)[0] is not NOT_TIMED:
                of_size, seconds = self._known(rows)[0].rounds.setdefault(rows, {}), on_grid(statistics.median(seen))
                if of_size.get(drafted) != seconds:
                    of_size[drafted] = seconds
                    self.found.clear()
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
            for drafting in (False, True):
                of_kind = {number: t for number, t in known.rounds[size].items() if (number > 0) is drafting}
                ratios = [seconds / known.forwards(size, number) for number, seconds in of_kind.items()]
                found |= {drafting: statistics.geometric_mean(ratios)} if ratios else {}
        return found.get(False, found.get(True, 1.0)), found.get(True, found.get(False, 1.0))


def _on_line(known: list[tuple[int, float]], x: float) -> float:
    """The value at x, linear between and beyond `known` points; below the first at least in proportion to x."""
    for (q0, t0), (q1, t1) in itertools.pairwise(known):
        if x <= q1:
            found = t0 + (t1 - t0) * (x - q0) / (q1 - q0)
            return found if x >= q0 else min(t0, max(found, t0 * x / q0))
    (q0, t0), (q1, t1) = known[-2:]
    return t1 + max(0.0, (t1 - t0) / (q1 - q0)) * (x - q1)
