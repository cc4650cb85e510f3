"""The number of candidates, its schedule and the confidence threshold: where they count, and what each row drafts."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from rounds import made_round
from transformers import GenerationConfig

from hf_specx.common.batch import Batch
from hf_specx.scheduling.costs import Costs
from hf_specx.scheduling.resting import Resting
from hf_specx.scheduling.schedule import (
    UNSET,
    Auto,
    Drafting,
    Schedule,
    choose_drafting,
    given_drafting,
    make_schedule,
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


def some_batch(rows: int = 3) -> Batch:
    """Each row has emitted one token."""
    batch = Batch(torch.ones(rows, 4, dtype=torch.int64), None, 0)
    batch.emit(torch.ones(rows, 1, dtype=torch.int64), [1] * rows)
    return batch


def moving(schedule: str, number: int = 2, room: list[int] | None = None, earlier: Schedule | None = None) -> Schedule:
    return make_schedule(Drafting(number, schedule), None, "greedy", some_batch(), room, earlier)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [("constant", [2, 2, 2, 2, 2, 2]), ("heuristic", [4, 3, 2, 1, 1, 3]), ("heuristic_transient", [4, 3, 2, 1, 1, 3])],
)
def test_schedules_move_as_in_stock(schedule: str, wanted: list[int]):
    numbers = moving(schedule)
    assert numbers(some_batch(1)) == [2]
    seen = []
    for all_accepted in (True, False, False, False, False, True):
        numbers.observe(made_round([1], [int(all_accepted)]))
        seen += numbers(some_batch(1))
    assert seen == wanted


def test_each_row_goes_by_its_own_rounds():
    """One that had no candidates, or has left, is where it was."""
    numbers = moving("heuristic")
    numbers.observe(made_round([2, 2, 0], [2, 1, 0]))
    assert numbers(some_batch()) == [4, 1, 2]
    numbers.observe(made_round([4], [4], rows=[0]))
    assert numbers(some_batch()) == [6, 1, 2]


def test_rows_draft_no_more_than_they_can_emit():
    """And nothing before their first token."""
    numbers, batch = moving("constant", 3, room=[4] * 4), some_batch()
    assert numbers(Batch(torch.ones(2, 4, dtype=torch.int64), None, 0)) == [0, 0]
    assert numbers(batch) == [2, 2, 2]
    batch.counts = [1, 2, 4]
    assert numbers(batch) == [2, 1, 0]
    assert moving("constant", 3)(batch) == [0, 3, 3]  # where all ranks must draft alike


@pytest.mark.parametrize(("schedule", "wanted"), [("constant", 2), ("heuristic", 4), ("heuristic_transient", 2)])
def test_heuristic_goes_on_in_the_next_call(schedule: str, wanted: int):
    first = moving(schedule)
    first.observe(made_round([1], [1]))
    first.end()
    assert moving(schedule, earlier=first)(some_batch(1)) == [wanted]
    assert moving(schedule, 5, earlier=first)(some_batch(1)) == [5]


def test_the_next_call_begins_with_the_mean_of_the_rows():
    first = moving("heuristic", 3)
    for _ in range(2):
        first.observe(made_round([1, 1, 1], [1, 1, 0]))
    first.end()
    assert first(some_batch()) == [7, 7, 1]
    assert moving("heuristic", 3, earlier=first)(some_batch()) == [5, 5, 5]


def test_a_row_that_keeps_nothing_rests_for_longer_each_time():
    """For 8 rounds, then 16; the others do not."""
    resting, lengths = Resting(), []
    for _ in range(60):
        lengths.append([0 if resting.rests(row) else 2 for row in range(2)])
        resting.observe(made_round(lengths[-1], [0, 1]))
    assert {length for _, length in lengths} == {2}
    drafted = [n for n, (length, _) in enumerate(lengths) if length]
    first = drafted.index(drafted[-1]) - 1
    assert drafted[:first] == list(range(first))
    assert 8 < first < 14  # it takes a while until a row that was taken to keep one is known to keep none
    assert [b - a - 1 for a, b in itertools.pairwise(drafted[first - 1 :])] == [8, 16]


def test_a_row_that_has_rested_goes_on_if_its_draft_has_become_good():
    resting = Resting()
    while not resting.rests(0):
        resting.observe(made_round([3], [0]))
    while resting.rests(0):
        resting.observe(made_round([0], [0]))
    for _ in range(20):
        resting.observe(made_round([3], [3]))
        assert not resting.rests(0)


@pytest.mark.parametrize("together", [False, True])
def test_auto_lets_a_row_rest_while_the_others_draft(together: bool):
    """Not where rows advance by the least of the batch: there all draft the same number, or none."""
    costs = Costs({3: {"target": {1: 1.0, 9: 1.4}, "draft": 0.1}})
    auto, batch, seen = Auto(costs, "greedy", [100] * 3, together), some_batch(), []
    for _ in range(30):
        seen.append(auto(batch))
        auto.observe(made_round(seen[-1], [seen[-1][0], seen[-1][1], 0], batch=batch))
    assert all(first == second for first, second, _ in seen)
    assert any(first > 0 == third for first, _, third in seen) is not together
    assert all(first == third for first, _, third in seen) is together
