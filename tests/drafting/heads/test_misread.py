"""What is said of heads of which hardly anything is kept, and what is seen of the layout of a block in the text."""

from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from alignment import GREEDY, loaded, target_of
from head_files import random_head
from tiny import prompts

from hf_specx import SpeculativeDecoding, SuffixDraft
from hf_specx.common.batch import RowState
from hf_specx.common.round import Draft
from hf_specx.drafting.heads.config import HeadConfig
from hf_specx.drafting.heads.misread import CHANCE_SHARE, MIN_FIRST_CANDIDATES, MisreadWatch


TEXT = torch.randint(0, 1000, (400,), generator=torch.Generator().manual_seed(0)).tolist()
BLOCK = HeadConfig(kind="dspark", sample_from_anchor=True)


def watched(
    shift: int | None, accepted: float = 0.0, rounds: int = 100, source: str = "head"
) -> tuple[MisreadWatch, Any]:
    """After rounds of one row with four candidates, half of which are the tokens so many places on."""
    watch, draws = MisreadWatch(), torch.Generator().manual_seed(1)
    for number in range(rounds):
        right = [TEXT[max(0, 1 + 3 * number + place + (shift or 0))] for place in range(4)]
        coin = torch.rand(4, generator=draws) < (0.5 if shift is not None else 0.0)
        tokens = torch.where(coin, torch.tensor(right), 2000)[None]
        draft = Draft(tokens, [4], source=source)
        num_accepted = int(torch.rand((), generator=draws) < accepted)
        counts = {"emitted_before": [1 + 3 * number], "first_accepted": [num_accepted]}
        done: Any = SimpleNamespace(draft=draft, rows=[0], **counts)
        watch.observe(done, "head")
    return watch, SimpleNamespace(row_states=[RowState(emitted_ids=TEXT)])


def test_layouts_are_named_by_where_candidates_fit():
    for shift, anchor, layout in ((-1, True, "fill-in"), (1, False, "anchor")):
        watch, batch = watched(shift, accepted=0.2)
        reason = watch.reason(HeadConfig(kind="dflash", sample_from_anchor=anchor), batch)
        assert f"layout={layout!r}" in reason
        assert not watch.reason(HeadConfig(kind="dflash", sample_from_anchor=not anchor), batch)  # no other way round
    watch, batch = watched(0, accepted=0.2)
    assert not watch.reason(BLOCK, batch)
    watch, batch = watched(-1)
    watch.forget_rows([0])  # of other texts nothing is known
    assert "layout=, is_causal=" in watch.reason(BLOCK, batch)


def test_heads_of_which_nothing_is_kept_are_told_what_to_try():
    watch, batch = watched(None, accepted=0.05)
    assert "no more than by chance" in watch.reason(BLOCK, batch)
    assert "norm_output=" in watch.reason(HeadConfig(kind="eagle3"), batch)
    assert not watch.reason(HeadConfig(kind="medusa"), batch)  # of which nothing can be overridden
    assert not watched(None, accepted=0.3)[0].reason(BLOCK, batch)
    assert not watched(None, rounds=MIN_FIRST_CANDIDATES - 1)[0].reason(BLOCK, batch)
    assert not watched(None, source="suffix")[0].reason(BLOCK, batch)


def test_false_alarms_and_power_as_stated():
    n = MIN_FIRST_CANDIDATES
    most = int(CHANCE_SHARE * n)
    reported = {
        share: sum(comb(n, accepted) * share**accepted * (1 - share) ** (n - accepted) for accepted in range(most + 1))
        for share in (0.3, 0.1, 0.05)
    }
    assert list(reported.values()) == pytest.approx([9e-4, 0.81, 0.995], rel=0.02)


@pytest.mark.parametrize("beside", [False, True])
def test_reports_of_heads_that_were_not_trained(beside: bool, tmp_path: Path):
    """Also where other drafts propose as well; the report says it in words, and calls are added."""
    target = target_of()
    head = loaded(random_head("dflash"), tmp_path / "head", target)
    strategy = SpeculativeDecoding([head, SuffixDraft()] if beside else head, num_draft_tokens=2)
    target.generate(**prompts(4), **GREEDY | {"max_new_tokens": 60}, custom_generate=strategy)
    reason = strategy.report.misread_reason
    assert "no more than by chance" in reason
    assert "try layout=" in reason
    assert reason in str(strategy.report)
    assert strategy.report.to_dict()["misread_reason"] == reason
    assert (strategy.report + strategy.report).misread_reason == reason
