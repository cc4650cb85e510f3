"""The number of candidates, its schedule and the confidence threshold: where they count, and what they do."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from transformers import GenerationConfig

from hf_specx.drafting.draft_length import Outcome
from hf_specx.drafting.schedule import UNSET, Confidence, Drafting, Schedule, choose_drafting, given_drafting
from hf_specx.sampling.verify import Verdict, verify_block, verify_token


def filled(**settings) -> GenerationConfig:
    """As a strategy gets it."""
    return GenerationConfig(**UNSET | settings)


def draft(**settings) -> SimpleNamespace:
    return SimpleNamespace(generation_config=GenerationConfig(**settings))


def test_nothing_said_is_auto():
    for given in (None, {}):
        assert choose_drafting("auto", given, filled(), draft()) == Drafting(None, "constant", 0.0)


def test_each_argument_comes_from_the_first_place_that_sets_it():
    own = draft(num_assistant_tokens=3, num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.1)
    call = filled(num_assistant_tokens=5)
    assert choose_drafting("auto", None, call, own) == Drafting(5, "heuristic", 0.1)
    call = filled(num_assistant_tokens_schedule="heuristic_transient", assistant_confidence_threshold=0.0)
    assert choose_drafting("auto", None, call, own) == Drafting(3, "heuristic_transient", 0.0)
    assert choose_drafting("auto", None, filled(), own) == Drafting(3, "heuristic", 0.1)
    assert choose_drafting("auto", {}, call, own) == Drafting(3, "heuristic", 0.1)


def test_a_number_in_the_strategy_is_not_moved_by_the_draft_s_own_file():
    own = draft(num_assistant_tokens=3, num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.1)
    assert choose_drafting(7, None, filled(num_assistant_tokens=5), own) == Drafting(7, "constant", 0.0)
    call = filled(num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.2)
    assert choose_drafting(7, None, call, own) == Drafting(7, "heuristic", 0.2)


def test_the_values_that_are_filled_in_count_where_the_call_is_known():
    own = draft(num_assistant_tokens=3, num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.1)
    assert choose_drafting("auto", dict(UNSET), filled(), own) == Drafting(20, "constant", 0.4)
    assert choose_drafting("auto", None, filled(), own) == Drafting(3, "heuristic", 0.1)


def test_a_draft_without_a_file():
    assert choose_drafting("auto", None, filled(num_assistant_tokens=4), object()) == Drafting(4, "constant", 0.0)


def test_given_drafting_asks_the_call_then_the_configs():
    first, second = GenerationConfig(num_assistant_tokens=20), GenerationConfig(num_assistant_tokens=9)
    assert given_drafting({"do_sample": True}, None, first, second) == {"num_assistant_tokens": 20}
    assert given_drafting({"num_assistant_tokens": 2}, first) == {"num_assistant_tokens": 2}
    assert given_drafting({"num_assistant_tokens": None}, None, second) == {"num_assistant_tokens": 9}
    second.assistant_confidence_threshold = 0.0
    assert given_drafting({}, first, second) == {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.0}


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [("constant", [2, 2, 2, 2, 2, 2]), ("heuristic", [4, 3, 2, 1, 1, 3]), ("heuristic_transient", [4, 3, 2, 1, 1, 3])],
)
def test_schedules_move_as_in_stock(schedule: str, wanted: list[int]):
    moving = Schedule()
    moving.begin(Drafting(2, schedule), 2)
    assert moving.wanted == 2
    seen = []
    for all_accepted in (True, False, False, False, False, True):
        moving.update(Outcome(1, all_accepted, [[1.0]], [9]), 1)
        seen.append(moving.wanted)
    assert seen == wanted


@pytest.mark.parametrize(("schedule", "wanted"), [("constant", 2), ("heuristic", 4), ("heuristic_transient", 2)])
def test_heuristic_goes_on_in_the_next_call(schedule: str, wanted: int):
    moving = Schedule()
    moving.begin(Drafting(2, schedule), 2)
    moving.update(Outcome(1, True, [[1.0]], [9]), 1)
    moving.begin(Drafting(2, schedule), 2)
    assert moving.wanted == wanted
    moving.begin(Drafting(5, schedule), 5)
    assert moving.wanted == 5


def test_a_round_ends_once_every_row_was_unsure():
    def scores(*probs: float) -> torch.Tensor:
        return torch.tensor([[p, 1 - p] for p in probs]).log()

    first, second = torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.long)
    confidence = Confidence(0.5)
    assert not confidence.is_lost(scores(0.9, 0.4), first)
    assert not confidence.is_lost(scores(0.9, 0.9), first)
    assert confidence.is_lost(scores(0.9, 0.1), second)
    assert not Confidence(0.5).is_lost(scores(0.5, 0.1), first)
    assert Confidence(0.5).is_lost(scores(torch.nan, 0.1), first)
    assert not Confidence(0.0).is_lost(scores(0.0, 0.0), first)


P = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.3, 0.3, 0.4]])  # the target's law of a token behind each other
Q = torch.tensor([[0.4, 0.35, 0.25], [0.2, 0.5, 0.3], [0.6, 0.1, 0.3]])  # the draft's
DRAFTED = 3


def draw_rounds(verify: Callable[..., Verdict], keeps: bool, rows: int) -> torch.Tensor:
    """Three tokens [N, 3] of each text: a round of its own length, then plain steps.

    Args:
        verify: token or block verification.
        keeps: whether the candidate below the threshold, 0.38, is kept; if not, the law must come out wrong.
    """
    torch.manual_seed(0)
    drafts = [torch.zeros(rows, dtype=torch.long)]
    for _ in range(DRAFTED):
        drafts.append(Q[drafts[-1]].multinomial(1)[:, 0])
    contexts = torch.stack(drafts, 1)  # [N, 1 + K], the prompt first
    sure = Q[contexts[:, :-1]].gather(2, contexts[:, 1:, None])[..., 0] >= 0.38
    lengths = (sure.long().cumprod(1).sum(1) + keeps).clamp(max=DRAFTED)
    texts = torch.empty(rows, DRAFTED, dtype=torch.long)
    for length in range(DRAFTED + 1):
        here = (lengths == length).nonzero()[:, 0]
        given, laws = contexts[here, : length + 1], P[contexts[here, : length + 1]]
        uniforms, choice = torch.rand(len(here), length).double(), torch.rand(len(here)).double()
        accepted, token, _ = verify(given[:, 1:], Q[given[:, :-1]], laws, uniforms, choice)
        for place in range(DRAFTED):
            plain = P[token].multinomial(1)[:, 0]
            drafted = contexts[here, place + 1]
            token = torch.where(place > accepted, plain, token)
            texts[here, place] = torch.where(place < accepted, drafted, token)
    return texts


@pytest.mark.parametrize("verify", [verify_token, verify_block])
def test_a_round_that_ends_by_its_own_candidates_keeps_the_law(verify: Callable[..., Verdict]):
    """A chi-square test, which fails by chance with probability 1e-6; without the last candidate it has to."""
    law = torch.einsum("a,ab,bc->abc", P[0], P, P).flatten().double()
    p_values = []
    for keeps in (True, False):
        texts = draw_rounds(verify, keeps, 100_000)
        seen = (texts * torch.tensor([9, 3, 1])).sum(1).bincount(minlength=27)
        p_values.append(stats.chisquare(seen.numpy(), (law / law.sum() * len(texts)).numpy()).pvalue)
    assert p_values[0] > 1e-6
    assert p_values[1] < 1e-12
