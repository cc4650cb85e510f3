""" "auto" with heads that draft a block in one step: as many of its candidates as pay, or none."""

from pathlib import Path

import pytest
import torch
from alignment import GREEDY, loaded, target_of, watched
from head_files import random_head
from rounds import made_round
from tiny import prompts

from hf_specx import SpeculativeDecoding
from hf_specx.common.batch import Batch, RowState
from hf_specx.drafting.auto import TRIAL_ROUNDS, AutoDraftLength
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.round_timer import RoundTimer
from hf_specx.engine import run


KINDS = ("dflash", "dspark", "peagle", "medusa")


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_does_not_pay_is_switched_off(
    kind: str, draft_pays: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A random head is hardly ever right: it is tried, and then calls go on as plain ones."""
    monkeypatch.setattr(run, "assumed_times", lambda *sizes: {"target": {1: 1.0, 9: 1.4}, "draft": 0.4})
    target = target_of()
    strategy = SpeculativeDecoding(loaded(random_head(kind), tmp_path / "head", target))
    settings = GREEDY | {"max_new_tokens": 60}
    text = target.generate(**prompts(2), **settings)
    assert torch.equal(target.generate(**prompts(2), **settings, custom_generate=strategy), text)
    assert 0 < strategy.report.rounds <= 2 * TRIAL_ROUNDS
    assert strategy.report.plain_steps > 40
    strategy.costs.trial_budget = 0.0
    target.generate(**prompts(2), **GREEDY, custom_generate=strategy)
    assert strategy.report.layout == "plain"


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_of_a_block_is_timed_and_leaves_no_trace(kind: str, timed_first: None, tmp_path: Path):
    target = target_of()
    head = random_head(kind)
    strategy = SpeculativeDecoding(loaded(head, tmp_path / "head", target))
    watch = watched(strategy, head, target, most=20)
    target.generate(**prompts(3), **GREEDY, custom_generate=strategy)
    watch.check(5)
    assert strategy.costs.candidates_per_step > 1
    assert strategy.costs.draft_seconds(3) > 0


def auto_of(round_timer: RoundTimer) -> AutoDraftLength:
    batch = Batch(torch.ones(1, 3, dtype=torch.int64), None, 0, row_states=[RowState(limit=200)])
    return AutoDraftLength(round_timer, "greedy", batch, max_candidates=round_timer.costs.candidates_per_step)


def test_a_block_takes_one_step_however_many_of_it_are_judged():
    costs = Costs({1: {"target": {1: 1.0, 9: 1.4}, "draft": 0.3}}, candidates_per_step=8)
    assert RoundTimer(costs).times(1, 8) == pytest.approx([1.0, *(1.3 + 0.05 * number for number in range(1, 9))])
    assert costs.forward_seconds(1, 8) == pytest.approx(1.7)
    assert RoundTimer(costs).tree_times(1, 8, 12)[12] == pytest.approx(1.3 + 0.6)


@pytest.mark.parametrize(("alpha", "least", "most"), [(0.02, 0, 0), (0.6, 1, 5), (0.97, 8, 8)])
def test_the_number_is_what_pays(alpha: float, least: int, most: int, monkeypatch: pytest.MonkeyPatch):
    """Of a block whose step takes a third of a plain one, where more positions cost the target something."""
    monkeypatch.setattr(RoundTimer, "has_seen_plain", lambda round_timer, rows: True)
    costs = Costs({1: {"target": {1: 1.0, 9: 1.8}, "draft": 0.3}}, {"greedy": alpha}, candidates_per_step=8)
    auto = auto_of(RoundTimer(costs))
    assert least <= auto.num_draft_tokens <= most
    for _ in range(20):  # whatever was known before, what is seen counts
        number = auto.num_draft_tokens
        auto.observe(made_round([number], [number]))
    assert auto.num_draft_tokens in ((0, 8) if least == 0 else (8,))
