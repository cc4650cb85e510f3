"""text_quality: measures by hand, perplexity by the model's own loss, and intervals that cover what they should."""

import math

import numpy as np
import pytest
import torch
from metric_modules import load, script
from scipy import stats
from tiny import tiny
from tiny_tokenizer import SIZES, tiny_tokenizer


LEFT, RIGHT = ["the cat sat", "a a a b", ""], ["on the mat", "a b", "one"]


def quality(left=LEFT, right=RIGHT, **options) -> dict:
    return load("text_quality").compute(predictions=left, references=right, **options)


def test_measures_of_words_by_hand():
    result = quality()
    assert list(result) == ["distinct_1", "distinct_2", "length"]
    assert result["distinct_1"]["prediction"] == pytest.approx((1 + 2 / 4 + 0) / 3)
    assert result["distinct_2"]["prediction"] == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert result["distinct_2"]["reference"] == pytest.approx((1 + 1 + 0) / 3)
    assert result["length"]["prediction"] == pytest.approx(7 / 3)
    assert result["length"]["difference"] == pytest.approx(7 / 3 - 2)
    low, high = result["length"]["interval"]
    assert -1 <= low < 1 / 3 < high <= 2


def test_tokens_and_lengths_by_hand():
    tokenizer = tiny_tokenizer()
    counts = [len(tokenizer(text).input_ids) for text in LEFT]
    assert quality(tokenizer=tokenizer)["length"]["prediction"] == pytest.approx(sum(counts) / 3)
    result = quality(lengths=[[9, 8, 7], [9, 9, 9]])
    assert (result["length"]["prediction"], result["length"]["reference"]) == (8, 9)


@pytest.mark.parametrize("has_prompts", [True, False])
def test_perplexity_is_that_of_the_models_loss(has_prompts: bool):
    """A text is judged behind its prompt, or behind the token that starts texts; the empty one is left out."""
    model, tokenizer = tiny(**SIZES).double(), tiny_tokenizer()
    prompts = ["the ", "on a ", "x"] if has_prompts else None
    losses = []
    for texts in (LEFT[:2], RIGHT[:2]):
        for text, prompt in zip(texts, ("the ", "on a "), strict=True):
            prefix = tokenizer(prompt).input_ids if has_prompts else [0]
            ids = torch.tensor([prefix + tokenizer(text).input_ids])
            labels = ids.clone()
            labels[:, : len(prefix)] = -100
            losses.append(model(ids, labels=labels).loss.item())
    expected = [math.exp(sum(losses[:2]) / 2), math.exp(sum(losses[2:]) / 2)]
    result = quality(prompts=prompts, model=model, tokenizer=tokenizer)["perplexity"]
    assert [result["prediction"], result["reference"]] == pytest.approx(expected)
    assert result["difference"] == pytest.approx(expected[0] - expected[1])
    of_draws = [math.exp(losses[i]) - math.exp(losses[i + 2]) for i in range(2)] + [expected[0] - expected[1]]
    assert result["interval"] == pytest.approx([min(of_draws), max(of_draws)], rel=1e-4)  # of two rows, each is often
    differences = [losses[i] - losses[i + 2] for i in range(2)]
    assert result["p_value"] == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)


def test_intervals_cover_the_truth_as_often_as_they_say():
    """100 samples of 50 pairs at level 0.1; the bootstrap's own is at most 0.12. Bounds at 1e-4 on either side."""
    compared, rng, missed = script("text_quality")._compared, np.random.default_rng(0), 0
    for _ in range(100):
        common, left, right = rng.normal(size=(3, 50))
        low, high = compared([5 * common + left + 0.3, 5 * common + right], level=0.1, seed=0)["interval"]
        missed += not low < 0.3 < high
    assert stats.binom.ppf(1e-4, 100, 0.1) <= missed <= stats.binom.isf(1e-4, 100, 0.12)


def test_p_values_are_those_of_students_paired_test_and_pairs_are_drawn_together():
    """What both texts of a row share does not widen the interval of the difference."""
    compared, (left, right) = script("text_quality")._compared, np.random.default_rng(0).normal(size=(2, 40))
    assert compared([left, right], 0.05, 0)["p_value"] == pytest.approx(stats.ttest_rel(left, right).pvalue)
    assert compared([left, left], 0.05, 0)["p_value"] == 1
    assert compared([100 * left + 1, 100 * left], 0.05, 0)["interval"] == pytest.approx([1, 1])


READING = {"model": tiny(**SIZES), "tokenizer": tiny_tokenizer()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"left": ["a"], "right": ["b"]}, "1 rows"),
        ({"level": 0}, "level=0"),
        ({"prompts": ["a"], "model": "m"}, "prompts"),
        ({"model": tiny(**SIZES)}, "tokenizer"),
        (READING | {"left": ["", "a"], "right": ["b", ""]}, "two pairs"),
        (READING | {"tokenizer": tiny_tokenizer(eos_token=None)}, "prompts"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        quality(**options)
