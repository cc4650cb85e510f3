"""Where text that should be the same is not: what counts as rounding, and what does not."""

import pytest
import torch
from check_cases import PROMPTS, quick, tiny_pair
from tiny import near, tiny
from tiny_tokenizer import SIZES, tiny_tokenizer

from hf_specx import DraftTargetPair
from hf_specx.metrics.check import judge_equality
from hf_specx.metrics.equality import Noise, explain
from hf_specx.metrics.settings import UNITS, Settings
from hf_specx.metrics.texts import Subject


GREEDY = {"do_sample": False, "max_new_tokens": 8}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 8}
PROMPT = tiny_tokenizer()(PROMPTS[0])["input_ids"]
EPSILON = torch.finfo(torch.float32).eps


@torch.no_grad()
def two_best(target) -> tuple[list[float], list[int], float]:
    """Logits and ids of the two likeliest tokens after the prompt, and the largest size of a logit."""
    logits = target(torch.tensor([PROMPT])).logits[0, -1].double()
    best = logits.topk(2)
    return best.values.tolist(), best.indices.tolist(), float(logits.abs().max())


@pytest.mark.parametrize(
    ("options", "noise"), [(GREEDY, None), (SAMPLED | {"top_k": 1}, Noise(1, 1, 0))], ids=["greedy", "top-k 1"]
)
def test_a_gap_is_that_of_the_logits(options, noise):
    """The second token would be chosen, or kept by top-k 1, if its logit rose by what it lacks."""
    (first, second), (best, other), largest = two_best(tiny_pair().target)
    found = explain(tiny_pair().target, options, PROMPT, [best], [other], 3, 0, noise)
    assert (found.row, found.position, found.plain, found.ours) == (3, 0, best, other)
    assert found.gap == pytest.approx(first - second, rel=0.011)
    assert found.units == pytest.approx(found.gap / (EPSILON * largest), rel=1e-6)
    assert found.limit == pytest.approx(UNITS * EPSILON * largest)
    assert not found.explained


@pytest.mark.parametrize(("units", "explained"), [(12, True), (20, False)])
def test_as_many_units_are_rounding_as_is_said(units, explained):
    """Of two logits that are so far from each other; with a larger limit wrong tokens would pass in half precision."""
    target = tiny(**SIZES)
    (first, _), (best, other), largest = two_best(target)
    with torch.no_grad():
        target.lm_head.weight[other] = target.lm_head.weight[best] * (1 - units * EPSILON * largest / first)
    assert explain(target, GREEDY, PROMPT, [best], [other], 0, 0, None).explained == explained


def test_a_text_that_ends_early_is_never_explained():
    found = explain(tiny_pair().target, {"do_sample": False}, [5, 6], [7], [7, 8], 0, 1, None)
    assert (found.plain, found.ours, found.gap, found.explained) == (-1, 8, None, False)


@pytest.mark.parametrize("options", [SAMPLED, SAMPLED | {"guidance_scale": 1.5}], ids=["plain", "with a state"])
@pytest.mark.parametrize("row", [0, 2])
def test_the_noise_of_a_sampled_token_is_that_of_stock(row, options):
    """So the token that stock has drawn needs no rise, at any position and in any row.

    Guidance keeps a state: its own text begins with the prompt's last token and grows with each call.
    """
    target, seed = tiny_pair().target, 11
    torch.manual_seed(seed)
    output = target.generate(torch.tensor([PROMPT] * 3), **options, pad_token_id=1)
    text = output[row, len(PROMPT) :].tolist()
    for position, token in enumerate(text[:5]):
        for other, explained in ((token, True), ((token + 7) % 280, False)):
            ours = [*text[:position], other]
            found = explain(target, options, PROMPT, text, ours, 0, position, Noise(seed, 3, row))
            assert found.explained == explained
            assert (found.gap == 0.0) == explained


def test_what_top_p_and_top_k_leave_out_never_comes():
    result = quick(verifications=("token", "block"), top_p=0.9, top_k=20, repetition_penalty=1.2)
    assert result.passed, str(result)
    assert [result.cells[f"{way}, batch 32"]["law"]["impossible"] for way in ("token", "block")] == [0, 0]


def test_half_precision_passes_and_says_how_many_rows_differ():
    target = tiny(**SIZES | {"num_hidden_layers": 4})
    pair = DraftTargetPair(target.bfloat16(), near(target, 0.2).bfloat16(), tiny_tokenizer())
    more = {"max_new_tokens": 32, "batch_sizes": (16,), "samples": 32, "num_draft_tokens": 5, "temperature": 1.0}
    result = quick(pair, verifications=("greedy", "coupled"), **more)
    assert result.passed, str(result)
    differences = result.cells["coupled, batch 16"]["equality"]["differences"]
    assert differences  # else this shows nothing
    line = next(line for line in result.lines if line.what.startswith("coupled"))
    assert line.note.startswith(f"{len(differences)} of 32 rows differ, all by rounding")
    assert 0 < line.figure <= line.threshold == UNITS
    assert all(difference["gap"] <= difference["limit"] for difference in differences)
    assert "was found but what rounding explains; a correct one" in str(result)


def test_tokens_behind_a_difference_are_not_compared():
    subject = Subject(tiny_pair(), PROMPTS, Settings(batch_sizes=(4,), verifications=("greedy",)))
    plain, ours = [[5, 6, 7, 8]] * 4, [[5, 9, 7, 8]] + [[5, 6, 7, 8]] * 3
    found = judge_equality(subject, "greedy", 4, plain, ours)
    assert (found["tokens"], len(found["differences"])) == (2 + 3 * 4, 1)
