"""What speed to expect of a draft, by what rounds take on this machine; and why it was another."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from hf_specx.drafting.costs import Costs
from hf_specx.drafting.draft_length import expected_tokens
from hf_specx.engine.report import SpeculationReport

from .timer import Comparison, seconds_per_step


PARTED = 0.1  # a prediction that is wrong by more than this part is explained


class Prediction(NamedTuple):
    """What a row is expected to gain in a round, how many seconds the round takes, and how long texts are."""

    tokens: float
    seconds: float
    new_tokens: int

    def speedup(self, plain_step: float) -> float:
        """How many times as fast as plain `generate`, a step of which takes so many seconds, as our first one does."""
        rounds = (self.new_tokens - 1) / self.tokens
        return self.new_tokens * plain_step / (plain_step + rounds * self.seconds)

    def why_not(self, found: Comparison) -> str:
        """Why the measured speed-up is another: what differs most; "" where it is the predicted one, nearly."""
        measured, predicted = found.ratios["measured_speedup"], self.speedup(found.plain_step)
        if abs(predicted / measured - 1) <= PARTED:
            return ""
        tokens, seconds = found.ours.median_of("tokens_per_round") or 1.0, found.round_seconds
        reasons = {
            f"a row gained {tokens:.2f} tokens a round, not {self.tokens:.2f}": tokens / self.tokens,
            f"a round took {1e3 * seconds:.1f} ms, not {1e3 * self.seconds:.1f}": self.seconds / seconds,
        }
        rest = measured / predicted / math.prod(reasons.values())
        reasons["of short texts, of rows that waited for longer ones, or of an unsteady machine"] = rest
        told = max(reasons, key=lambda reason: abs(math.log(reasons[reason])))
        return f"predicted {predicted:.2f}, measured {measured:.2f}, mostly because {told}"


def predict(costs: Costs, learned: Sequence[SpeculationReport], rows: int, number: int, new_tokens: int) -> Prediction:
    """What to expect of batches of `rows` with so many candidates a round, or as many as texts have room for.

    `learned` are of calls that have shown the acceptance, and how much longer rounds take than their forwards.
    """
    beside = [
        seconds_per_step(report) / costs.forwards(report.rows, round(report.mean_draft_tokens)) for report in learned
    ]
    alpha, number = costs.alpha.get(learned[0].verification, 0.0), min(number, new_tokens - 1)
    seconds = statistics.median(beside) * costs.forwards(rows, number)
    return Prediction(expected_tokens(alpha, number), seconds, new_tokens)
