"""A draft reads prompts when candidates are wanted of them first, however late that is, and else nothing."""

from collections.abc import Callable

import pytest
import torch
from all_pairs import once
from many import assert_alone
from other_tokens import draft_of, target_of, texts, tokenizer_of
from repeating import LAYOUTS
from tiny import Forwards, near, prompts, tiny

from hf_specx import Costs, Request, SpeculativeDecoding
from hf_specx.models.runner import ModelRunner


COUPLED = {"do_sample": True, "top_k": 0}
pytestmark = pytest.mark.filterwarnings("ignore:in this batch all rows advance")


@pytest.mark.parametrize(("layout", "between"), [(layout, 0) for layout in LAYOUTS] + [("ragged", 4), ("padded", 4)])
def test_after_rows_have_left(in_turns: Callable, layout: str, between: int, compared: list[bool]):
    in_turns([0] * 12 + [4] * 5, between)
    target = tiny()
    draft = near(target, 0.02)
    settings = COUPLED | {"max_new_tokens": 40, "eos_token_id": [7, 23, 31, 46], "pad_token_id": 0}
    for seed in range(4):
        texts = []
        for strategy in (None, SpeculativeDecoding(draft, layout=layout, verification="coupled")):
            torch.manual_seed(seed)
            texts.append(target.generate(**prompts(6, seed=seed), **settings, custom_generate=strategy))
        assert torch.equal(*texts)
    assert len(compared) > 5
    assert all(compared)


def test_stale_candidates_would_be_seen(monkeypatch: pytest.MonkeyPatch, in_turns: Callable, compared: list[bool]):
    """A control: what was rejected is taken for text."""
    in_turns([0] * 12 + [4] * 5)
    monkeypatch.setattr(ModelRunner, "limit_computed_tokens", lambda self, row, count: None)
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.1))
    target.generate(**prompts(4), do_sample=False, max_new_tokens=40, custom_generate=strategy)
    assert not all(compared)


def queued(kind: str | None) -> tuple:
    """Target, draft, options of the strategy, prompts."""
    if kind is None:
        target = tiny()
        ids = [prompts(1, 4 + 5 * (n % 4), seed=n)["input_ids"][0] for n in range(14)]
        return target, near(target, 0.02), {}, ids
    other = "byte-level, other merges"
    tokenizers = {"tokenizer": tokenizer_of(kind), "draft_tokenizer": tokenizer_of(other)}
    inputs = texts(kind, 7)
    ids = [row[mask.bool()] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    return target_of(kind), draft_of(kind, other), tokenizers, ids * 2


@pytest.mark.parametrize(("kind", "pause"), once([None, "byte-level"], [3, 12, 30]))
def test_prompts_that_have_come_meanwhile(in_turns: Callable, kind: str | None, pause: int, compared: list[bool]):
    """In the places of rows that ended, some of them wider than all before; some have ended before they were read."""
    in_turns([0] * pause + [4] * 5)
    target, draft, options, ids = queued(kind)
    asked = [Request(one, 3 + 7 * (n % 3), seed=n) for n, one in enumerate(ids)]
    settings = COUPLED | {"pad_token_id": 1}
    strategy = SpeculativeDecoding(draft, verification="coupled", **options)
    assert_alone(strategy, target, asked, batch_size=3, **settings)
    assert strategy.report.drafted > 0
    assert len(compared) > 5
    assert all(compared)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_draft_that_does_not_pay_reads_nothing(rows: int):
    target, draft = tiny(), tiny(seed=8)
    times = {"target": {1: 1.0, 9: 4.0}, "draft": 0.9}
    strategy = SpeculativeDecoding(draft, costs=Costs({rows: times}, {"greedy": 0.02}))
    settings = {"do_sample": False, "max_new_tokens": 40}
    with Forwards(draft) as forwards:
        output = target.generate(**prompts(rows), **settings, custom_generate=strategy)
    assert torch.equal(output, target.generate(**prompts(rows), **settings))
    assert not forwards.lengths
