"""Test whether two sets of texts have one distribution, without knowing it: permutation tests over rows."""

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy import sparse, stats


DESCRIPTION = "Tests whether two sets of sampled token sequences have the same distribution, by permuting whole rows."
INPUTS = """
Tokens of one row depend on each other, so whole rows are permuted: if both sets have one distribution, predictions[i]
and references[i] can be exchanged, and each statistic is compared with those after random exchanges. Rows of one
prompt may be in any order; with several prompts, predictions[i] and references[i] must be of the same one (and of the
same row of a batch, if that matters). The two may share their random numbers.

Statistics, of the relative frequencies a and b in the two sets:
    tokens, bigrams: sum (a - b)^2 / (a + b), over all tokens and over all pairs of neighbours within a row.
    first_tokens: the same, of the first token of each row; an empty row counts as a token of its own.
    lengths: the largest distance between the two cumulative distributions (Kolmogorov-Smirnov).

Args:
    predictions: ids of each row, with its end token.
    references: ids of as many rows.
    level: probability of a false alarm, above 0 and below 1, 0.001 unless given.
    permutations: how many random exchanges, 10,000 unless given. If k of them are at least as extreme, the p-value is
        (1 + k) / (1 + permutations), which must be able to reach `level`.
    seed: of the exchanges, 0 unless given.

Returns:
    passed: whether p_value is above `level`.
    p_value: the smallest of the statistics, times their number (Bonferroni), at most 1; 1 if both sets are equal.
    level: as given.
    comparisons: how many statistics were tested; one that no exchange can change is not.
    statistics: by name `statistic`, its mean (`expected`), standard deviation (`deviation`) and `skewness` after
        exchanges, and `p_value` (of this one, without Bonferroni).

Raises:
    ValueError: too few rows or permutations for `level`, or a level outside of 0 to 1.

Example:
    >>> two_samples.compute(predictions=speculative_rows, references=plain_rows)["passed"]
    True
"""
CITATION = """@article{phipson2010permutation,
  title={Permutation P-values Should Never Be Zero},
  author={Phipson, Belinda and Smyth, Gordon K.},
  journal={Statistical Applications in Genetics and Molecular Biology},
  volume={9},
  number={1},
  year={2010}
}"""

CELLS = 2**23  # entries of an array [exchanges, kinds]
TIES = 1e-12  # statistics that differ by less are equal
Statistic = Callable[[np.ndarray, np.ndarray], np.ndarray]


class TwoSamples(evaluate.Metric):
    """See `INPUTS`."""

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(
        self,
        predictions: list[list[int]],
        references: list[list[int]],
        level: float = 0.001,
        permutations: int = 10_000,
        seed: int = 0,
    ) -> dict[str, object]:
        _check(len(predictions), level, permutations)
        found = {}
        for name, (kinds, statistic) in STATISTICS.items():
            tables = _tables([kinds(row) for row in predictions], [kinds(row) for row in references])
            if (tables[0] != tables[1]).nnz:  # else no exchange changes anything
                found[name] = _permuted(*tables, statistic, permutations, seed)
        least = min((values["p_value"] for values in found.values()), default=1.0)
        adjusted = min(1.0, least * max(1, len(found)))
        return {
            "passed": adjusted > level,
            "p_value": adjusted,
            "level": level,
            "comparisons": len(found),
            "statistics": found,
        }


def chi_square(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[...] from counts [..., kinds]: 0 where relative frequencies are equal, 2 where no kind is in both."""
    a, b = _frequencies(left), _frequencies(right)
    return ((a - b) ** 2 / np.maximum(a + b, np.finfo(a.dtype).tiny)).sum(-1)


def kolmogorov_smirnov(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[...] from counts [..., kinds], the kinds in order: 0 to 1."""
    return np.abs((_frequencies(left) - _frequencies(right)).cumsum(-1)).max(-1)


STATISTICS: dict[str, tuple[Callable[[list[int]], Sequence[Hashable]], Statistic]] = {
    "tokens": (lambda row: row, chi_square),
    "bigrams": (lambda row: list(pairwise(row)), chi_square),
    "first_tokens": (lambda row: row[:1] or [-1], chi_square),
    "lengths": (lambda row: [len(row)], kolmogorov_smirnov),
}


def _frequencies(counts: np.ndarray) -> np.ndarray:
    return counts / np.maximum(counts.sum(-1, keepdims=True), 1)


def _tables(
    left: list[Sequence[Hashable]], right: list[Sequence[Hashable]]
) -> tuple[sparse.csr_matrix, sparse.csr_matrix]:
    """How often each row has each kind, for both sets: [rows, kinds], with the sorted kinds of both."""
    found: set[Any] = {kind for row in left + right for kind in row}
    kinds = {kind: i for i, kind in enumerate(sorted(found))}
    return _table(left, kinds), _table(right, kinds)


def _table(rows: list[Sequence[Hashable]], kinds: dict[Hashable, int]) -> sparse.csr_matrix:
    columns = [kinds[kind] for row in rows for kind in row]
    numbers = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    ones = np.ones(len(columns))
    return sparse.csr_matrix((ones, (numbers, columns)), shape=(len(rows), len(kinds)))


def _permuted(
    left: sparse.csr_matrix, right: sparse.csr_matrix, statistic: Statistic, permutations: int, seed: int
) -> dict[str, float]:
    """The statistic of two tables [rows, kinds], its moments after random exchanges, and its p-value."""
    generator = np.random.default_rng(seed)
    total = np.asarray((left + right).sum(0))  # [1, kinds]
    difference = (left - right).T.tocsr()  # [kinds, rows]
    observed = statistic(*(np.asarray(table.sum(0))[0] for table in (left, right)))
    extreme, drawn, size = 0, [], max(1, CELLS // total.size)
    for start in range(0, permutations, size):
        signs = generator.integers(0, 2, (min(size, permutations - start), left.shape[0])) * 2.0 - 1
        exchanged = (difference @ signs.T).T  # [exchanges, kinds]
        values = statistic((total + exchanged) / 2, (total - exchanged) / 2)
        extreme += int((values >= observed - TIES).sum())
        drawn.append(values)
    values = np.concatenate(drawn)
    return {
        "statistic": float(observed),
        "expected": float(values.mean()),
        "deviation": float(values.std()),
        "skewness": float(stats.skew(values)) if np.ptp(values) > TIES else 0.0,
        "p_value": (1 + extreme) / (1 + permutations),
    }


def _check(rows: int, level: float, permutations: int) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level={level} is no probability of a false alarm; give one above 0 and below 1.")
    number = len(STATISTICS)
    needed = int(np.ceil(number / level))
    if number / (1 + permutations) >= level:
        raise ValueError(f"permutations={permutations} can reach no level={level}; give {needed} or more.")
    if number * 2.0 ** (2 - rows) >= level:  # an exchange and its mirror, and as much again for chance
        needed = int(np.log2(number / level)) + 3
        raise ValueError(f"{rows} rows have too few exchanges for level={level}; give {needed} rows or more.")
