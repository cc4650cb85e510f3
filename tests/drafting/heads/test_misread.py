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
from hf_specx.common.round import Draft
from hf_specx.drafting.heads.config import HeadConfig
from hf_specx.drafting.heads.misread import CHANCE_SHARE, MIN_FIRST_CANDIDATES, MisreadWatch


TEXT = torch.randint(0, 1000, (400,), generator=torch.Generator().manual_seed(0)).tolist()
BLOCK = HeadConfig(kind="dspark", sample_from_anchor=True)


def watched(
    shift: int | None,
    accepted: float = 0.0,
    rounds: int = 100,
    source: str = "head",
    config: HeadConfig = BLOCK,
    drawn: bool = False,
    new_requests: bool = False,
) -> MisreadWatch:
    """After rounds of one row with four candidates, half of which are the tokens so many places on.

    With `drawn`, they are drawn from distributions that have half of their mass there.
    """
    watch, draws, begin = MisreadWatch(config), torch.Generator().manual_seed(1), 0
    for number in range(rounds):
        right = torch.tensor([TEXT[max(0, begin + place + (shift or 0))] for place in range(4)])
        coin = torch.rand(4, generator=draws) < (0.5 if shift is not None else 0.0)
        tokens, probs, scores = torch.where(coin, right, 2000)[None], None, None
        if drawn:
            mass = torch.full((4,), 0.5 if shift is not None else 0.0)
            probs = torch.zeros(4, 2001).scatter(1, right[:, None], mass[:, None])[None]
            probs[0, :, 2000] += 1 - probs[0].sum(-1)
            scores = torch.full((1, 1, 2001), -torch.inf).index_fill(2, torch.tensor([TEXT[begin]]), 0.0)
        num_accepted, num_emitted = int(torch.rand((), generator=draws) < accepted), 1 + 2 * (number % 2)
        done: Any = SimpleNamespace(
            draft=Draft(tokens, [4], probs, source=source),
            rows=[0],
            emitted=[num_emitted],
            tokens=[TEXT[begin : begin + num_emitted]],
            accepted_in_chain=[num_accepted],
            scores=scores,
        )
        watch.observe(done, "head")
        if new_requests:
            watch.forget_rows([0])
        begin += num_emitted
    return watch


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize(("shift", "from_anchor", "option"), [(-1, True, "fill-in"), (1, False, "anchor")])
def test_layouts_are_named_by_where_candidates_fit(shift: int, from_anchor: bool, option: str, drawn: bool):
    misread, other = (HeadConfig(kind="dflash", sample_from_anchor=flag) for flag in (from_anchor, not from_anchor))
    options: dict[str, Any] = {"accepted": 0.2, "drawn": drawn}
    assert f"layout={option!r}" in watched(shift, config=misread, **options).reason()
    assert not watched(shift, config=other, **options).reason()  # no other way round
    assert not watched(0, config=misread, **options).reason()
    assert not watched(shift, config=HeadConfig(kind="eagle3"), **options).reason()
    assert not watched(1, rounds=30, config=misread, **options).reason()
    if shift > 0:  # of other texts nothing is known
        assert not watched(shift, config=misread, new_requests=True, **options).reason()


def test_heads_of_which_nothing_is_kept_are_told_what_to_try():
    reason = watched(None, accepted=0.05).reason()
    assert "no more than by chance" in reason
    assert "layout=, is_causal=" in reason
    assert "norm_output=" in watched(None, accepted=0.05, config=HeadConfig(kind="eagle3")).reason()
    # of which nothing can be overridden
    assert not watched(None, accepted=0.05, config=HeadConfig(kind="medusa")).reason()
    assert not watched(None, accepted=0.3).reason()
    assert not watched(None, rounds=MIN_FIRST_CANDIDATES - 1).reason()
    assert not watched(None, source="suffix").reason()


def test_false_alarms_and_power_as_stated():
    n = MIN_FIRST_CANDIDATES
    most = int(CHANCE_SHARE * n)
    reported = {
        share: sum(comb(n, accepted) * share**accepted * (1 - share) ** (n - accepted) for accepted in range(most + 1))
        for share in (0.3, 0.1, 0.05)
    }
    assert list(reported.values()) == pytest.approx([9e-4, 0.81, 0.995], rel=0.02)


def with_gains(gains: torch.Tensor) -> str:
    """What is said where candidates fit the place one on so much better, in each round."""
    watch = MisreadWatch(HeadConfig(kind="dflash", sample_from_anchor=False))
    watch.first_drafted, watch.first_accepted = len(gains), len(gains) // 3
    watch.gains[1] = [gains]
    return watch.reason()


def test_false_alarms_and_power_of_the_layout():
    """Greedily a gain is -1, 0 or 1. Of none on average, 4 standard errors are passed by chance in 1 of 10,000."""
    draws = torch.Generator().manual_seed(0)

    def reports(chances: list[float], rounds: int) -> int:
        drawn = torch.tensor(chances).multinomial(1000 * rounds, replacement=True, generator=draws).view(1000, rounds)
        return sum("layout='anchor'" in with_gains(gains) for gains in (drawn - 1).float())

    assert reports([0.4, 0.2, 0.4], 64) <= 1
    assert reports([0.1, 0.8, 0.1], 128) <= 1
    assert reports([0.1, 0.3, 0.6], 128) > 995
    assert not with_gains(torch.full((128,), 0.05))  # for sure, and not worth a word


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
