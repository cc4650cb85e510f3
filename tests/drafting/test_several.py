"""Rows and rounds that choose between a suffix draft and a draft model, through `generate`."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from all_pairs import each_value, once
from plain import assert_plain
from repeating import LAYOUTS, NEW_TOKENS, cyclic, few_tokens, repetitive, run
from rounds import Heard
from tiny import Forwards, near, tiny
from transformers import PreTrainedModel

from hf_specx import Costs, SpeculativeDecoding, SuffixDraft
from hf_specx.drafting.several import SeveralDrafts


SAMPLED = {"do_sample": True, "top_k": 6, "temperature": 0.4}
KNOWN = {"target": {1: 1.0, 9: 1.4}, "draft": 0.1}  # seconds of forwards
pytestmark = pytest.mark.filterwarnings("ignore:in this batch all rows advance")


@cache
def models(model_type: str = "llama", noise: float = 0.2) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The draft is often right."""
    return repetitive(model_type), near(repetitive(model_type), noise)


def mixture(draft: PreTrainedModel, rows: int = 0, **options) -> SpeculativeDecoding:
    """Of a suffix draft and a model; with "auto" the times of forwards are known for so many rows."""
    if options.get("num_draft_tokens", "auto") == "auto":
        options["costs"] = Costs({rows: KNOWN})
    return SpeculativeDecoding([SuffixDraft(), draft], **options)


def takes_both(strategy: SpeculativeDecoding) -> bool:
    sources = strategy.report.sources
    return sources.keys() == {"suffix", "model"} and all(counts["accepted"] for counts in sources.values())


@pytest.mark.parametrize(("rows", "layout"), each_value([1, 4, 8], LAYOUTS))
def test_equals_plain_where_times_are_known(rows: int, layout: str):
    """And decide of which part each row takes its candidates."""
    target, draft = models()
    strategy = mixture(draft, rows, layout=layout, verification="coupled")
    counts = assert_plain(target, strategy, few_tokens(rows), **SAMPLED, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    assert layout == "lockstep" or counts.forwards < NEW_TOKENS
    assert layout == "lockstep" or rows == 1 or takes_both(strategy)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_row_under_its_seed_is_the_same_after_other_calls(verification: str):
    """Whatever these have shown of acceptance."""
    target, draft = models()
    strategy, seeds = SpeculativeDecoding([SuffixDraft(), draft], verification=verification), [7, 8, 9, 10]
    first = run(target, few_tokens(4), strategy, **SAMPLED, seeds=seeds)
    run(target, few_tokens(4), strategy, **SAMPLED)
    strategy.costs.alpha = {verification: 0.02}
    assert torch.equal(run(target, few_tokens(4), strategy, **SAMPLED, seeds=seeds), first)


def test_a_round_that_no_row_drafts_by_the_model_runs_no_forward_of_it():
    draft = near(cyclic(), 0.0)
    strategy = SpeculativeDecoding([SuffixDraft(), draft], costs=Costs({1: KNOWN}))
    with Forwards(draft) as forwards:
        strategy.listeners = (steps := Heard(lambda done: (done.draft.sources, len(forwards.ids))),)
        run(cyclic(), few_tokens(1), strategy, do_sample=False, max_new_tokens=80)
    of_suffix = [n for n, (sources, _) in enumerate(steps) if n and sources == ["suffix"]]
    assert len(of_suffix) > 3
    assert all(steps[n][1] == steps[n - 1][1] for n in of_suffix)


def rounds_in_turns(drafts: SeveralDrafts, batch, offered: list, hoped: list) -> list[bool]:
    """The suffix for some rounds in which it has candidates for a row, then the model, and so on."""
    drafts.rounds = getattr(drafts, "rounds", 0) + 1
    return [drafts.rounds % 8 > 5 or not any(offered)] * len(offered)


def rows_in_turns(drafts: SeveralDrafts, batch, offered: list, hoped: list) -> list[bool]:
    """Even rows draft by the model, and the others only where the suffix has nothing."""
    return [not other or row % 2 == 0 for row, other in zip(batch.rows, offered, strict=True)]


@pytest.mark.parametrize(("layout", "choose"), once(LAYOUTS, [rounds_in_turns, rows_in_turns]))
def test_the_model_reads_what_a_fresh_forward_reads(
    monkeypatch: pytest.MonkeyPatch, layout: str, choose: Callable, compared: list[bool]
):
    """Also after many rounds without it, in which some rows advanced by many more tokens than others."""
    target, draft = models(noise=0.02)
    monkeypatch.setattr(SeveralDrafts, "_asks_model", choose)
    inputs, sources = few_tokens(4), set()
    inputs["input_ids"][1] = torch.tensor([5, 9, 3] * 6)[:17] * inputs["attention_mask"][1]
    for seed in range(2):
        torch.manual_seed(seed)
        strategy = mixture(draft, num_draft_tokens=5, layout=layout, verification="coupled")
        settings = SAMPLED | {"max_new_tokens": 60, "eos_token_id": 11, "pad_token_id": 0}
        target.generate(**inputs, **settings, custom_generate=strategy)
        sources |= strategy.report.sources.keys()
    assert len(compared) > 20
    assert all(compared)
    assert sources == {"suffix", "model"}


def test_acceptance_of_the_model_alone_is_remembered():
    """It is what "auto" goes by in the next call."""
    strategy = mixture(near(cyclic(), 3.0), num_draft_tokens=3, verification="coupled")
    run(cyclic(), few_tokens(2), strategy, do_sample=False, max_new_tokens=80)
    sources = strategy.report.sources
    assert sources["suffix"]["accepted"] > 0.8 * sources["suffix"]["drafted"]
    assert strategy.report.conditional_acceptance < 0.5


def test_without_a_model():
    strategy = SpeculativeDecoding([SuffixDraft(), SuffixDraft(min_match=1)])
    assert_plain(cyclic(), strategy, few_tokens(3), **SAMPLED, max_new_tokens=NEW_TOKENS)
    assert strategy.report.verification == "coupled"


def test_lists_that_are_refused():
    draft = models()[1]
    wrong = {
        "has no draft": [],
        "twice": [draft, SuffixDraft(), draft],
        "list inside": [SuffixDraft(), [draft]],
        "2 drafts that run forwards": [draft, tiny()],
    }
    for word, drafts in wrong.items():
        with pytest.raises(ValueError, match=word):
            SpeculativeDecoding(drafts)
