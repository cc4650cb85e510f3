"""How often candidates are accepted: S_i of `auto.py`, estimated from the rounds so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .costs import PRIOR_WEIGHT


EARLIER_WEIGHT = 10.0  # candidates that the acceptance of earlier calls counts for in a call: its text may be another
DECAY = 0.98  # factor on the weight of earlier rounds at each round


@dataclass
class Tally:
    """Sums over candidates, weighted so that later rounds count for more.

    `tried` sums the probability that all candidates before one are accepted, `accepted` that it is accepted as well.
    """

    accepted: float = 0.0
    tried: float = 0.0

    def decay(self) -> None:
        """Have what was counted so far count for less."""
        self.accepted *= DECAY
        self.tried *= DECAY

    def add(self, accepted: float, tried: float) -> None:
        """Count one more candidate."""
        self.accepted += accepted
        self.tried += tried


class AcceptanceEstimate:
    """The probability S_i that the first i candidates of a row are all accepted, from the rounds so far of all rows.

    It is the product of the ratios S_j / S_{j-1}, j = 1 to i. A ratio is estimated by the probabilities at all
    candidates of that depth j, also after a rejection, so that it has no bias; where few were seen, by the mean of all
    depths.

    Args:
        alpha: each ratio before any round.
        together: whether all rows advance by the number that all accept, as in lockstep; S_i is then the probability
            that all rows accept i candidates.
    """

    def __init__(self, alpha: float, together: bool = False):
        self.together = together
        self.all_depths = Tally(alpha * EARLIER_WEIGHT, EARLIER_WEIGHT)
        self.depths: list[Tally] = []

    def update(self, acceptance: Sequence[list[float]]) -> None:
        """Count a round.

        Args:
            acceptance: for each row that took part `Verdict.prefix_acceptance` at its own candidates, of which there
                is one.
        """
        deepest = max(map(len, acceptance))
        self.depths += [Tally() for _ in range(deepest - len(self.depths))]
        for tally in (self.all_depths, *self.depths):
            tally.decay()
        if self.together:
            acceptance = [[math.prod(column) for column in zip(*acceptance, strict=False)]]
        for row in acceptance:
            for tally, before, accepted in zip(self.depths, [1.0, *row], row, strict=False):
                self.all_depths.add(accepted, before)
                tally.add(accepted, before)

    def acceptance(self, count: int) -> list[float]:
        """S_i for i = 1 to `count`."""
        mean_ratio = self.all_depths.accepted / self.all_depths.tried
        accepted = 1.0
        acceptance = []
        for depth in range(count):
            tally = self.depths[depth] if depth < len(self.depths) else Tally()
            accepted *= (tally.accepted + PRIOR_WEIGHT * mean_ratio) / (tally.tried + PRIOR_WEIGHT)
            acceptance.append(accepted)
        return acceptance
