"""How many tokens to draft, and what that should bring: the theory of Leviathan et al. 2022 and a table of costs.

The table holds times of bare forwards, so that choosing needs no clock while tokens are drawn.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any


MAX_DRAFT_TOKENS = 8  # the largest number that "auto" considers
PRIOR_ALPHA = 0.7  # acceptance assumed before any was seen
MEMORY = 100  # candidates that the past counts for when a call is taken in
QUERY_LENGTHS = (1, 2, 3, 5, 9)  # target forwards that are timed
TIMED_ROUNDS = 5  # times that each of them is timed
DRAFT_STEPS = 4  # draft steps that are timed between two of them
GRID = 2 ** (1 / 8)  # times are kept on a geometric grid, so that noise rarely changes a choice


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


class Costs:
    """What choosing a number of drafts goes by; kept by a strategy as `strategy.costs`.

    With the same costs and seed, two processes draft the same numbers.

    Attributes:
        table: seconds of bare forwards, by batch size: {"target": {query length: seconds}, "draft": seconds}.
        alpha: acceptance in the calls so far, by verification; `PRIOR_ALPHA` before the first.
    """

    def __init__(self, table: dict[int, dict[str, Any]] | None = None, alpha: dict[str, float] | None = None):
        self.table: dict[int, dict[str, Any]] = table or {}
        self.alpha: dict[str, float] = alpha or {}

    def __repr__(self) -> str:
        """Batch sizes that were measured, and acceptance so far."""
        alpha = ", ".join(f"{verification}: {value:.3f}" for verification, value in self.alpha.items())
        return f"Costs(batch sizes {sorted(self.table)}, acceptance {{{alpha}}})"

    def remember(self, verification: str, alpha: float, judged: int) -> None:
        """Take in the acceptance of a call, weighed by the candidates it judged."""
        old = self.alpha.get(verification, PRIOR_ALPHA)
        self.alpha[verification] = old + (alpha - old) * judged / (judged + MEMORY)

    def target(self, batch: int, query_length: int) -> float:
        """T_t(B, q), between measured lengths a straight line."""
        known = sorted(self.table[batch]["target"].items())
        for (q0, t0), (q1, t1) in itertools.pairwise(known):
            if query_length <= q1:
                return t0 + (t1 - t0) * (query_length - q0) / (q1 - q0)
        (q0, t0), (q1, t1) = known[-2:]
        return t1 + max(0.0, (t1 - t0) / (q1 - q0)) * (query_length - q1)

    def draft(self, batch: int) -> float:
        """T_d(B, 1)."""
        return self.table[batch]["draft"]

    def cost_coefficient(self, batch: int) -> float:
        """c, a draft step over a target step."""
        return self.draft(batch) / self.target(batch, 1)

    def forward_limited_speedup(self, batch: int, tokens_per_round: float, num_draft_tokens: int) -> float:
        """Ê T_t(B, 1) / (T_t(B, γ+1) + γ T_d(B, 1)): Theorem 3.8 without its assumption on the larger forward."""
        round_time = self.target(batch, num_draft_tokens + 1) + num_draft_tokens * self.draft(batch)
        return tokens_per_round * self.target(batch, 1) / round_time

    def best_num_draft_tokens(self, batch: int, verification: str) -> int:
        """The γ from 1 to `MAX_DRAFT_TOKENS` with the largest `forward_limited_speedup`; every one is tried."""
        alpha = self.alpha.get(verification, PRIOR_ALPHA)
        return max(
            range(1, MAX_DRAFT_TOKENS + 1),
            key=lambda g: self.forward_limited_speedup(batch, expected_tokens(alpha, g), g),
        )

    def measure(self, batch: int, target: Callable[[int], object], draft: Callable[[int], object]) -> None:
        """Fill the row of a batch size: medians over a few rounds in which the models take turns.

        In turns, because on a processor with a small cache each model pushes the other's weights out of it.

        Args:
            batch: B.
            target: runs one target forward of that many tokens a row, and waits for it.
            draft: the same for the draft.
        """
        times: dict[int, list[float]] = {q: [] for q in QUERY_LENGTHS}
        steps: list[float] = []
        for _ in range(1 + TIMED_ROUNDS):
            for query_length, seconds in times.items():
                seconds.append(_seconds(target, query_length))
                steps.append(sum(_seconds(draft, 1) for _ in range(DRAFT_STEPS)) / DRAFT_STEPS)
        medians = {q: _on_grid(statistics.median(seconds[1:])) for q, seconds in times.items()}  # the first warms up
        self.table[batch] = {"target": medians, "draft": _on_grid(statistics.median(steps[len(times) :]))}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with text keys as JSON wants them."""
        table = {
            str(batch): {"target": {str(q): t for q, t in row["target"].items()}, "draft": row["draft"]}
            for batch, row in self.table.items()
        }
        return {"table": table, "alpha": dict(self.alpha)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Costs":
        """The inverse of `to_dict`."""
        table = {
            int(batch): {"target": {int(q): float(t) for q, t in row["target"].items()}, "draft": float(row["draft"])}
            for batch, row in values["table"].items()
        }
        return cls(table, dict(values["alpha"]))


def _seconds(forward: Callable[[int], object], query_length: int) -> float:
    started = time.perf_counter()
    forward(query_length)
    return time.perf_counter() - started


def _on_grid(seconds: float) -> float:
    return GRID ** round(math.log(seconds, GRID))
