"""two_samples: statistics by hand, p-values by enumeration, false alarms with dependent tokens, and what is seen."""

from itertools import product

import numpy as np
import pytest
from metric_modules import load, script
from scipy import stats


def chains(rows: int, seed: int, stay: float = 0.9, steps: int = 20) -> np.ndarray:
    """Tokens 0 to 5 that mostly stay what they were, so that those of a row depend on each other: [rows, steps]."""
    rng = np.random.default_rng(seed)
    moves = np.where(rng.random((rows, steps)) < stay, 0, rng.integers(1, 6, (rows, steps)))
    moves[:, 0] = rng.integers(0, 6, rows)
    return moves.cumsum(1) % 6


def judge(left, right, **options) -> dict:
    return load("two_samples").compute(predictions=left, references=right, **options)


def test_statistics_by_hand():
    samples = script("two_samples")
    left, right = np.array([1.0, 1.0, 0.0]), np.array([2.0, 0.0, 2.0])
    assert samples.chi_square(left, right) == pytest.approx(0.5 + 0.5)  # (1/2, 1/2, 0) and (1/2, 0, 1/2)
    assert samples.kolmogorov_smirnov(left, right) == pytest.approx(0.5)
    assert samples.chi_square(left, left) == samples.kolmogorov_smirnov(right, right) == 0
    found = judge([[1, 2], [1]] * 6, [[1, 3], [1]] * 6, level=0.1, permutations=99)["statistics"]
    assert found["tokens"]["statistic"] == pytest.approx(2 / 3)
    assert found["bigrams"]["statistic"] == pytest.approx(2.0)
    assert set(found) == {"tokens", "bigrams"}  # no exchange changes the others


def test_p_values_are_those_of_all_exchanges():
    """Within five sigma of the share among all 2^10 exchanges of 10 pairs."""
    left, right = chains(10, 0, steps=4), chains(10, 1, steps=4)
    found = judge(left, right, level=0.05, permutations=9999)["statistics"]["tokens"]
    samples = script("two_samples")
    counts = np.array([[np.bincount(row, minlength=6) for row in rows] for rows in (left, right)])  # [2, 10, 6]
    swaps = np.array(list(product([0, 1], repeat=10)))  # [1024, 10]
    one = counts[swaps, np.arange(10)].sum(1)  # [1024, 6]
    values = samples.chi_square(one, counts.sum((0, 1)) - one)
    exact = (values >= values[0] - 1e-12).mean()
    assert 0.01 < exact < 0.99
    assert found["statistic"] == pytest.approx(values[0])
    assert abs(found["p_value"] - exact) < 5 * (exact * (1 - exact) / 9999) ** 0.5 + 1e-4
    assert found["expected"] == pytest.approx(values.mean(), abs=5 * values.std() / 9999**0.5)
    assert found["deviation"] == pytest.approx(values.std(), rel=0.1)


def test_false_alarms_are_as_rare_as_the_level():
    """100 pairs of samples at level 0.1: as many alarms as were seen have probability 1e-4 at least.

    Had tokens been exchanged in place of rows, as a chi-square test of the counts does, most would be alarms.
    """
    options, alarms, naive = {"level": 0.1, "permutations": 199}, 0, 0
    for seed in range(100):
        left, right = chains(30, 2 * seed), chains(30, 2 * seed + 1)
        alarms += not judge(left, right, **options, seed=seed)["passed"]
        table = [np.bincount(rows.ravel(), minlength=6) for rows in (left, right)]
        naive += stats.chi2_contingency(table).pvalue < 0.1
    assert alarms <= stats.binom.isf(1e-4, 100, 0.1)
    assert naive > 50


def test_rows_that_are_one_by_one_alike_pass():
    rows = chains(20, 0)
    found = judge(rows, rows)
    assert (found["passed"], found["p_value"]) == (True, 1.0)


def other_tokens(rows):
    return np.where(rows == 5, 4, rows), "tokens"


def other_order(rows):
    """The same tokens and the same first one; the rest is turned round."""
    return np.concatenate([rows[:, :1], np.sort(rows[:, 1:], 1)], 1), "bigrams"


def other_starts(rows):
    """The same row, begun at its middle."""
    rows = rows.copy()
    places = rows.argmax(1)
    rows[np.arange(len(rows)), places], rows[:, 0] = rows[:, 0], rows.max(1)
    return rows, "first_tokens"


def other_lengths(rows):
    return [row[: 10 + 9 * (i % 2)] for i, row in enumerate(rows.tolist())], "lengths"


@pytest.mark.parametrize("wrong", [other_tokens, other_order, other_starts, other_lengths])
def test_other_laws_are_seen(wrong):
    """By the statistic that is made for it; at the level of 0.001, which right samples of this size pass."""
    plain = chains(100, 0, stay=0.5, steps=14)
    lengths = np.random.default_rng(5).integers(12, 15, (2, 100))
    rows, name = wrong(chains(100, 1, stay=0.5, steps=20)[:, :14] if wrong is not other_lengths else chains(100, 1))
    found = judge(list(rows), [row[:n] for row, n in zip(plain.tolist(), lengths[0], strict=True)])
    assert not found["passed"]
    assert found["statistics"][name]["p_value"] == 1 / 10_001
    right = [row[:n] for row, n in zip(chains(100, 2, stay=0.5, steps=14).tolist(), lengths[1], strict=True)]
    assert judge(right, [row[:n] for row, n in zip(plain.tolist(), lengths[0], strict=True)])["passed"]


def test_the_same_seed_gives_the_same_p_values():
    left, right = chains(30, 0), chains(30, 1)
    first, again, other = (judge(left, right, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_many_kinds_are_judged_in_parts(monkeypatch):
    """As all at once."""
    left, right = chains(30, 0), chains(30, 1)
    whole = judge(left, right)
    monkeypatch.setattr(script("two_samples"), "CELLS", 5000)
    parts = judge(left, right)
    assert parts["p_value"] == whole["p_value"]
    for name, statistic in whole["statistics"].items():
        assert parts["statistics"][name] == pytest.approx(statistic, rel=1e-9)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (20, {"level": 0}, "level=0 is no probability"),
        (20, {"level": 1.5}, "level=1.5 is no probability"),
        (20, {"permutations": 2000}, "permutations=2000 can reach no level=0.001; give 4000 or more"),
        (13, {}, "13 rows have too few exchanges for level=0.001; give 14 rows or more"),
    ],
)
def test_levels_that_cannot_be_reached_are_refused(rows: int, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        judge(chains(rows, 0), chains(rows, 1), **options)


def test_the_numbers_that_are_asked_for_are_enough():
    """Each pair differs in all, so the observed exchange and its mirror are the only ones of their kind."""
    left, right = [[1, 2, 1]] * 14, [[3, 4]] * 14
    assert not judge(left, right, permutations=100_000)["passed"]
