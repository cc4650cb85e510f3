"""What speed to expect of a draft, by what rounds take on this machine; and why it was another."""

import math
import statistics
from collections import defaultdict
from typing import NamedTuple

from hf_specx.drafting.draft_length import expected_tokens

from .timer import Comparison


PARTED = 0.1  # a prediction that is wrong by more than this part is explained
UNLIKELY = 1e-9  # chances below it are left out


class Prediction(NamedTuple):
    """The chance that a candidate is kept, and how many a round has. A round takes as long as those of the warm-up."""

    alpha: float
    number: int

    def speedup(self, found: Comparison) -> float:
        """How many times as fast as plain `generate` was, with texts as long as its own and a first step like its."""
        steps = round(statistics.median(run.steps for run in found.plain.runs))
        rows = round(statistics.median(run.tokens / run.steps for run in found.plain.runs))
        rounds = expected_rounds(self.alpha, self.number, steps - 1, rows)
        return steps * found.plain_step / (found.plain_step + rounds * found.warm_up_round)

    def why_not(self, found: Comparison) -> str:
        """Why the measured speed-up is another: what differs most; "" where it is the predicted one, nearly."""
        measured, predicted = found.ratios["measured_speedup"], self.speedup(found)
        if abs(predicted / measured - 1) <= PARTED:
            return ""
        tokens, expected = found.ours.median_of("tokens_per_round") or 1.0, expected_tokens(self.alpha, self.number)
        seconds = statistics.median(map(found.seconds_per_round, found.ours.reports))
        reasons = {
            f"a row gained {tokens:.2f} tokens a round, not {expected:.2f}": tokens / expected,
            f"a round took {1e3 * seconds:.1f} ms, not {1e3 * found.warm_up_round:.1f}": found.warm_up_round / seconds,
        }
        rest = measured / predicted / math.prod(reasons.values())
        reasons["texts had other lengths, or the machine was unsteady"] = rest
        told = max(reasons, key=lambda reason: abs(math.log(reasons[reason])))
        return f"predicted {predicted:.2f}, measured {measured:.2f}, mostly because {told}"


def expected_rounds(alpha: float, number: int, tokens: int, rows: int) -> float:
    """Rounds until the slowest of `rows` has so many tokens; the last round of a row may bring more than it needs."""
    gains = [alpha**kept * (1 - alpha) for kept in range(number)] + [alpha**number]  # chances of 1, 2, ... tokens
    left, rounds = {tokens: 1.0}, 0.0  # the chances that a row still needs so many
    while left := {needed: chance for needed, chance in left.items() if needed > 0 and chance > UNLIKELY}:
        rounds += 1 - (1 - sum(left.values())) ** rows
        after: defaultdict[int, float] = defaultdict(float)
        for needed, chance in left.items():
            for gained, share in enumerate(gains, 1):
                after[needed - gained] += chance * share
        left = after
    return rounds
