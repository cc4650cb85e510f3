"""`Costs`: what "auto" has learned from calls of a strategy: seconds of forwards and of rounds, and acceptance."""

import copy
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .forward_times import QUERY_LENGTHS, ForwardTimes, on_grid, time_forwards
from .trees import RankEstimate


MAX_DRAFT_TOKENS = 20  # the largest number of candidates that is considered
PRIOR_ALPHA = 0.7  # acceptance assumed before any was seen
PRIOR_WEIGHT = 4.0  # candidates that an assumption counts for: `PRIOR_ALPHA`, and at each depth the mean of all depths
ALPHA_MEMORY = 100  # candidates that the acceptance of all earlier calls counts for when a call is added
MIN_SAMPLES = 4  # rounds of a size before their time is used
UNSEEN_TREES = 0.97  # power to which the overhead of trees that a call has not seen is raised
ROUNDS_PER_TIMING = 400  # rounds with candidates that pay for timing forwards, which takes as long as some 20 to 30


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round, (1 - α^(γ+1)) / (1 - α); Equation 1 of Leviathan et al. 2022."""
    if alpha >= 1:
        return float(num_draft_tokens + 1)
    return (1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha)


@dataclass(eq=False, repr=False)
class Costs:
    """What "auto" knows from earlier calls; a strategy keeps it as `strategy.costs`.

    With the same costs and seed, two processes draft the same numbers under token and block verification.

    Attributes:
        forward_times: seconds of bare forwards by batch size: {"target": {query length: seconds}, "draft": seconds}.
        alpha: by verification, the chance in the calls so far that a candidate is kept whose predecessors were: the
            `conditional_acceptance` of reports.
        rounds: seconds of whole rounds in the calls so far, by batch size and number of candidates.
        rank_estimates: by verification, which of the draft's choices the target has taken; not saved.
        tree_overheads: seconds of rounds with trees over what those of chains make one expect, by batch size and
            number of nodes; not saved.
        trial_budget: the time, in plain steps, that later calls may lose by trying a draft that does not pay.
        clock: gives seconds; time is read nowhere else.
        measured: all `forward_times` that were timed; `prepare` takes them, and times no size again.
        assumed: batch sizes whose `forward_times` are assumed by the models' sizes, and not timed yet.
        timing_budget: rounds with candidates since forwards were timed; `ROUNDS_PER_TIMING` of them pay for the next.
        candidates_per_step: candidates that a draft step finds, at most: more than 1 for a head that drafts a block.
    """

    forward_times: dict[int, ForwardTimes] = field(default_factory=dict)
    alpha: dict[str, float] = field(default_factory=dict)
    rounds: dict[int, dict[int, float]] = field(default_factory=dict)
    rank_estimates: dict[str, RankEstimate] = field(default_factory=dict)
    tree_overheads: dict[int, dict[int, float]] = field(default_factory=dict)
    trial_budget: float = 0.0
    clock: Callable[[], float] = field(default=time.perf_counter, kw_only=True)
    measured: dict[int, ForwardTimes] = field(default_factory=dict, kw_only=True)
    assumed: set[int] = field(default_factory=set, kw_only=True)
    timing_budget: int = field(default=0, kw_only=True)
    candidates_per_step: int = field(default=1, kw_only=True)

    def __repr__(self) -> str:
        """Batch sizes that were timed, and acceptance so far."""
        alpha = ", ".join(f"{verification}: {value:.3f}" for verification, value in self.alpha.items())
        return f"Costs(batch sizes {sorted(self.forward_times.keys() - self.assumed)}, acceptance {{{alpha}}})"

    def knows(self, batch_size: int, longest: int = 1) -> bool:
        """Whether times were measured for a batch size, of forwards of up to `longest` tokens of a row."""
        return batch_size not in self.assumed and _reaches(self.forward_times.get(batch_size), longest)

    def target_seconds(self, batch_size: int, query_length: float) -> float:
        """T_t(B, q) in seconds, on a line between measured query lengths.

        For other batch sizes it is that of a forward of the nearest one with equally many tokens in all.
        """
        nearest = self._nearest(batch_size)
        points = sorted(self.forward_times[nearest]["target"].items())
        return _interpolate(points, query_length * batch_size / nearest)

    def draft_seconds(self, batch_size: int) -> float:
        """T_d(B, 1) in seconds; for other batch sizes than the measured ones it grows as the target's."""
        nearest = self._nearest(batch_size)
        measured, plain = self.forward_times[nearest]["draft"], self.target_seconds(nearest, 1)
        return measured * self.target_seconds(batch_size, 1) / plain

    def num_steps(self, num_candidates: int) -> int:
        """How many steps of the draft find so many candidates."""
        return math.ceil(num_candidates / self.candidates_per_step)

    def drafting_seconds(self, batch_size: int, num_candidates: int) -> float:
        """γ T_d(B, 1), or T_d for a block: what the draft takes to find so many candidates."""
        return self.num_steps(num_candidates) * self.draft_seconds(batch_size)

    def forward_seconds(self, batch_size: int, num_draft_tokens: int) -> float:
        """T_t(B, γ+1) + γ T_d(B, 1): the forwards of a round; those of a head that drafts a block take one T_d."""
        drafting = self.drafting_seconds(batch_size, num_draft_tokens)
        return self.target_seconds(batch_size, num_draft_tokens + 1) + drafting

    def _nearest(self, batch_size: int) -> int:
        return min(self.forward_times, key=lambda size: abs(math.log(size / batch_size)))

    def cost_coefficient(self, batch_size: int) -> float:
        """c, the time of a draft step over that of a target step."""
        return self.draft_seconds(batch_size) / self.target_seconds(batch_size, 1)

    def forward_limited_speedup(self, batch_size: int, tokens_per_round: float, num_draft_tokens: int) -> float:
        """Ê T_t(B, 1) / (T_t(B, γ+1) + γ T_d(B, 1)): Theorem 3.8 without its assumption on the larger forward."""
        round_seconds = self.forward_seconds(batch_size, num_draft_tokens)
        return tokens_per_round * self.target_seconds(batch_size, 1) / round_seconds

    def best_fixed_num_draft_tokens(self, batch_size: int, verification: str, limit: int | None = None) -> int:
        """The γ, from 1 to `limit`, with the largest `forward_limited_speedup`, for all rounds of a call alike.

        `specx tune` times it; "auto" chooses before each round, by `best_num_candidates`.
        """
        alpha = self.alpha.get(verification, PRIOR_ALPHA)
        numbers = range(1, min(MAX_DRAFT_TOKENS, limit or MAX_DRAFT_TOKENS) + 1)
        return max(numbers, key=lambda g: self.forward_limited_speedup(batch_size, expected_tokens(alpha, g), g))

    def prepare(
        self,
        batch_size: int,
        target: Callable[[int], object],
        draft: Callable[[int], object],
        assumed: ForwardTimes | None = None,
        query_lengths: Sequence[int] = QUERY_LENGTHS,
    ) -> None:
        """Have the times of forwards of batch size B before a call goes by them.

        Args:
            batch_size: B.
            target, draft, query_lengths: as for `measure`.
            assumed: the times until earlier calls pay for timing; None times them at once.
        """
        longest = query_lengths[-1]
        if self.knows(batch_size, longest):
            return
        if _reaches(self.measured.get(batch_size), longest):
            self._set_times(batch_size, self.measured[batch_size])
        elif assumed is None:
            self.measure(batch_size, target, draft, query_lengths)
        elif self.timing_budget >= ROUNDS_PER_TIMING:
            self.timing_budget -= ROUNDS_PER_TIMING
            self.measure(batch_size, target, draft, query_lengths)
        elif batch_size not in self.forward_times:
            self.forward_times[batch_size] = assumed
            self.assumed.add(batch_size)

    def measure(
        self,
        batch_size: int,
        target: Callable[[int], object],
        draft: Callable[[int], object],
        query_lengths: Sequence[int] = QUERY_LENGTHS,
    ) -> None:
        """Time the forwards of batch size B: of each query length 5 of the target and 10 draft steps.

        Args:
            batch_size: B.
            target, draft: run one forward of so many tokens of each row, and wait for it.
            query_lengths: of the target's forwards, in ascending order.
        """
        self._set_times(batch_size, time_forwards(self.clock, target, draft, query_lengths))

    def _set_times(self, batch_size: int, times: ForwardTimes) -> None:
        self.forward_times[batch_size] = times
        self.measured[batch_size] = times
        self.assumed.discard(batch_size)

    def remember(self, verification: str, alpha: float, judged: float, rounds: int = 0) -> None:
        """Add the acceptance `alpha` of a call, seen at `judged` candidates, and how many `rounds` had candidates."""
        self.timing_budget += rounds
        if judged:
            old = self.alpha.get(verification, PRIOR_ALPHA)
            weight = ALPHA_MEMORY if verification in self.alpha else PRIOR_WEIGHT
            self.alpha[verification] = old + (alpha - old) * judged / (judged + weight)

    def remember_rounds(self, samples: Mapping[tuple[int, int], Sequence[float]]) -> None:
        """Add how long the rounds of a call took: seconds, by batch size and number of candidates.

        A time from earlier calls moves halfway, so that no call decides alone. After a call with candidates those of
        other numbers of candidates are dropped; the time of plain steps is kept.
        """
        medians: dict[int, dict[int, float]] = {}
        for (batch_size, number), seconds in samples.items():
            if len(seconds) >= MIN_SAMPLES:
                medians.setdefault(batch_size, {})[number] = statistics.median(seconds)
        for batch_size, times in medians.items():
            earlier = self.rounds.get(batch_size, {})
            has_drafted = any(times)
            remembered = {number: before for number, before in earlier.items() if number == 0 or not has_drafted}
            for number, median in times.items():
                remembered[number] = on_grid(math.sqrt(earlier.get(number, median) * median))
            self.rounds[batch_size] = remembered

    def remember_trees(self, seen: Mapping[int, Mapping[int, float]]) -> None:
        """Add the `tree_overheads` of a call that might have had trees.

        A number from earlier calls moves halfway. One that the call has not seen moves a little to 1, so that a tree
        that did not pay is tried again some time.
        """
        for batch_size in {*self.tree_overheads, *seen}:
            overheads, new = self.tree_overheads.get(batch_size, {}), seen.get(batch_size, {})
            remembered = {nodes: overhead**UNSEEN_TREES for nodes, overhead in overheads.items()}
            for nodes, overhead in new.items():
                remembered[nodes] = math.sqrt(overheads.get(nodes, overhead) * overhead)
            self.tree_overheads[batch_size] = remembered

    def copy(self) -> "Costs":
        """A copy, which learns from its own calls alone."""
        # another thread may add to these meanwhile
        rounds = {batch_size: dict(times) for batch_size, times in self.rounds.copy().items()}
        return Costs(
            dict(self.forward_times),
            dict(self.alpha),
            rounds,
            copy.deepcopy(self.rank_estimates),
            {batch_size: dict(overheads) for batch_size, overheads in self.tree_overheads.copy().items()},
            trial_budget=self.trial_budget,
            clock=self.clock,
            assumed=set(self.assumed),
            candidates_per_step=self.candidates_per_step,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values with strings as keys, as JSON has them."""
        timed = {size: times for size, times in self.forward_times.items() if size not in self.assumed}
        values = {"table": timed, "alpha": self.alpha, "rounds": self.rounds}
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Costs":
        """The inverse of `to_dict`, with a clock of its own."""

        def numbered(times: dict[str, Any]) -> dict[int, float]:
            return {int(number): float(seconds) for number, seconds in times.items()}

        table: dict[int, ForwardTimes] = {}
        for batch_size, row in values["table"].items():
            table[int(batch_size)] = {"target": numbered(row["target"]), "draft": float(row["draft"])}
        rounds = {int(batch_size): numbered(times) for batch_size, times in values.get("rounds", {}).items()}
        return cls(table, dict(values["alpha"]), rounds)


def _reaches(times: ForwardTimes | None, longest: int) -> bool:
    """Whether there are times of forwards of so many tokens of a row."""
    return times is not None and max(times["target"]) >= longest


def _interpolate(points: list[tuple[int, float]], x: float) -> float:
    """The value at x, linear between and beyond known points; below the first at least in proportion to x."""
    for (q0, t0), (q1, t1) in itertools.pairwise(points):
        if x <= q1:
            value = t0 + (t1 - t0) * (x - q0) / (q1 - q0)
            return value if x >= q0 else min(t0, max(value, t0 * x / q0))
    (q0, t0), (q1, t1) = points[-2:]
    return t1 + max(0.0, (t1 - t0) / (q1 - q0)) * (x - q1)
