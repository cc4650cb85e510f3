"""How long forwards and rounds take, and how much was accepted: what a strategy keeps from call to call."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .draft_length import MAX_DRAFT_TOKENS, PRIOR_ALPHA, PRIOR_WEIGHT, expected_tokens
from .measuring import Measuring, on_grid, on_line


MEMORY = 100  # how many candidates the acceptance of earlier calls is worth when another call is added
SHARE = 0.05  # of the time of rounds with candidates that may go into timing forwards
RECENT = 15  # at most so many last rounds of a size count; their median is used
ENOUGH = 4  # rounds of a size to be seen before they are used
FORGIVEN = 1 / 16  # of what rounds with candidates took too long, in a call that had none


class Costs:
    """What the choice of a number of candidates depends on; a strategy keeps it as `strategy.costs`.

    With the same costs and seed, two processes draft the same numbers under token and block verification.

    Attributes:
        table: seconds of bare forwards, by batch size: {"target": {query length: seconds}, "draft": seconds}.
        assumed: batch sizes whose row is told by the models' sizes (see `prior`), and not measured yet.
        allowance: seconds that measuring may take next: `SHARE` of those of rounds with candidates, less those taken.
        alpha: by verification, the chance in the calls so far that a candidate is kept whose predecessors were: the
            `survival_rate` of reports.
        rounds: seconds of whole rounds in the calls so far, by batch size and number of candidates.
        saved: plain steps' worth of time that later calls may spend to try a draft that does not pay.
        clock: gives seconds; time is read nowhere else.
        measured: rows of earlier tables, by batch size; `prepare` takes one over instead of measuring it again.
    """

    def __init__(
        self,
        table: dict[int, dict[str, Any]] | None = None,
        alpha: dict[str, float] | None = None,
        rounds: dict[int, dict[int, float]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        measured: dict[int, dict[str, Any]] | None = None,
    ):
        self.table: dict[int, dict[str, Any]] = table or {}
        self.alpha: dict[str, float] = alpha or {}
        self.rounds: dict[int, dict[int, float]] = rounds or {}
        self.clock = clock
        self.measured = {} if measured is None else measured
        self.assumed: set[int] = set()
        self.allowance, self.saved = 0.0, 0.0
        self._begun: dict[int, Measuring] = {}

    def __repr__(self) -> str:
        """Batch sizes that were measured, and acceptance so far."""
        alpha = ", ".join(f"{verification}: {value:.3f}" for verification, value in self.alpha.items())
        return f"Costs(batch sizes {sorted(self.table.keys() - self.assumed)}, acceptance {{{alpha}}})"

    def knows(self, batch: int) -> bool:
        """Whether times were measured for a batch size."""
        return batch in self.table and batch not in self.assumed

    def apart(self) -> "Costs":
        """A copy that from now on remembers other calls."""
        rounds = {batch: dict(seen) for batch, seen in self.rounds.copy().items()}  # another thread may add to it
        made = Costs(dict(self.table), dict(self.alpha), rounds, self.clock)
        made.assumed, made.saved = set(self.assumed), self.saved
        return made

    def allow(self, seconds: float, rounds: int, plain_steps: int) -> None:
        """A call is over: measuring pays where rounds have candidates, so plain steps add nothing to the allowance."""
        self.allowance += SHARE * seconds * rounds / max(1, rounds + plain_steps)

    def remember(self, verification: str, alpha: float, judged: float) -> None:
        """Add the acceptance of a call.

        Args:
            verification: of the call.
            alpha: the chance that a candidate was kept whose predecessors were.
            judged: the weight of that, in candidates.
        """
        if not judged:
            return
        old = self.alpha.get(verification, PRIOR_ALPHA)
        weight = MEMORY if verification in self.alpha else PRIOR_WEIGHT
        self.alpha[verification] = old + (alpha - old) * judged / (judged + weight)

    def remember_rounds(self, seen: Mapping[tuple[int, int], Sequence[float]]) -> None:
        """Add how long the rounds of a call took.

        Times of numbers of candidates that it did not use are dropped if it used others. If it had no candidates at
        all, what their rounds took too long is forgiven little by little: it may have been by chance.

        Args:
            seen: seconds of rounds by batch size and number of candidates.
        """
        found: dict[int, dict[int, float]] = {}
        for (batch, drafted), seconds in seen.items():
            if len(seconds) >= ENOUGH:
                found.setdefault(batch, {})[drafted] = statistics.median(seconds)
        for batch, times in found.items():
            known = self.rounds.get(batch, {})
            mean = {n: math.sqrt(known[n] * seconds) if n in known else seconds for n, seconds in times.items()}
            if any(times):
                kept = {0: known[0]} if 0 in known else {}
            else:
                ratio = mean[0] / self.forwards(batch, 0)
                expected = {number: ratio * self.forwards(batch, number) for number in known}
                kept = {n: seconds * min(1, expected[n] / seconds) ** FORGIVEN for n, seconds in known.items()}
            self.rounds[batch] = {number: on_grid(seconds) for number, seconds in (kept | mean).items()}

    def ratios(self, batch: int) -> dict[int, float]:
        """What rounds were seen to take compared with their forwards, by the number of candidates."""
        return {number: seconds / self.forwards(batch, number) for number, seconds in self.rounds[batch].items()}

    def target(self, batch: int, query_length: float) -> float:
        """T_t(B, q) in seconds, on a line between measured query lengths.

        For other batch sizes it is that of a forward of the nearest one with equally many tokens in all.
        """
        nearest = self._nearest(batch)
        return on_line(sorted(self.table[nearest]["target"].items()), query_length * batch / nearest)

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

    def best_num_draft_tokens(self, batch: int, verification: str) -> int:
        """The γ from 1 to `MAX_DRAFT_TOKENS` with the largest `forward_limited_speedup`; every one is tried.

        For a caller that wants one number for a whole call; "auto" chooses anew for each round.
        """
        alpha = self.alpha.get(verification, PRIOR_ALPHA)
        return max(
            range(1, MAX_DRAFT_TOKENS + 1),
            key=lambda g: self.forward_limited_speedup(batch, expected_tokens(alpha, g), g),
        )

    def prepare(
        self,
        batch: int,
        target: Callable[[int], object],
        draft: Callable[[int], object],
        prior: dict[str, Any] | None = None,
    ) -> None:
        """Have a row for this batch size before a call goes by it.

        Without a measured one it is `prior`, and the `allowance` goes into timing forwards, so that after some calls
        there is one.

        Args:
            batch, target, draft: as for `measure`.
            prior: times that are assumed; without them all is measured at once.
        """
        if self.knows(batch):
            return
        if batch in self.measured:
            self._keep(batch, self.measured[batch])
        elif prior is None:
            self.measure(batch, target, draft)
        else:
            measuring = self._begun.setdefault(batch, Measuring())
            while self.allowance > 0 and not measuring.done:
                self.allowance -= measuring.step(self._seconds, target, draft)
            if measuring.done:
                self._keep(batch, measuring.row())
                self._begun.pop(batch, None)  # another thread may have been faster
            elif batch not in self.table:
                self.table[batch] = prior
                self.assumed.add(batch)

    def _keep(self, batch: int, row: dict[str, Any]) -> None:
        self.table[batch] = self.measured[batch] = row
        self.assumed.discard(batch)

    def measure(self, batch: int, target: Callable[[int], object], draft: Callable[[int], object]) -> None:
        """Fill in the row of a batch size: medians over a few rounds in which the models take turns.

        They do in a call as well, and on a processor with a small cache each pushes the other's weights out of it. It
        takes 15 target forwards and 30 draft steps.

        Args:
            batch: B.
            target: runs one target forward of so many tokens of each row, and waits for it.
            draft: the same for the draft.
        """
        measuring = Measuring()
        while not measuring.done:
            measuring.step(self._seconds, target, draft)
        self._keep(batch, measuring.row())

    def _seconds(self, forward: Callable[[int], object], query_length: int) -> float:
        started = self.clock()
        forward(query_length)
        return self.clock() - started

    def to_dict(self) -> dict[str, Any]:
        """Plain values with strings as keys, as JSON has them."""
        known = {batch: row for batch, row in self.table.items() if batch not in self.assumed}
        table = {
            str(batch): {"target": {str(q): t for q, t in row["target"].items()}, "draft": row["draft"]}
            for batch, row in known.items()
        }
        rounds = {str(batch): {str(number): t for number, t in row.items()} for batch, row in self.rounds.items()}
        return {"table": table, "alpha": dict(self.alpha), "rounds": rounds}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Costs":
        """The inverse of `to_dict`, with a clock of its own."""
        table = {
            int(batch): {"target": {int(q): float(t) for q, t in row["target"].items()}, "draft": float(row["draft"])}
            for batch, row in values["table"].items()
        }
        rounds = {
            int(batch): {int(number): float(t) for number, t in row.items()}
            for batch, row in values.get("rounds", {}).items()
        }
        return cls(table, dict(values["alpha"]), rounds)
