"""Timing bare forwards, and reading values between those that are known."""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

from .prior import QUERY_LENGTHS


TIMED_ROUNDS = 4  # how often each forward is timed
DRAFT_STEPS = 2  # draft steps that are timed after each of them
GRID = 2 ** (1 / 32)  # times are rounded to powers of this


class Measuring:
    """Times of forwards of one batch size, taken one by one: the target's at each query length, and draft steps."""

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = {query: [] for query in QUERY_LENGTHS}
        self.steps: list[float] = []

    @property
    def done(self) -> bool:
        """Whether each was timed often enough; the first time of each warms up."""
        return len(self.steps) >= len(self.times) * (1 + TIMED_ROUNDS)

    def step(
        self,
        timed: Callable[[Callable[[int], object], int], float],
        target: Callable[[int], object],
        draft: Callable[[int], object],
    ) -> float:
        """Time the next target forward and the draft steps after it; returns the seconds of all of them."""
        query_length = QUERY_LENGTHS[len(self.steps) % len(QUERY_LENGTHS)]
        taken = timed(target, query_length)
        drafted = sum(timed(draft, 1) for _ in range(DRAFT_STEPS))
        self.times[query_length].append(taken)
        self.steps.append(drafted / DRAFT_STEPS)
        return taken + drafted

    def row(self) -> dict[str, Any]:
        """The medians, as `Costs.table` has them."""
        medians = {query: on_grid(statistics.median(seconds[1:])) for query, seconds in self.times.items()}
        return {"target": medians, "draft": on_grid(statistics.median(self.steps[len(self.times) :]))}


def on_line(known: list[tuple[int, float]], x: float) -> float:
    """The value at x, linear between and beyond `known` points; below the first at least in proportion to x."""
    for (q0, t0), (q1, t1) in itertools.pairwise(known):
        if x <= q1:
            found = t0 + (t1 - t0) * (x - q0) / (q1 - q0)
            return found if x >= q0 else min(t0, max(found, t0 * x / q0))
    (q0, t0), (q1, t1) = known[-2:]
    return t1 + max(0.0, (t1 - t0) / (q1 - q0)) * (x - q1)


def on_grid(seconds: float) -> float:
    """Rounded, so that noise rarely changes a choice."""
    return GRID ** round(math.log(max(seconds, 1e-9), GRID))  # a clock may not see the shortest
