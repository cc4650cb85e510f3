"""Whether two texts are the same tokens, and where they first differ."""

import datasets
import evaluate


DESCRIPTION = "Whether sequences of tokens are equal, and the index of the first difference of each row."
INPUTS = """
Args:
    predictions: token ids of each row, without pads.
    references: those that they should be.

Returns:
    exact_match: share of equal rows.
    equal: for each row, whether it is equal.
    first_difference: for each row, the index of the first token that differs, or -1. If one sequence is the beginning
        of the other, they differ where it ends.

Raises:
    ValueError: there are no rows.

Example:
    >>> sequence_equality.compute(predictions=[[1, 2], [1, 2]], references=[[1, 2], [1, 3]])
    {'exact_match': 0.5, 'equal': [True, False], 'first_difference': [-1, 1]}
"""


class SequenceEquality(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Sequence(datasets.Value("int64"))
        features = datasets.Features({"predictions": ids, "references": ids})
        return evaluate.MetricInfo(description=DESCRIPTION, citation="", inputs_description=INPUTS, features=features)

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, object]:
        if not predictions:
            raise ValueError("predictions has no rows; give one at least.")
        differences = [_first_difference(*rows) for rows in zip(predictions, references, strict=True)]
        equal = [index < 0 for index in differences]
        return {"exact_match": sum(equal) / len(equal), "equal": equal, "first_difference": differences}


def _first_difference(left: list[int], right: list[int]) -> int:
    """The index of the first token that differs, or -1."""
    shorter = min(len(left), len(right))
    end = -1 if len(left) == len(right) else shorter
    return next((i for i in range(shorter) if left[i] != right[i]), end)
