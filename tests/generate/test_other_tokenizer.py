"""Drafts with another tokenizer than their target: the tokens are those of plain `generate`, for every kind of both.

Equality is met by any draft, so what the draft reads is compared with its own forward of the same text, and how much
it is fed is counted by hooks.
"""

import pytest
import torch
from other_tokens import KINDS, draft_of, target_of, texts, tokenizer_of
from tiny import Forwards
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.drafting.other_tokenizer import OwnText


SETTINGS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0, "temperature": 0.7},
    "warped": {"do_sample": True, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
}
NEW_TOKENS = 20
NAMES = [*KINDS]
PAIRS = [(kind, NAMES[(n + shift) % len(NAMES)]) for n, kind in enumerate(NAMES) for shift in (1, 3)]


def run(target: PreTrainedModel, inputs: dict, strategy: SpeculativeDecoding | None = None, **settings):
    torch.manual_seed(4)
    given = {} if strategy is None else {"custom_generate": strategy}
    return target.generate(**inputs, **{"max_new_tokens": NEW_TOKENS, "pad_token_id": 0} | settings, **given)


def tokenizers(kind: str, draft_kind: str) -> dict:
    return {"tokenizer": tokenizer_of(kind), "draft_tokenizer": tokenizer_of(draft_kind)}


def strategy_of(kind: str, draft_kind: str, draft: PreTrainedModel | None = None, **options) -> SpeculativeDecoding:
    options = {"num_draft_tokens": 4, "verification": "coupled"} | tokenizers(kind, draft_kind) | options
    return SpeculativeDecoding(draft or draft_of(kind, draft_kind), **options)


@pytest.fixture
def read_again(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far the draft's logits in each step are from those of a forward of all that it has read, without a cache."""
    found = []
    step = OwnText.step

    def checked(text, batch, ahead, skipped=0):
        logits = step(text, batch, ahead, skipped)
        for index, row in enumerate(batch.rows):
            plain = text.inner.model(text.own.row(row)[None]).logits[:, -1:]
            expected = text.vocabularies.logits(plain)[0]
            found.append((logits[index] - expected).nan_to_num(0).abs().max().item())
        return logits

    monkeypatch.setattr(OwnText, "step", checked)
    return found


@pytest.mark.parametrize(("kind", "draft_kind"), PAIRS)
def test_equals_plain(kind: str, draft_kind: str):
    """With prompts of unequal length, special tokens, emoji, and what the target emits: bytes that are no UTF-8."""
    target, accepted = target_of(kind), 0
    for rows, name in zip((1, 4, 8), SETTINGS, strict=True):
        inputs, settings = texts(kind, rows), SETTINGS[name]
        strategy = strategy_of(kind, draft_kind)
        with Forwards(target) as forwards:
            output = run(target, inputs, strategy, **settings)
        assert torch.equal(output, run(target, inputs, **settings)), (rows, name)
        assert sum(n > 1 for n in forwards.lengths[1:]) > 1  # candidates were judged
        assert strategy.report.tokenizer_match["match"] == "tokens"
        accepted += strategy.report.accepted
    assert accepted > 0


@pytest.mark.parametrize(("kind", "draft_kind"), PAIRS)
def test_the_draft_has_read_its_own_text(kind: str, draft_kind: str, read_again: list[float]):
    strategy = strategy_of(kind, draft_kind)
    run(target_of(kind), texts(kind, 4), strategy, **SETTINGS["sampled"])
    assert len(read_again) > 40
    assert max(read_again) < 1e-3
