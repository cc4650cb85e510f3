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
        verification. A candidate is judged if its predecessors were accepted: min(accepted + 1, drafted) in a round.
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
CITATION = """@inproceedings{leviathan2023fast,
  title={Fast Inference from Transformers via Speculative Decoding},
  author={Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
  booktitle={ICML},
  year={2023},
  url={https://arxiv.org/abs/2211.17192}
}"""


class Acceptance(evaluate.Metric):
    """See `INPUTS`."""

    def _info(self) -> evaluate.MetricInfo:
        counts = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": counts, "references": counts}),
            reference_urls=["https://arxiv.org/abs/2211.17192"],
        )

    def _compute(
        self,
        predictions: list[list[int]],
        references: list[list[int]],
        overlaps: list[list[float]] | None = None,
    ) -> dict[str, object]:
        _check(predictions, references, overlaps)
        rounds = [pair for row in zip(predictions, references, strict=True) for pair in _rounds(*row)]
        accepted, drafted = sum(kept for kept, _ in rounds), sum(number for _, number in rounds)
        judged = sum(min(kept + 1, number) for kept, number in rounds)
        overlap = None if overlaps is None else _share(sum(map(sum, overlaps)), sum(map(len, overlaps)))
        return {
            "alpha": _share(accepted, judged) if overlap is None else overlap,
            "acceptance_rate": _share(accepted, drafted),
            "per_position": [
                _share(sum(kept > i for kept, _ in rounds), sum(number > i for _, number in rounds))
                for i in range(max((number for _, number in rounds), default=0))
            ],
            "tokens_per_round": 1 + _share(accepted, len(rounds)),
            "rounds": len(rounds),
            "overlap": overlap,
        }


def _rounds(accepted: list[int], drafted: list[int]) -> list[tuple[int, int]]:
    return [(kept, number) for kept, number in zip(accepted, drafted, strict=True) if number]


def _share(part: float, whole: int) -> float:
    return float(part / whole) if whole else 0.0


def _check(accepted: list[list[int]], drafted: list[list[int]], overlaps: list[list[float]] | None) -> None:
    for row, (kept, numbers) in enumerate(zip(accepted, drafted, strict=True)):
        if len(kept) != len(numbers):
            raise ValueError(f"row {row} has accepted={kept} for drafted={numbers}; give both for the same rounds.")
        if not all(0 <= k <= n for k, n in zip(kept, numbers, strict=True)):
            raise ValueError(f"row {row} has accepted={kept} of drafted={numbers}; it must be 0 to all of them.")
    if overlaps is None:
        return
    if len(overlaps) != len(accepted):
        raise ValueError(f"overlaps has {len(overlaps)} rows and predictions {len(accepted)}; give one for each row.")
    for row, values in enumerate(overlaps):
        judged = sum(min(k + 1, n) for k, n in _rounds(accepted[row], drafted[row]))
        if len(values) > judged:
            raise ValueError(
                f"row {row} has {len(values)} overlaps for {judged} judged candidates; leave out those "
                "after the first rejection of each round."
            )
        if not all(-1e-4 <= value <= 1 + 1e-4 for value in values):
            raise ValueError(f"overlaps of row {row} are not within 0 and 1; give sum_x min(p, q) of probabilities.")
