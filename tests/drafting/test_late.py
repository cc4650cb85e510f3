"""A draft reads prompts when candidates are wanted of them first, however late that is, and else nothing."""

import pytest
import torch
from other_tokens import draft_of, target_of, texts, tokenizer_of
from tiny import Forwards, near, prompts, tiny

from hf_specx import Costs, Request, SpeculativeDecoding
from hf_specx.drafting.schedule import Schedule
from hf_specx.engine import run
from hf_specx.models.decoder import Decoder


LAYOUTS = ("ragged", "padded", "packed", "lockstep")
pytestmark = pytest.mark.filterwarnings("ignore:in this batch all rows advance")


class InTurns(Schedule):
    """No candidates for some rounds, then some for a few rounds, and so on."""

    pause, some = 12, 5

    def __init__(self, room: list[int]):
        super().__init__(4, room)
        self.rounds = 0

    def number(self, row: int) -> int:
        return 4 if self.rounds % (self.pause + self.some) >= self.pause else 0

    def observe(self, done) -> None:
        self.rounds += 1


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(number, pace, verification, batch, room, most=None) -> Schedule:
        return InTurns(list(room))

    monkeypatch.setattr(run, "make_schedule", made)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the logits of each step of a draft are those of a forward of the whole text, without a cache."""
    found, step = [], Decoder.step

    def noted(decoder, batch, ahead, skipped=0):
        logits = step(decoder, batch, ahead, skipped)
        if ahead == 0 and any(batch.counts):
            for index, row in enumerate(batch.rows):
                fresh = decoder.model(input_ids=batch.row(row)[None]).logits[0, -1]
                found.append(torch.allclose(fresh, logits[index, -1], atol=1e-3))
        return logits

    monkeypatch.setattr(Decoder, "step", noted)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_rows_have_left(layout: str, in_turns, compared: list[bool]):
    target = tiny()
    draft = near(target, 0.02)
    settings = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": 40,
        "eos_token_id": [7, 23, 31, 46],
        "pad_token_id": 0,
    }
    for seed in range(4):
        texts = []
        for strategy in (None, SpeculativeDecoding(draft, layout=layout, verification="coupled")):
            torch.manual_seed(seed)
            texts.append(target.generate(**prompts(6, seed=seed), **settings, custom_generate=strategy))
        assert torch.equal(*texts)
    assert len(compared) > 5
    assert all(compared)


def queued(kind: str | None) -> tuple:
    """Target, draft, options of the strategy, prompts."""
    if kind is None:
        target = tiny()
        ids = [prompts(1, 4 + 5 * (n % 4), seed=n)["input_ids"][0] for n in range(14)]
        return target, near(target, 0.02), {}, ids
    other = "byte-level, other merges"
    both = {"tokenizer": tokenizer_of(kind), "draft_tokenizer": tokenizer_of(other)}
    given = texts(kind, 7)
    ids = [row[mask.bool()] for row, mask in zip(given["input_ids"], given["attention_mask"], strict=True)]
    return target_of(kind), draft_of(kind, other), both, ids * 2


@pytest.mark.parametrize("kind", [None, "byte-level"])
@pytest.mark.parametrize("pause", [3, 12, 30])
def test_prompts_that_have_come_meanwhile(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, pause: int, in_turns, compared: list[bool]
):
    """In the places of rows that ended, some of them wider than all before; some have ended before they were read."""
    monkeypatch.setattr(InTurns, "pause", pause)
    target, draft, options, ids = queued(kind)
    asked = [Request(one, 3 + 7 * (n % 3), seed=n) for n, one in enumerate(ids)]
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": 1}
    strategy = SpeculativeDecoding(draft, verification="coupled", **options)
    done = list(strategy.generate_many(target, asked, batch_size=3, ordered=True, **settings))
    for request, one in zip(asked, done, strict=True):
        torch.manual_seed(request.seed)
        given = {"input_ids": request.input_ids[None], "attention_mask": torch.ones_like(request.input_ids[None])}
        plain = target.generate(**given, max_new_tokens=request.max_new_tokens, **settings)
        assert one.tokens == plain[0, len(request.input_ids) :].tolist()
    assert strategy.report.drafted > 0
    assert len(compared) > 5
    assert all(compared)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_draft_that_does_not_pay_reads_nothing(rows: int):
    target, draft = tiny(), tiny(seed=8)
    known = {"target": {1: 1.0, 9: 4.0}, "draft": 0.9}
    strategy = SpeculativeDecoding(draft, costs=Costs({rows: known}, {"greedy": 0.02}))
    settings = {"do_sample": False, "max_new_tokens": 40}
    with Forwards(draft) as forwards:
        output = target.generate(**prompts(rows), **settings, custom_generate=strategy)
    assert torch.equal(output, target.generate(**prompts(rows), **settings))
    assert not forwards.lengths


def test_a_prompt_that_has_come_and_gone_is_never_read(monkeypatch: pytest.MonkeyPatch, compared: list[bool]):
    """Its row has left by the time that candidates are wanted of the others."""

    class Between(InTurns):
        def number(self, row: int) -> int:
            return 0 if 2 < self.rounds < 25 else 4

    monkeypatch.setattr(run, "make_schedule", lambda *given: Between(list(given[4])))
    target, draft, _, ids = queued(None)
    asked = [Request(one, limit) for one, limit in zip(ids[2::-1], (70, 14, 5), strict=True)]
    strategy = SpeculativeDecoding(draft, verification="coupled")
    done = list(strategy.generate_many(target, asked, batch_size=2, ordered=True, do_sample=False))
    for request, one in zip(asked, done, strict=True):
        given = {"input_ids": request.input_ids[None], "attention_mask": torch.ones_like(request.input_ids[None])}
        plain = target.generate(**given, max_new_tokens=request.max_new_tokens, do_sample=False)
        assert one.tokens == plain[0, len(request.input_ids) :].tolist()
    drafted = [record.drafted > 0 for record in strategy.report.history[0]]
    assert drafted[-4:] == [True] * 4
    assert not all(drafted[1:])
    assert all(compared)
