"""What a check says that it would have seen: each formula against a simulation, at the level and at the deviation.

A test rejects at its stated smallest deviation in 0.9 of all runs. Counts are held against the binomial law of RUNS
runs with a false-alarm probability of 1e-4 on either side, after what an approximation is said to be off by.
"""

import numpy as np
import pytest
import torch
from check_cases import PROMPTS, quick, tiny_pair
from metric_modules import script
from scipy import stats

from hf_specx.equivalence.cells import judge_quality, stretch
from hf_specx.equivalence.draft_quality import judged
from hf_specx.equivalence.power import (
    POWER,
    least_difference,
    least_mean,
    least_replaced,
    least_share,
    quality_power,
)
from hf_specx.equivalence.settings import Settings
from hf_specx.equivalence.texts import Subject


RUNS, LEVEL = 400, 0.01
RNG = np.random.default_rng
LAW, SAMPLES, QUALITY = (script(name) for name in ("sampled_law", "two_samples", "text_quality"))


def is_share(rejected: int, low: float, high: float) -> bool:
    """Whether so many of RUNS may come of a probability between these two, but for 1e-4 on either side."""
    return stats.binom.ppf(1e-4, RUNS, low) <= rejected <= stats.binom.isf(1e-4, RUNS, high)


def test_equal_tokens():
    tokens = 700
    share = least_share(tokens)
    assert 1 - (1 - share) ** tokens == pytest.approx(POWER)
    assert is_share(sum(RNG(0).binomial(tokens, share, RUNS) > 0), POWER, POWER)
    assert least_share(2 * tokens) == pytest.approx(share / 2, rel=0.01)
    assert least_share(0) is None


SUMS = ("limit", "standard_error", "weight")
P = torch.tensor([0.35, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05]).double()


def law_of(q: np.ndarray, tokens: int, seed: int) -> dict:
    """What `sampled_law` makes of tokens of the law q, each of which should be of `P`."""
    drawn = torch.from_numpy(RNG(seed).choice(len(P), tokens, p=q))
    seen = torch.zeros(tokens, len(P), dtype=torch.float64)
    moments = LAW.function_moments(P.expand(tokens, -1), drawn, LAW.random_halves(len(P)), seen)
    return LAW.verdict(LAW.weighted(moments), 0, LEVEL)


def tilted(p: np.ndarray, f: np.ndarray, by: float) -> np.ndarray:
    """The law p exp(t f), normalised, for the t that raises the mean of f by so much; found by bisection."""
    low, high = 0.0, 5.0
    for _ in range(60):
        tilt = (low + high) / 2
        q = p * np.exp(tilt * f)
        q /= q.sum()
        low, high = (tilt, high) if (q - p) @ f < by else (low, tilt)
    return q


@pytest.mark.parametrize("name", ["surprisal", "top_1"])
def test_the_law(name: str):
    """The tokens are of a law that is tilted until the mean is off by as much as is said; only this test counts."""
    tokens, p = 600, P.numpy()
    f = -np.log(p) if name == "surprisal" else (p == p.max()).astype(float)
    known = law_of(p, tokens, 0)["statistics"][name]
    smallest = least_mean(*(known[key] for key in SUMS))
    rejected = []
    for law in (tilted(p, f, smallest), p):
        found = [law_of(law, tokens, seed)["statistics"][name] for seed in range(RUNS)]
        rejected.append(sum(abs(each["observed"] - each["expected"]) >= each["limit"] for each in found))
    assert is_share(rejected[0], 0.86, 0.93)  # tokens of a tilted law vary otherwise
    assert rejected[1] <= stats.binom.isf(1e-4, RUNS, LEVEL)
    more = law_of(p, 4 * tokens, 0)["statistics"][name]
    assert least_mean(*(more[key] for key in SUMS)) == pytest.approx(smallest / 2, rel=0.03)


def drafted(chances: np.ndarray, shift: float, seed: int) -> dict:
    """What is made of tokens that are overrated with these chances, plus a shift."""
    variance = chances * (1 - chances)
    sums = {
        "observed": float((RNG(seed).random(len(chances)) < chances + shift).sum()),
        "expected": float(chances.sum()),
        "variance": float(variance.sum()),
        "third": float((variance * (chances**2 + (1 - chances) ** 2)).sum()),
        "positions": len(chances),
    }
    return judged(sums, LEVEL, LAW.p_value, LAW.least_excess)


def test_overrated_tokens():
    chances = RNG(1).uniform(0.1, 0.7, 500)
    known = drafted(chances, 0.0, 0)
    smallest = least_mean(known["limit"], known["standard_error"], known["positions"])
    assert is_share(sum(not drafted(chances, smallest, seed)["passed"] for seed in range(RUNS)), 0.88, 0.92)
    alarms = sum(not drafted(chances, 0.0, seed)["passed"] for seed in range(RUNS))
    assert alarms <= stats.binom.isf(1e-4, RUNS, LEVEL)


def test_few_overrated_tokens_are_judged_by_a_bound():
    """Ten are expected of a thousand; by a normal, 2.7 times as many runs as are stated would be alarms at 1e-4."""
    number, chance = 1000, 0.01
    variance = number * chance * (1 - chance)
    third = variance * (chance**2 + (1 - chance) ** 2)
    binomial = stats.binom(number, chance)
    assert binomial.sf(np.ceil(10 + stats.norm.isf(1e-4 / 2) * variance**0.5) - 1) > 2.5e-4
    assert binomial.sf(np.ceil(10 + LAW.least_excess(1e-4, variance, third, 1.0)) - 1) <= 1e-4


def test_nothing_that_varies_tells_nothing():
    sums = {"observed": 0.0, "expected": 0.0, "variance": 0.0, "third": 0.0, "positions": 9}
    found = judged(sums, LEVEL, LAW.p_value, LAW.least_excess)
    assert (found["p_value"], found["passed"], found["z"]) == (None, True, 0.0)
    assert not judged(sums | {"observed": 3.0}, LEVEL, LAW.p_value, LAW.least_excess)["passed"]  # none could come


STEPS, KINDS = 12, 30


def texts_of(replaced: int, seed: int, rows: int = 40) -> dict:
    """A permutation test of how often tokens come in rows, of which some are of other tokens."""
    left, right = RNG(seed).zipf(1.5, (2, rows, STEPS)) % KINDS
    left[:replaced] += KINDS
    return SAMPLES._permuted(*SAMPLES._tables(left.tolist(), right.tolist()), SAMPLES.chi_square, 400, seed)


def test_two_samples():
    """At the median of what is said of 20 samples; a whole number of texts, so up to half of one behind 0.9."""
    told = [least_replaced(40, LEVEL, lambda number, seed=seed: texts_of(number, seed)) for seed in range(20)]
    number = int(np.median(told))
    assert max(told) - min(told) <= 2
    rejected = [sum(texts_of(n, RUNS + seed)["p_value"] <= LEVEL for seed in range(RUNS)) for n in (0, number)]
    assert rejected[0] <= stats.binom.isf(1e-4, RUNS, LEVEL)
    assert is_share(rejected[1], 0.85, 0.97)
    assert least_replaced(160, LEVEL, lambda number: texts_of(number, 0, rows=160)) < 4 * number * 0.7
    assert least_replaced(40, LEVEL, lambda number: texts_of(0, 0)) is None


def quality_of(shift: float, rows: int, seed: int) -> dict:
    """A measure of pairs of texts with its interval, and the one that the test goes by."""
    left, right = RNG(seed).normal(size=(2, rows))
    found = QUALITY.compared(left + shift, right, level=0.05, seed=seed)
    wider = stretch(LEVEL, rows)
    found["widened"] = [found["difference"] + wider * (end - found["difference"]) for end in found["interval"]]
    return found


def test_quality():
    """Each interval is estimated from its own rows, so the smallest difference is the mean of what they say.

    The bootstrap's are too narrow by 1 - sqrt(1 - 1 / rows), hence the wider bounds.
    """
    right = [quality_of(0.0, 60, seed) for seed in range(RUNS)]
    smallest = np.mean([least_difference(each["interval"], each["widened"]) for each in right])
    wrong = [quality_of(smallest, 60, RUNS + seed) for seed in range(RUNS)]
    outside = [sum(not each["widened"][0] <= 0 <= each["widened"][1] for each in runs) for runs in (right, wrong)]
    assert outside[0] <= stats.binom.isf(1e-4, RUNS, 1.5 * LEVEL)
    assert is_share(outside[1], 0.87, 0.93)
    more = [quality_of(0.0, 240, seed) for seed in range(20)]
    assert np.mean([least_difference(each["interval"], each["widened"]) for each in more]) < 0.55 * smallest


@pytest.fixture(scope="module")
def results():
    """Of 24 and of 96 texts a verification and batch size."""
    made = {"verifications": ("greedy", "coupled", "block"), "new_tokens": 12, "batch_sizes": (4, 12)}
    return [quick(**made, samples=samples) for samples in (24, 96)]


def test_each_kind_of_test_has_its_power(results):
    rows = results[0].power
    assert [row["what"].split(", by a")[0] for row in rows] == [
        "greedy: tokens other than those of plain generate",
        "coupled: tokens other than those of plain generate",
        "block: log p of its tokens, in the mean",
        "block: how often the likeliest token comes",
        "block: how often tokens come that the draft overrates",
        "block: texts of quite other tokens among its own",
        "block: quality compared with plain text",
    ]
    for row in rows[:5]:
        assert list(row["values"]) == ["batch 4", "batch 12"]
        assert row["smallest"].startswith("batch 4: ")
    assert rows[5]["smallest"] == f"{rows[5]['values']['texts']} of 48 texts"
    assert list(rows[6]["values"]) == ["perplexity", "distinct_1", "distinct_2", "length"]
    assert results[0].to_dict()["power"] == rows
    tokens = results[0].cells["coupled, batch 4"]["equality"]["tokens"]
    assert rows[1]["values"]["batch 4"] == least_share(tokens)
    assert rows[1]["note"].startswith(f"{tokens}, ")


def test_more_samples_see_smaller_deviations(results):
    """Four times as many halve it, or the share of texts; greedy texts are one a prompt, however many there are."""
    few, many = (result.power for result in results)
    assert few[0]["values"] == many[0]["values"]
    for row, other in zip(few[1:], many[1:], strict=True):
        for name, value in row["values"].items():
            if value is None:  # the few are too few for it
                assert other["values"][name] > 0
            else:
                times = 4 if name == "texts" else 1
                assert other["values"][name] < 0.7 * times * value, (row["what"], name)


def test_too_few_texts_have_no_power():
    rows = quick(samples=2, batch_sizes=(2,), verifications=("token",)).power
    assert [row["smallest"] for row in rows[3:]] == ["not told"] * 2
    assert Settings(verifications=("token",)).comparisons == 6


def test_no_length_is_above_the_cap():
    """Tokens count as they were emitted: text that was decoded may have more of them when it is read again."""
    subject = Subject(tiny_pair(), PROMPTS, Settings(verifications=("token",), level=0.05, new_tokens=8))
    ours = [[200, 201, 202]] * 20 + [[203] * 8] * 20  # bytes that are no text
    found = judge_quality(subject, [row % len(PROMPTS) for row in range(40)], [[6] * 8] * 40, ours)
    assert (found["length"]["prediction"], found["length"]["reference"]) == (5.5, 8.0)
    assert quality_power("token", found, 8)["smallest"].endswith(" tokens less (8 is the most)")
    assert "less" not in quality_power("token", found, 80)["smallest"]
