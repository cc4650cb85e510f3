"""How many tokens to draft next, and when to draft none: formulas of Leviathan et al. 2022, and estimates of a call.

There is only arithmetic here, no model and no clock. How long rounds take is in `costs`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


MAX_DRAFT_TOKENS = 8  # the largest number that "auto" considers
FIXED_DRAFT_TOKENS = 5  # what "auto" drafts if costs are not known or must not be used
PRIOR_ALPHA = 0.7  # acceptance assumed before any was seen
PRIOR_WEIGHT, LEARNED_WEIGHT = 4.0, 6.0  # candidates that this, or what earlier calls have seen, is worth
DEPTH_WEIGHT = 4.0  # how many candidates the mean of all depths is worth at each depth
FORGET = 0.98  # factor on the weight of earlier rounds at each round
LEAST_WEIGHT = 6.0  # in candidates: the weight of earlier rounds is not reduced below this
OFF, ON = 0.95, 1.03  # speed compared with plain steps: below OFF drafting ends, above ON it resumes
PATIENCE = 32  # rounds for which drafting may be slower than plain steps at all
EVIDENCE = 4.0  # tokens to be expected of rounds before a draft of which nothing was known can pause
HASTE = 8  # weight of a row: its open tokens to this power, since the call ends with the last row
FIRST_WAIT, LAST_WAIT = 32, 1024  # plain steps before the first probe, and at most before later ones
PROBE_SHARE = 0.01  # a later probe may take this share of the time of the plain steps before it


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round, (1 - α^(γ+1)) / (1 - α); Equation 1."""
    if alpha >= 1:
        return float(num_draft_tokens + 1)
    return (1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha)


def expected_speedup(alpha: float, num_draft_tokens: int, cost_coefficient: float) -> float:
    """Expected factor on the time, if a forward of γ+1 tokens took as long as one of 1; Theorem 3.8."""
    return expected_tokens(alpha, num_draft_tokens) / (num_draft_tokens * cost_coefficient + 1)


class Outcome(NamedTuple):
    """What a round did, as far as the number of candidates of the next one depends on it.

    Attributes:
        drafted: the most candidates of a row, K.
        survival: for each row that took part, `Verdict.survival` at its own candidates.
        left: [R], how many tokens each row could still emit before the round, at least 1.
    """

    drafted: int
    survival: list[list[float]]
    left: list[int]


class Survival:
    """The chance S_i that the first i candidates of a row are all kept, from the rounds so far.

    It is the product of estimated ratios S_i / S_{i-1}. They come from the probabilities at all candidates, also after
    a rejection, so they have no bias. A depth i that was seldom seen is estimated by the mean of all. Rows are pooled;
    those with more tokens to go count more.

    Args:
        alpha: the estimate of all ratios at first.
        weight: how many candidates that is worth as evidence.
        together: whether all rows advance as the slowest one; then S_i is the chance that all rows keep i candidates.
    """

    def __init__(self, alpha: float, weight: float, together: bool = False):
        self.together = together
        self.alpha = [alpha * weight, weight]  # kept and tried at all depths
        self.depths = [[0.0, 0.0] for _ in range(MAX_DRAFT_TOKENS)]  # the same at each depth

    def take(self, outcome: Outcome) -> float:
        """Count a round; returns the tokens that a row could expect from it."""
        worth = max(FORGET, min(1.0, LEAST_WEIGHT / self.alpha[1]))
        for counts in (self.alpha, *self.depths):
            counts[:] = [count * worth for count in counts]
        rows, weights = outcome.survival, [(left / max(outcome.left)) ** HASTE for left in outcome.left]
        if self.together:
            rows, weights = [[math.prod(column) for column in zip(*rows, strict=False)]], [1.0]
        scale, tokens = len(rows) / sum(weights), 1.0
        for row, weight in zip(rows, weights, strict=True):
            before = share = weight * scale
            for counts, chance in zip(self.depths, row, strict=False):
                for kept_and_tried in (self.alpha, counts):
                    kept_and_tried[0] += share * chance
                    kept_and_tried[1] += before
                before = share * chance
                tokens += before / len(rows)
        return tokens

    @property
    def ratio(self) -> float:
        """The estimate of S_i / S_{i-1} by all depths."""
        return self.alpha[0] / self.alpha[1]

    def expected_tokens(self) -> list[float]:
        """E(γ) = 1 + S_1 + ... + S_γ for γ = 0 to `MAX_DRAFT_TOKENS`."""
        chance, tokens = 1.0, [1.0]
        for kept, tried in self.depths:
            chance *= (kept + DEPTH_WEIGHT * self.ratio) / (tried + DEPTH_WEIGHT)
            tokens.append(tokens[-1] + chance)
        return tokens


class Chooser:
    """Chooses the number of candidates of each round: the γ with the largest rate G(γ) = E(γ) / T(γ), by trying all.

    Drafting ends when its rate falls below `OFF` times that of plain steps, or is below that of plain steps for
    `PATIENCE` rounds; it resumes above `ON` times. Meanwhile it is probed by single rounds: after 32 plain steps, then
    after 64 and so on, if a probe takes little time compared with these steps. Probing goes on while its rounds are
    faster than plain steps. If acceptance was never seen, a call begins with candidates, whatever the estimate says.

    Args:
        survival: gives E.
        known: whether acceptance was seen in earlier calls.

    Attributes:
        on: whether the last choice was to draft.
        doubts: consecutive rounds in which drafting has seemed slower.
        plain: plain steps since the last round with candidates.
        wait: plain steps before the next probe.
    """

    def __init__(self, survival: Survival, known: bool):
        self.survival, self.on, self.doubts = survival, True, 0
        self.unseen = 0.0 if known else EVIDENCE
        self.plain, self.wait = 0, FIRST_WAIT
        self.probed = 0.0, 0.0  # tokens and seconds of a probe so far

    def first(self, times: Sequence[float], room: int) -> int:
        """The number for the first round of a call; if drafting seems slower, a probe or 0.

        Args:
            times: T(γ) for γ = 0 to `MAX_DRAFT_TOKENS`, in seconds.
            room: how many tokens a row may emit.
        """
        best, gain = self._best(times)
        self.on = gain >= 1 or self.unseen > 0
        return best if self.on or times[best] - times[0] <= PROBE_SHARE * room * times[0] else 0

    def next(self, outcome: Outcome, times: Sequence[float], catch_up: Callable[[int], float]) -> int:
        """The number for the next round.

        Args:
            outcome: of the last round.
            times: T(γ) for γ = 0 to `MAX_DRAFT_TOKENS`, in seconds, at the number of rows that still decode.
            catch_up: seconds that the draft takes to read so many tokens of each row.
        """
        tokens = self.survival.take(outcome)
        best, gain = self._best(times)
        self.doubts = 0 if gain >= 1 else self.doubts + 1
        if outcome.drafted:
            self.unseen -= tokens * (1 if self.survival.together else len(outcome.survival))
        kept_up = self.unseen > 0 or (gain >= OFF and self.doubts < PATIENCE)
        if gain > ON or (self.on and kept_up):
            self.on = True
            self._rest(FIRST_WAIT)
            return best
        if self.on:
            self.on = False
            return 0
        if outcome.drafted:
            self.probed = self.probed[0] + tokens, self.probed[1] + times[outcome.drafted]
            if self.probed[0] * times[0] >= self.probed[1]:
                return best
            self._rest(min(LAST_WAIT, 2 * self.wait))
            return 0
        self.plain += 1
        return best if self._is_due(best, times, catch_up) else 0

    def _rest(self, wait: int) -> None:
        self.plain, self.wait, self.probed = 0, wait, (0.0, 0.0)

    def _best(self, times: Sequence[float]) -> tuple[int, float]:
        """The best γ from 1 on, and its rate compared with that of plain steps."""
        tokens = self.survival.expected_tokens()
        rates = [expected / seconds for expected, seconds in zip(tokens, times, strict=True)]
        best = max(range(1, len(rates)), key=rates.__getitem__)
        return best, rates[best] / rates[0]

    def _is_due(self, best: int, times: Sequence[float], catch_up: Callable[[int], float]) -> bool:
        if self.plain < self.wait:
            return False
        extra = times[best] - times[0] + catch_up(self.plain)
        return self.wait == FIRST_WAIT or extra <= PROBE_SHARE * self.plain * times[0]
