"""The packed layout: all rows in one forward without a pad, and the same tokens as stock."""

import math

import pytest
import torch
import zoo
from all_pairs import each_value
from plain import assert_plain
from tiny import VOCAB_SIZE, Forwards, near, tiny
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.common.architectures import LAYOUTS_OF


MODELS = [
    (model_type, attention)
    for model_type in ("llama", "qwen3", "mistral", "gpt2", "gemma2", "gpt_neox", "deepseek_v3")
    for attention in ("eager", "sdpa")
    if (model_type, attention) != ("gemma2", "sdpa")  # which its logit caps exclude
]
LENGTHS = {1: (40,), 4: (3, 40, 1, 17)}
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "top_k": 0}
NEW_TOKENS = 60
K = 4


def unequal(lengths: tuple[int, ...], first: int = 1, last: int = VOCAB_SIZE - 1) -> dict[str, torch.Tensor]:
    width = max(lengths)
    attention_mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(first, last + 1, attention_mask.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids * attention_mask, "attention_mask": attention_mask}


def packed(target: PreTrainedModel, inputs: dict, draft: PreTrainedModel | None = None, number=K, **settings):
    """Assert that the text is stock's, and give the tokens of each of our target forwards."""
    draft = near(target, 0.05) if draft is None else draft
    strategy = SpeculativeDecoding(draft, layout="packed", num_draft_tokens=number, verification="coupled")
    with Forwards(target) as forwards:
        count = assert_plain(target, strategy, inputs, **settings).forwards
    assert strategy.report.layout == "packed"
    return forwards.ids[-count:]


@pytest.mark.parametrize(("model_and_attention", "rows", "settings"), each_value(MODELS, LENGTHS, [GREEDY, SAMPLED]))
def test_equals_stock(
    model_and_attention: tuple[str, str], rows: int, settings: dict, monkeypatch: pytest.MonkeyPatch
):
    """With prompts and texts far longer than mistral's window of 8, and with rejections."""
    model_type, attention = model_and_attention
    monkeypatch.setitem(LAYOUTS_OF, model_type, ("ragged", "packed"))
    target = zoo.build("causal", model_type) if model_type == "deepseek_v3" else tiny(model_type)
    target.set_attn_implementation(attention)
    fed = packed(target, unequal(LENGTHS[rows], first=4), **settings, max_new_tokens=NEW_TOKENS)
    assert fed[0].shape == (1, sum(LENGTHS[rows]))
    assert fed[1].shape == (1, rows * (K + 1))
    assert math.ceil((NEW_TOKENS - 1) / (K + 1)) < len(fed) - 1 < NEW_TOKENS - 5


@pytest.mark.usefixtures("draft_pays")
def test_auto_numbers_of_candidates_and_a_draft_of_another_kind():
    """Bare forwards are timed behind the prompts and taken back; the draft may have another layout."""
    packed(tiny("llama"), unequal((3, 40, 1, 17)), tiny("gpt2"), "auto", **GREEDY, max_new_tokens=NEW_TOKENS)


def test_positions_of_the_user():
    """Positions need not count from the first token of a row."""
    target, inputs = tiny("gpt2"), unequal((3, 11, 1))
    places = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    inputs["position_ids"] = places + torch.tensor([[7], [0], [20]])
    packed(target, inputs, **GREEDY, max_new_tokens=20)
