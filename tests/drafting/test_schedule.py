"""The number of candidates, its schedule and the confidence threshold: where they count, and what each row drafts."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from rounds import made_round
from transformers import GenerationConfig

from hf_specx.common.batch import Batch
from hf_specx.drafting.costs import Costs, Pace
from hf_specx.drafting.schedule import (
    UNSET,
    Drafting,
    Schedule,
    choose_drafting,
    given_drafting,
)


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
    assert choose_drafting("auto", None, call, own) == Drafting(None, "heuristic", 0.1)
    call = filled(num_assistant_tokens_schedule="heuristic_transient", assistant_confidence_threshold=0.0)
    assert choose_drafting("auto", None, call, own) == Drafting(None, "heuristic_transient", 0.0)
    assert choose_drafting("auto", None, filled(), own) == Drafting(None, "heuristic", 0.1)
    assert choose_drafting("auto", {}, call, own) == Drafting(None, "heuristic", 0.1)


def test_a_number_in_the_strategy_is_not_moved_by_the_draft_s_own_file():
    own = draft(num_assistant_tokens=3, num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.1)
    assert choose_drafting(7, None, filled(num_assistant_tokens=5), own) == Drafting(7, "constant", 0.0)
    call = filled(num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.2)
    assert choose_drafting(7, None, call, own) == Drafting(None, "heuristic", 0.2)


def test_the_values_that_are_filled_in_count_where_the_call_is_known():
    own = draft(num_assistant_tokens=3, num_assistant_tokens_schedule="heuristic", assistant_confidence_threshold=0.1)
    assert choose_drafting("auto", dict(UNSET), filled(), own) == Drafting(20, "constant", 0.4)
    assert choose_drafting("auto", None, filled(), own) == Drafting(None, "heuristic", 0.1)


def test_given_drafting_asks_the_call_then_the_configs():
    first, second = GenerationConfig(num_assistant_tokens=20), GenerationConfig(num_assistant_tokens=9)
    assert given_drafting({"do_sample": True}, None, first, second) == {"num_assistant_tokens": 20}
    assert given_drafting({"num_assistant_tokens": 2}, first) == {"num_assistant_tokens": 2}
    assert given_drafting({"num_assistant_tokens": None}, None, second) == {"num_assistant_tokens": 9}
    second.assistant_confidence_threshold = 0.0
    assert given_drafting({}, first, second) == {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.0}


def some_batch(rows: int = 3) -> Batch:
    """Each row has emitted one token."""
    batch = Batch(torch.ones(rows, 4, dtype=torch.int64), None, 0)
    batch.emit(torch.ones(rows, 1, dtype=torch.int64), [1] * rows)
    return batch


def test_rows_draft_no_more_than_they_can_emit():
    """And nothing before their first token."""
    numbers, batch = Schedule(3), some_batch()
    batch.limits = [4] * 3
    assert numbers(Batch(torch.ones(2, 4, dtype=torch.int64), None, 0)) == [0, 0]
    assert numbers(batch) == [2, 2, 2]
    batch.counts = [1, 2, 4]
    assert numbers(batch) == [2, 1, 0]
    assert Schedule(3, alike=True)(batch) == [3, 3, 3]  # where all ranks must draft alike


def test_rounds_with_forced_candidates_are_no_plain_steps_and_no_shorter_rounds():
    """Their forwards are longer than the steps of the draft tell."""
    pace = Pace(Costs(clock=iter(range(99)).__next__))
    schedule = Schedule(5, pace=pace)
    kinds = {"plain": ([0], None), "forced": ([4], [[True] * 4]), "some": ([4], [[True, True, False, True]])}
    kinds["drafted"] = ([4], [[False] * 4])
    for kind in ("plain", "plain", "forced", "some", "drafted", "drafted"):
        lengths, forced = kinds[kind]
        done = made_round(lengths, lengths)
        schedule.observe(replace(done, draft=done.draft._replace(forced=forced)))
    assert {kind: list(seconds) for kind, seconds in pace.seen.items()} == {(1, 0): [1], (1, 4): [1]}
