"""The number of candidates, its schedule and the confidence threshold: where they count, and what each row drafts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from automaton import Automaton
from rounds import made_round
from transformers import GenerationConfig

from hf_specx.common.batch import Batch
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.round_timer import RoundTimer
from hf_specx.drafting.schedule import UNSET, DraftLengthSchedule, choose_draft_settings
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.rewindable import TokenMasks


DRAFTS_OWN = {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.1}
DRAFTS_OWN |= {"num_assistant_tokens_schedule": "heuristic"}
TRANSIENT = {"num_assistant_tokens_schedule": "heuristic_transient", "assistant_confidence_threshold": 0.0}
ASKED = {  # the strategy's number, what the call is known to say, what is filled in, the draft's own file
    "nothing": (("auto", {}, {}, {}), (None, "constant", 0.0)),
    "nothing, of an unknown call": (("auto", None, {}, {}), (None, "constant", 0.0)),
    "in the draft's file": (("auto", None, {}, DRAFTS_OWN), (None, "heuristic", 0.1)),
    "each where it is set first": (("auto", None, TRANSIENT, DRAFTS_OWN), (None, "heuristic_transient", 0.0)),
    "by the call, which is known": (("auto", {}, TRANSIENT, DRAFTS_OWN), (None, "heuristic", 0.1)),
    "the very defaults": (("auto", UNSET, {}, DRAFTS_OWN), (20, "constant", 0.4)),
    "a number": ((7, None, {"num_assistant_tokens": 5}, DRAFTS_OWN), (7, "constant", 0.0)),
    "a number, and a schedule": ((7, None, TRANSIENT, DRAFTS_OWN), (7, "constant", 0.0)),
}


@pytest.mark.parametrize(("asked", "chosen"), ASKED.values(), ids=ASKED)
def test_each_argument_comes_from_the_first_place_that_sets_it(asked: tuple, chosen: tuple):
    number, arguments, filled, of_draft = asked
    draft = SimpleNamespace(generation_config=GenerationConfig(**of_draft))
    assert choose_draft_settings(number, arguments, GenerationConfig(**UNSET | filled), draft) == chosen


def test_rounds_that_are_not_typical_do_not_count():
    """Those with forced candidates, whose forwards are longer than the steps tell, and those that catch up."""
    round_timer = RoundTimer(Costs(clock=iter(range(99)).__next__))
    schedule = DraftLengthSchedule(5, round_timer=round_timer)
    kinds = {"plain": ([0], None), "forced": ([4], [[True] * 4]), "some": ([4], [[True, True, False, True]])}
    kinds["drafted"] = ([4], [[False] * 4])
    for kind in ("plain", "plain", "drafted", "drafted", "forced", "some", "drafted", "drafted"):
        lengths, forced = kinds[kind]
        done = made_round(lengths, lengths)
        schedule.observe(replace(done, draft=done.draft._replace(forced=forced)))
    assert {kind: list(seconds) for kind, seconds in round_timer.samples.items()} == {(1, 0): [1], (1, 4): [1, 1]}


def test_no_row_drafts_more_than_can_be_taken_back():
    """Where drafts follow no masks, as in compiled forwards, nothing else says so."""
    processors = Processors([TokenMasks(Automaton(9, 3, max_rollback=2), 9)])
    batch = Batch(torch.ones(1, 3, dtype=torch.int64), None, 0)
    batch.emit(torch.ones(1, 1, dtype=torch.int64), [1])
    assert DraftLengthSchedule(5, processors=processors)(batch) == [2]
