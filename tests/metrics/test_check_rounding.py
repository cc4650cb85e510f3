"""Where text that should be the same is not: how far its tokens lie below the best, and what rounding explains."""

import pytest
import torch
from check_cases import PROMPTS, failed, quick, tiny_pair
from tiny import near, tiny
from tiny_tokenizer import SIZES, tiny_tokenizer

from hf_specx import DraftTargetPair
from hf_specx.metrics.check import judge_equality
from hf_specx.metrics.equality import Gaps, Noise, Reference, Rounding, Text, gaps_of, rounding_scale
from hf_specx.metrics.result import equality_line
from hf_specx.metrics.settings import Settings
from hf_specx.metrics.texts import Subject


GREEDY = {"do_sample": False, "max_new_tokens": 8}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 8}
PROMPT = tiny_tokenizer()(PROMPTS[0])["input_ids"]


def gaps(options: dict, text: list[int], noise=None, first_difference: int = 0, rejected: int = -1) -> Gaps:
    """Of a text of the tiny pair after `PROMPT`; the candidate at the last token is `rejected`."""
    reference = Reference(tiny_pair().target, options, Text(PROMPT, PROMPT, text))
    return gaps_of(reference, noise, first_difference, [-1] * (len(text) - 1) + [rejected])


@torch.no_grad()
def likeliest(target) -> tuple[list[float], list[int]]:
    """Logits and ids of the three likeliest tokens after the prompt."""
    best = target(torch.tensor([PROMPT])).logits[0, -1].double().topk(3)
    return best.values.tolist(), best.indices.tolist()


def test_a_gap_is_that_of_the_logits():
    (first, second, third), (best, other, last) = likeliest(tiny_pair().target)
    assert gaps(GREEDY, [other]).chosen.tolist() == pytest.approx([first - second])
    assert gaps(GREEDY, [best]).chosen.tolist() == [0.0]
    assert gaps(GREEDY, [other], first_difference=1).chosen.tolist() == [0.0]  # plain text has it as well
    assert gaps(GREEDY, [best]).rivals[0, :2].tolist() == pytest.approx([first - second, first - third])
    rejected = [float(gaps(GREEDY, [best], rejected=token).rejected) for token in (other, last)]
    assert rejected == pytest.approx([first - second, first - third])
    assert gaps(GREEDY, [best], rejected=best).rejected.isnan().all()  # it was kept


@pytest.mark.parametrize("keeps", [{"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_a_token_that_rounding_could_have_kept_is_as_far_off_as_what_it_lacks(keeps):
    """Though its own score is -inf: it would be kept if its logit rose by so much, or that of the best fell."""
    (first, second, _), (_, other, last) = likeliest(tiny_pair().target)
    lacks = [float(gaps(SAMPLED | keeps, [token], Noise(1, 1, 0)).chosen) for token in (other, last)]
    assert lacks[0] == pytest.approx((first - second) / 0.7, rel=0.03)
    assert lacks[1] > lacks[0]


@pytest.mark.parametrize("options", [SAMPLED, SAMPLED | {"guidance_scale": 1.5}], ids=["plain", "with a state"])
@pytest.mark.parametrize("row", [0, 2])
def test_the_noise_of_a_sampled_token_is_that_of_stock(row, options):
    """So the tokens that stock has drawn are the best choices, at any position and in any row, and others are not.

    Guidance keeps a state: its own text begins with the prompt's last token and grows with each call.
    """
    target, seed = tiny_pair().target, 11
    torch.manual_seed(seed)
    output = target.generate(torch.tensor([PROMPT] * 3), **options, pad_token_id=1)
    text = output[row, len(PROMPT) :].tolist()
    assert gaps(options, text, Noise(seed, 3, row)).chosen.max() < 1e-5
    for position in range(5):
        changed = [*text[:position], (text[position] + 7) % 280]
        assert gaps(options, changed, Noise(seed, 3, row)).chosen[-1] > 1e-3


def test_pads_count_as_in_the_batch():
    """A repetition penalty sees the pads of a batch, as it does in plain `generate`."""
    options, (_, (best, _, _)) = GREEDY | {"repetition_penalty": 1000.0}, likeliest(tiny_pair().target)
    assert best not in PROMPT
    references = [Reference(tiny_pair().target, options, Text(pads + PROMPT, PROMPT, [best])) for pads in ([], [best])]
    assert [float(gaps_of(each, None, 0, [-1]).chosen) > 0 for each in references] == [False, True]


def test_a_text_that_ends_early_fails_however_well_it_was_chosen():
    subject = Subject(tiny_pair(), PROMPTS, Settings(batch_sizes=(1,), verifications=("greedy",), max_new_tokens=3))
    text = plain_text(subject)
    right, early = judged(subject, text, text), judged(subject, text, text[:2])
    assert (right["p_value"], right["differences"], right["tokens"]) == (1.0, [], 3)
    (difference,) = early["differences"]
    assert (early["p_value"], difference["ours"], difference["gap"]) == (0.0, -1, None)


def plain_text(subject: Subject, **options) -> list[int]:
    """The greedy text of the first prompt."""
    length = subject.settings.max_new_tokens
    output = subject.target.generate(**subject.encoded([0]), do_sample=False, max_new_tokens=length, **options)
    return output[0, -length:].tolist()


def judged(subject: Subject, plain: list[int], ours: list[int], mean: float = 1e-7) -> dict:
    texts = {"texts": [plain], "rounding": {"mean": mean}}
    return judge_equality(subject, "greedy", 1, texts, {"texts": [ours], "observed": [str([-1] * len(ours))]})


def test_tokens_behind_a_difference_count_by_their_own_prefix():
    """So that two wrong tokens weigh more than one; the first difference alone is listed."""
    subject = Subject(tiny_pair(), PROMPTS, Settings(batch_sizes=(1,), verifications=("greedy",), max_new_tokens=6))
    plain = plain_text(subject)
    once, twice = [plain[0], 77, *plain[2:]], [plain[0], 77, 78, *plain[3:]]
    cells = [judged(subject, plain, text, mean=0.05) for text in (plain, once, twice)]
    assert cells[0]["gaps"] == 0 < cells[1]["gaps"] < cells[2]["gaps"]
    assert [[difference["position"] for difference in cell["differences"]] for cell in cells] == [[], [1], [1]]


def test_a_text_that_was_decoded_plainly_has_no_candidates_and_one_out_of_reach_no_gap():
    """Token 7 is forbidden here, so it is never chosen."""
    how = {"batch_sizes": (1,), "verifications": ("greedy",), "max_new_tokens": 3, "options": {"suppress_tokens": [7]}}
    subject = Subject(tiny_pair(), PROMPTS, Settings(**how))
    text, rounding = plain_text(subject, suppress_tokens=[7]), {"mean": 1e-7}
    plainly = {"texts": [text], "observed": ["[]"]}
    assert judge_equality(subject, "greedy", 1, {"texts": [text], "rounding": rounding}, plainly)["p_value"] == 1.0
    cell = judged(subject, text, [7, *text[1:]])
    assert (cell["p_value"], cell["gaps"], cell["differences"][0]["gap"]) == (0.0, None, None)
    assert "never chosen" in equality_line("greedy, batch 1", cell).note


def test_rounding_is_what_was_measured_and_no_less_than_that_of_float32():
    """Scores are compared in float32, whatever the model computes in."""
    assert rounding_scale(0.02, 10.0) == pytest.approx(1.5 * 0.02)
    assert rounding_scale(0.0, 10.0) == pytest.approx(10 * torch.finfo(torch.float32).eps)


def test_a_sum_of_gaps_is_unlikely_by_how_much_rounding_is_measured():
    """The same token, half a nat off, is nothing or everything."""
    row = Gaps(torch.tensor([0.5] + [0.0] * 9), torch.full((10, 2), 0.5), torch.full((10,), torch.nan))
    chances = [Rounding([row], scale).p_value for scale in (1.0, 0.1, 0.01)]
    assert chances[0] == 1.0
    assert chances[0] > chances[1] > chances[2]
    assert chances[2] < 1e-12


def test_what_top_p_and_top_k_leave_out_never_comes():
    result = quick(verifications=("token", "block"), top_p=0.9, top_k=20, repetition_penalty=1.2)
    assert result.passed, str(result)
    assert [result.cells[f"{name}, batch 32"]["law"]["impossible"] for name in ("token", "block")] == [0, 0]


@pytest.mark.parametrize("keeps", [{}, {"top_p": 0.9, "top_k": 20}], ids=str)
def test_half_precision_passes_and_says_how_many_rows_differ(keeps):
    target = tiny(**SIZES | {"num_hidden_layers": 4})
    pair = DraftTargetPair(target.bfloat16(), near(target, 0.2).bfloat16(), tiny_tokenizer())
    more = {"max_new_tokens": 32, "batch_sizes": (16,), "samples": 32, "num_draft_tokens": 5, "temperature": 1.0}
    result = quick(pair, verifications=("greedy", "coupled"), **more | keeps)
    assert result.passed, str(result)
    differences = result.cells["coupled, batch 16"]["equality"]["differences"]
    assert differences  # else this shows nothing
    line = next(line for line in result.lines if line.what.startswith("coupled"))
    assert line.note.startswith(f"{len(differences)} of 32 rows differ; furthest off is row ")
    assert 0 <= line.figure <= line.threshold
    assert failed(result) == set()
    assert "rounding" in str(result)
