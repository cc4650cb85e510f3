"""The number of candidates, its schedule and the confidence threshold: where they count, and what each row drafts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rounds import made_round
from transformers import GenerationConfig

from hf_specx.common.batch import Batch
from hf_specx.drafting.costs import Costs, Pace
from hf_specx.drafting.schedule import (
    UNSET,
    Schedule,
    choose_drafting,
)


DRAFTS_OWN = {
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.1,
}
TRANSIENT = {"num_assistant_tokens_schedule": "heuristic_transient", "assistant_confidence_threshold": 0.0}
ASKED = {  # the strategy's number, what the call is known to say, what is filled in, the draft's own file
    "nothing": (("auto", {}, {}, {}), (None, "constant", 0.0)),
    "nothing, of an unknown call": (("auto", None, {}, {}), (None, "constant", 0.0)),
    "in the draft's file": (("auto", None, {}, DRAFTS_OWN), (None, "heuristic", 0.1)),
    "each where it is set first": (("auto", None, TRANSIENT, DRAFTS_OWN), (None, "heuristic_transient", 0.0)),
    "by the call, which is known": (("auto", {}, TRANSIENT, DRAFTS_OWN), (None, "heuristic", 0.1)),
    "the very defaults": (("auto", UNSET, {}, DRAFTS_OWN), (20, "constant", 0.4)),
    "a number": ((7, None, {"num_assistant_tokens": 5}, DRAFTS_OWN), (7, "constant", 0.0)),
    "a number, and a schedule": ((7, None, TRANSIENT, DRAFTS_OWN), (None, "heuristic_transient", 0.0)),
}


@pytest.mark.parametrize(("asked", "found"), ASKED.values(), ids=ASKED)
def test_each_argument_comes_from_the_first_place_that_sets_it(asked: tuple, found: tuple):
    number, given, filled, own = asked
    draft = SimpleNamespace(generation_config=GenerationConfig(**own))
    assert choose_drafting(number, given, GenerationConfig(**UNSET | filled), draft) == found


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


def test_rounds_that_are_not_typical_do_not_count():
    """Those with forced candidates, whose forwards are longer than the steps tell, and those that catch up."""
    pace = Pace(Costs(clock=iter(range(99)).__next__))
    schedule = Schedule(5, pace=pace)
    kinds = {"plain": ([0], None), "forced": ([4], [[True] * 4]), "some": ([4], [[True, True, False, True]])}
    kinds["drafted"] = ([4], [[False] * 4])
    for kind in ("plain", "plain", "drafted", "drafted", "forced", "some", "drafted", "drafted"):
        lengths, forced = kinds[kind]
        done = made_round(lengths, lengths)
        schedule.observe(replace(done, draft=done.draft._replace(forced=forced)))
    assert {kind: list(seconds) for kind, seconds in pace.seen.items()} == {(1, 0): [1], (1, 4): [1, 1]}
