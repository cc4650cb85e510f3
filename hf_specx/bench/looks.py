"""When a comparison has gone on for long enough, and between which ends its speed-up lies.

It is looked at several times, and each look could be misled by noise. So each look has its share of the chance to be
misled that one speed-up is given, and the interval of each look is as wide as its share asks for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


STEPS = 20_000  # of the integral in `student_quantile`


class Interval(NamedTuple):
    """Where a speed-up lies; None where nothing bounds it on that side."""

    low: float | None = None
    high: float | None = None

    @property
    def holds_one(self) -> bool:
        """Whether both faster and slower are possible."""
        return (self.low is None or self.low <= 1) and (self.high is None or self.high >= 1)


UNBOUNDED = Interval()


@dataclass
class Looks:
    """Looks at a speed-up after `first` turns, after twice as many, and so on, until it is clear or time is up.

    Args:
        misled: the chance that any interval of these looks ends above the true speed-up; as large is the chance that
            any ends below it. Look k has misled / (k (k + 1)) of it, and these shares add up to it, however many
            looks there are.
        first: turns before the first look, unless time is up.
        least: turns that there are however long they take.
        seconds: of all timed runs, after which the last look is taken.
    """

    misled: float
    first: int
    least: int
    seconds: float
    taken: int = 0
    interval: Interval = UNBOUNDED

    def enough(self, plain: Sequence[float], ours: Sequence[float]) -> bool:
        """Whether no further turn is needed; called after each, with the seconds of both ways in all turns so far."""
        turns = len(plain)
        time_is_up = turns >= self.least and sum(plain) + sum(ours) >= self.seconds
        if turns != self.first * 2**self.taken and not time_is_up:
            return False
        self.taken += 1
        self.interval = ratio_interval(plain, ours, self.misled / (self.taken * (self.taken + 1)))
        return time_is_up or not self.interval.holds_one


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], tail: float) -> Interval:
    """Fieller's interval for the ratio of the means of pairs (x, y): it misses it on either side by chance `tail`.

    R is in it if the mean of x - R y differs from 0 by no more than Student's t allows, which is a quadratic in R.
    """
    count = len(numerators)
    if count < 3:
        return UNBOUNDED
    mean_x, mean_y = math.fsum(numerators) / count, math.fsum(denominators) / count
    x, y = [each - mean_x for each in numerators], [each - mean_y for each in denominators]
    scale = student_quantile(tail, count - 1) ** 2 / (count * (count - 1))
    a = mean_y**2 - scale * math.fsum(each**2 for each in y)
    b = mean_x * mean_y - scale * math.fsum(one * other for one, other in zip(x, y, strict=True))
    c = mean_x**2 - scale * math.fsum(each**2 for each in x)
    if a <= 0 or c <= 0:  # the mean of one of both may be 0, so far as these few tell
        return UNBOUNDED
    root = math.sqrt(max(b**2 - a * c, 0.0))
    return Interval((b - root) / a, (b + root) / a)


@lru_cache
def student_quantile(tail: float, freedom: int) -> float:
    """The t that Student's distribution with so many degrees of freedom exceeds by chance `tail`, below a half.

    With t = sqrt(freedom) tan(angle) its density is that of cos(angle) to the power freedom - 1.
    """
    width = math.pi / 2 / STEPS
    weights = [math.cos((step + 0.5) * width) ** (freedom - 1) for step in range(STEPS)]
    left, step = 2 * math.fsum(weights) * tail, STEPS
    while left > 0:
        step -= 1
        left -= weights[step]
    return math.sqrt(freedom) * math.tan(width * (step - left / weights[step]))
