"""A sequential test of a speed-up: its confidence interval, and whether more turns are needed.

The interval is computed several times while turns go on, and noise may mislead each time (a "look"). So each look has
a share of the false alarms that are allowed in all, and its interval is as wide as that share demands.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple


INTEGRATION_STEPS = 20_000  # of the integral in `student_quantile`


class Interval(NamedTuple):
    """The confidence interval of a speed-up; None on a side that has no bound."""

    low: float | None = None
    high: float | None = None

    @property
    def contains_one(self) -> bool:
        """Whether 1 is inside, so that faster and slower are both possible."""
        return (self.low is None or self.low <= 1) and (self.high is None or self.high >= 1)


UNBOUNDED = Interval()


@dataclass
class SequentialTest:
    """Computes the interval of a speed-up after `first_look` turns, after twice as many, and so on.

    It ends once 1 is outside of the interval, or the time is up.

    Args:
        false_alarm: the chance that the interval of any look ends above the true speed-up; as large is the chance that
            one ends below it. Look k has false_alarm / (k (k + 1)) of it, and these shares add up to it, however many
            looks there are.
        first_look: turns before the first look, unless time is up.
        min_turns: turns that are measured even if they take longer than `seconds`.
        seconds: of all timed runs, after which the last look is taken.
    """

    false_alarm: float
    first_look: int
    min_turns: int
    seconds: float
    num_looks: int = 0
    interval: Interval = UNBOUNDED

    def should_stop(self, plain: Sequence[float], ours: Sequence[float]) -> bool:
        """Whether no further turn is needed; called after each, with the seconds of both in all turns so far."""
        turns = len(plain)
        time_is_up = turns >= self.min_turns and sum(plain) + sum(ours) >= self.seconds
        if turns != self.first_look * 2**self.num_looks and not time_is_up:
            return False
        self.num_looks += 1
        share = self.false_alarm / (self.num_looks * (self.num_looks + 1))
        self.interval = ratio_interval(plain, ours, share)
        return time_is_up or not self.interval.contains_one


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], tail: float) -> Interval:
    """Fieller's interval for the ratio of the means of pairs (x, y): it misses it on either side by chance `tail`.

    R is in it if the mean of x - R y differs from 0 by no more than Student's t allows, which is a quadratic in R.
    """
    count = len(numerators)
    if count < 3:
        return UNBOUNDED
    mean_x, mean_y = math.fsum(numerators) / count, math.fsum(denominators) / count
    centred_x = [value - mean_x for value in numerators]
    centred_y = [value - mean_y for value in denominators]
    products = [x * y for x, y in zip(centred_x, centred_y, strict=True)]
    scale = student_quantile(tail, count - 1) ** 2 / (count * (count - 1))
    a = mean_y**2 - scale * math.fsum(y**2 for y in centred_y)
    b = mean_x * mean_y - scale * math.fsum(products)
    c = mean_x**2 - scale * math.fsum(x**2 for x in centred_x)
    if a <= 0 or c <= 0:  # one of the two means may be 0, so far as these few tell
        return UNBOUNDED
    root = math.sqrt(max(b**2 - a * c, 0.0))
    return Interval((b - root) / a, (b + root) / a)


@cache
def student_quantile(tail: float, freedom: int) -> float:
    """The t that Student's distribution with so many degrees of freedom exceeds by chance `tail`, below a half.

    With t = sqrt(freedom) tan(angle) its density is that of cos(angle) to the power freedom - 1.
    """
    width = math.pi / 2 / INTEGRATION_STEPS
    weights = [math.cos((step + 0.5) * width) ** (freedom - 1) for step in range(INTEGRATION_STEPS)]
    remaining = 2 * math.fsum(weights) * tail
    step = INTEGRATION_STEPS
    while remaining > 0:
        step -= 1
        remaining -= weights[step]
    return math.sqrt(freedom) * math.tan(width * (step - remaining / weights[step]))
