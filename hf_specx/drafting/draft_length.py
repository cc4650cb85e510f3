"""How many candidates give the most tokens a second: formulas of Leviathan et al. 2022, and estimates of a call.

There is only arithmetic here, no model and no clock. How long rounds take is in `costs.py`.
"""

import math
from collections.abc import Sequence


MAX_DRAFT_TOKENS = 20  # the largest number that "auto" considers
COMPILED = (1, 2, 4, 7, 12, 20)  # of which torch compiles few forwards; the best of them loses 2 % at most
FIXED_DRAFT_TOKENS = 5  # what "auto" drafts if costs are not known or must not be used
PRIOR_ALPHA = 0.7  # acceptance assumed before any was seen
WEIGHT = 4.0  # candidates that this is worth, and at each depth the mean of all
EARLIER = 10.0  # candidates that what earlier calls have seen is worth in a call, whose text may be another one
FORGET = 0.98  # factor on the weight of earlier rounds at each round


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round, (1 - α^(γ+1)) / (1 - α); Equation 1."""
    if alpha >= 1:
        return float(num_draft_tokens + 1)
    return (1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha)


def best_number(
    chances: Sequence[float], seconds: Sequence[float], among: Sequence[int] | None = None
) -> tuple[int, float]:
    """The number of candidates with the most expected tokens a second, and that rate compared with plain steps.

    `chances` are those that a row keeps its first i candidates, i = 1 to K, `seconds` of rounds with 0 to K
    candidates; only the numbers in `among` are considered, all for None.
    """
    tokens, rates = 1.0, [1 / seconds[0]]
    for chance, taken in zip(chances, seconds[1:], strict=True):
        tokens += chance
        rates.append(tokens / taken)
    best = max(among or range(len(rates)), key=rates.__getitem__)
    return best, rates[best] / rates[0]


class AcceptanceEstimate:
    """The chance S_i that the first i candidates of a row are all kept, from the rounds so far; rows are pooled.

    It is the product of estimated ratios S_i / S_{i-1}. They come from the probabilities at all candidates, also after
    a rejection, so they have no bias. A depth i that was seldom seen is estimated by the mean of all; at first all are
    `alpha`. If rows advance `together`, S_i is the chance that all keep i candidates.
    """

    def __init__(self, alpha: float, together: bool = False):
        self.together = together
        self.all = [alpha * EARLIER, EARLIER]  # kept and tried at all depths
        self.depths: list[list[float]] = []  # the same at each depth

    def update(self, acceptance: Sequence[list[float]]) -> None:
        """Count a round: `Verdict.acceptance` of each row that took part, at its own candidates; one at least."""
        deepest = max(map(len, acceptance))
        self.depths += [[0.0, 0.0] for _ in range(deepest - len(self.depths))]
        for counts in (self.all, *self.depths):
            counts[:] = [count * FORGET for count in counts]
        if self.together:
            acceptance = [[math.prod(column) for column in zip(*acceptance, strict=False)]]
        for row in acceptance:
            for counts, before, chance in zip(self.depths, [1.0, *row], row, strict=False):
                for kept_and_tried in (self.all, counts):
                    kept_and_tried[0] += chance
                    kept_and_tried[1] += before

    def chances(self, count: int) -> list[float]:
        """S_i for i = 1 to `count`."""
        ratio, chance, found = self.all[0] / self.all[1], 1.0, []
        for depth in range(count):
            kept, tried = self.depths[depth] if depth < len(self.depths) else (0.0, 0.0)
            chance *= (kept + WEIGHT * ratio) / (tried + WEIGHT)
            found.append(chance)
        return found
