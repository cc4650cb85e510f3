"""How many candidates were accepted: α, the rate by position, tokens per round."""

import datasets
import evaluate


DESCRIPTION = "How many of the candidates that a draft model proposed were accepted in speculative sampling."
INPUTS = """
A round without candidates is a plain step, and is not counted.

Args:
    predictions: for each row, how many candidates each of its rounds accepted, ints.
    references: for each row, how many candidates the same rounds drafted, ints.
    overlaps: for each row, sum_x min(p, q) of each judged candidate in order, floats from 0 to 1; None if not known.

Returns:
    alpha: mean of `overlaps`, as in the paper; without them accepted / judged, which estimates it under token
        verification (block verification keeps more). A candidate is judged if its predecessors were accepted.
    acceptance_rate: accepted / drafted, as vLLM counts; not alpha.
    per_position: for each position i, the share of rounds that accepted candidate i, among those that drafted it.
    tokens_per_round: 1 + accepted / rounds, the tokens that a row gains in a round if it does not stop.
    rounds: rounds with candidates, over all rows.
    overlap: mean of `overlaps`; None without them.
    Without rounds `tokens_per_round` is 1, and all other ratios are 0.

Raises:
    ValueError: rows, rounds or overlaps do not fit each other.

Example:
    >>> acceptance.compute(predictions=[[4, 1]], references=[[4, 4]])
    {'alpha': 0.833, 'acceptance_rate': 0.625, 'per_position': [1.0, 0.5, 0.5, 0.5], 'tokens_per_round': 3.5, ...}
"""
CITATION = "Leviathan, Kalman, Matias 2023, Fast Inference from Transformers via Speculative Decoding, 2211.17192."


class Acceptance(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        counts = datasets.Sequence(datasets.Value("int64"))
        features = datasets.Features({"predictions": counts, "references": counts})
        return evaluate.MetricInfo(
            description=DESCRIPTION, citation=CITATION, inputs_description=INPUTS, features=features
        )

    def _compute(
        self,
        predictions: list[list[int]],
        references: list[list[int]],
        overlaps: list[list[float]] | None = None,
    ) -> dict[str, object]:
        rounds = [pair for row in zip(predictions, references, strict=True) for pair in _rounds(*row)]
        num_accepted = sum(accepted for accepted, _ in rounds)
        num_drafted = sum(drafted for _, drafted in rounds)
        num_judged = sum(min(accepted + 1, drafted) for accepted, drafted in rounds)
        values = [value for row in overlaps or [] for value in row]
        overlap = None if overlaps is None else _share(sum(values), len(values))
        if len(values) > num_judged or not all(-1e-4 <= value <= 1 + 1e-4 for value in values):
            raise ValueError(
                f"overlaps: give sum_x min(p, q), 0 to 1, of the {num_judged} judged candidates and no others."
            )
        longest = max((drafted for _, drafted in rounds), default=0)
        return {
            "alpha": _share(num_accepted, num_judged) if overlap is None else overlap,
            "acceptance_rate": _share(num_accepted, num_drafted),
            "per_position": [_share_at(rounds, position) for position in range(longest)],
            "tokens_per_round": 1 + _share(num_accepted, len(rounds)),
            "rounds": len(rounds),
            "overlap": overlap,
        }


def _rounds(accepted: list[int], drafted: list[int]) -> list[tuple[int, int]]:
    """The accepted and drafted candidates of each round of a row that has any."""
    if len(accepted) != len(drafted) or not all(0 <= k <= n for k, n in zip(accepted, drafted, strict=True)):
        raise ValueError(
            f"a row has accepted={accepted} of drafted={drafted}; give both for the same rounds, and 0 to all of the "
            "candidates as accepted."
        )
    return [(k, n) for k, n in zip(accepted, drafted, strict=True) if n]


def _share_at(rounds: list[tuple[int, int]], position: int) -> float:
    """The share of rounds that accepted the candidate at a position, among those that drafted it."""
    num_accepted = sum(accepted > position for accepted, _ in rounds)
    return _share(num_accepted, sum(drafted > position for _, drafted in rounds))


def _share(part: float, whole: int) -> float:
    return float(part / whole) if whole else 0.0
