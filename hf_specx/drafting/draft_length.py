"""How many tokens to draft next, and when not to: the theory of Leviathan et al. 2022, and what a call learns of it.

Arithmetic alone: it knows no model and no clock. How long rounds take is in `costs`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


MAX_DRAFT_TOKENS = 8  # the largest number that "auto" considers
FIXED_DRAFT_TOKENS = 5  # "auto" where costs are not known, or must not count
PRIOR_ALPHA = 0.7  # acceptance assumed before any was seen
PRIOR_WEIGHT, LEARNED_WEIGHT = 4.0, 6.0  # candidates that this counts for, and what earlier calls have seen
DEPTH_WEIGHT = 4.0  # candidates that the mean of all depths counts for at each of them
FORGET = 0.98  # what a round is worth one round later
LEAST_WEIGHT = 6.0  # candidates' worth that are never forgotten
OFF, ON = 0.95, 1.03  # how fast drafting must be beside not drafting to be kept up, and to be taken up again
PATIENCE = 32  # rounds for which it may be the slower one at all
EVIDENCE = 4.0  # candidates that are to be judged before a draft of which nothing was known can be let rest
HASTE = 8  # rows count by their open tokens to this power, as the call ends with the last one
FIRST_WAIT, LAST_WAIT = 32, 1024  # plain steps before the first probe, and before later ones at most
PROBE_SHARE = 0.01  # of the time of plain steps that later probes may take


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Tokens a round, (1 - α^(γ+1)) / (1 - α); Equation 1."""
    if alpha >= 1:
        return float(num_draft_tokens + 1)
    return (1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha)


def expected_speedup(alpha: float, num_draft_tokens: int, cost_coefficient: float) -> float:
    """Expected factor on the time, if a forward of γ+1 tokens took as long as one of 1; Theorem 3.8."""
    return expected_tokens(alpha, num_draft_tokens) / (num_draft_tokens * cost_coefficient + 1)


def expected_operations(alpha: float, num_draft_tokens: int, operations_coefficient: float) -> float:
    """Expected factor on the arithmetic operations; Theorem 3.11."""
    work = num_draft_tokens * operations_coefficient + num_draft_tokens + 1
    return work / expected_tokens(alpha, num_draft_tokens)


class Outcome(NamedTuple):
    """What came of a round, as far as the number of the next one goes by it.

    Attributes:
        drafted: the most candidates of a row, K.
        survival: for each row that took part, the chance that its first i candidates are all kept, i = 1 to K or as
            far as it was judged, given what was drafted: `Verdict.survival`.
        left: tokens that each of them may still have emitted before the round, at least 1.
    """

    drafted: int
    survival: list[list[float]]
    left: list[int]


class Survival:
    """The chance S_i that the first i candidates of a row are all kept, from the rounds so far.

    Estimated by the ratios S_i / S_{i-1}, from the probabilities at all drafted positions, so that nothing is censored
    where a round was rejected. A depth of which little was seen is taken for the mean of all. Rows are pooled, since
    the sum of their tokens is that of as many mean rows; those that have fallen behind count more.

    Args:
        alpha: what all ratios are taken for at first.
        weight: candidates that this counts for.
        together: whether rows advance by the least of the batch; then it is the chance that all rows keep them.
    """

    def __init__(self, alpha: float, weight: float, together: bool = False):
        self.together = together
        self.alpha = [alpha * weight, weight]  # kept and tried at all depths
        self.depths = [[0.0, 0.0] for _ in range(MAX_DRAFT_TOKENS)]  # the same at each

    def take(self, outcome: Outcome) -> float:
        """Take in a round; returns the tokens that a row could expect of it."""
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

    def expected_tokens(self) -> list[float]:
        """E(γ) = 1 + S_1 + ... + S_γ for γ = 0 to `MAX_DRAFT_TOKENS`."""
        alpha = self.alpha[0] / self.alpha[1]
        chance, tokens = 1.0, [1.0]
        for kept, tried in self.depths:
            chance *= (kept + DEPTH_WEIGHT * alpha) / (tried + DEPTH_WEIGHT)
            tokens.append(tokens[-1] + chance)
        return tokens


class Chooser:
    """The number of candidates of the next round: the γ with the largest rate G(γ) = E(γ) / T(γ), every one tried.

    Drafting ends when its rate falls below `OFF` times that of not drafting, or stays below it for `PATIENCE` rounds,
    and is taken up again above `ON` times. In between it is probed: after 32 plain steps, then 64 and so on, if
    catching up with the text takes little beside them. A probe goes on while its rounds alone are better than plain
    steps. Where acceptance was never seen, a call begins with candidates, whatever is assumed of them.

    Args:
        survival: what E goes by.
        known: whether it goes by anything that was seen.

    Attributes:
        on: whether the last choice was for drafting.
        doubts: rounds since it last seemed the better one.
        plain: plain steps since a round drafted.
        wait: how many of them there are to be before a probe.
    """

    def __init__(self, survival: Survival, known: bool):
        self.survival, self.on, self.doubts = survival, True, 0
        self.unseen = 0.0 if known else EVIDENCE
        self.plain, self.wait = 0, FIRST_WAIT
        self.probed = 0.0, 0.0  # tokens and seconds of a probe so far

    def first(self, times: Sequence[float], room: int) -> int:
        """The number for the first round of a call; a probe if drafting does not seem worth it.

        Args:
            times: T(γ) for γ = 0 to `MAX_DRAFT_TOKENS`, in seconds.
            room: tokens that may be emitted.
        """
        best, gain = self._best(times)
        self.on = gain >= 1 or self.unseen > 0
        return best if self.on or times[best] - times[0] <= PROBE_SHARE * room * times[0] else 0

    def next(self, outcome: Outcome, times: Sequence[float], catch_up: Callable[[int], float]) -> int:
        """The number for the next round.

        Args:
            outcome: of the last one.
            times: T(γ) at the present batch size.
            catch_up: seconds that a draft takes to read so many tokens a row.
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
        """The best γ from 1 on, and its rate over that of plain decoding."""
        tokens = self.survival.expected_tokens()
        rates = [expected / seconds for expected, seconds in zip(tokens, times, strict=True)]
        best = max(range(1, len(rates)), key=rates.__getitem__)
        return best, rates[best] / rates[0]

    def _is_due(self, best: int, times: Sequence[float], catch_up: Callable[[int], float]) -> bool:
        if self.plain < self.wait:
            return False
        extra = times[best] - times[0] + catch_up(self.plain)
        return self.wait == FIRST_WAIT or extra <= PROBE_SHARE * self.plain * times[0]
