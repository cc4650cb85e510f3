"""The packed layout: all rows in one forward without a pad, and the same tokens as stock."""

import math

import pytest
import torch
import zoo
from all_pairs import all_pairs
from tiny import VOCAB_SIZE, Forwards, near, tiny
from transformers import DynamicCache, PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.common.architectures import LAYOUTS_OF
from hf_specx.models.choose import choose_layout
from hf_specx.models.slots import CACHE


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
    """Left-padded prompts of these lengths."""
    width = max(lengths)
    attention_mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(first, last + 1, attention_mask.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids * attention_mask, "attention_mask": attention_mask}


def model(model_type: str, attention: str = "sdpa") -> PreTrainedModel:
    if model_type != "deepseek_v3":
        return tiny(model_type, attn_implementation=attention)
    target = zoo.build("causal", model_type)
    target.set_attn_implementation(attention)
    return target


def stock(target: PreTrainedModel, inputs: dict, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    return target.generate(**inputs, **settings), torch.get_rng_state()


def ours(target: PreTrainedModel, draft: PreTrainedModel, inputs: dict, number: int | str = K, **settings):
    """Our output, the generator's state, the report and the tokens of each target forward."""
    strategy = SpeculativeDecoding(draft, layout="packed", num_draft_tokens=number, verification="coupled")
    torch.manual_seed(4)
    with Forwards(target) as forwards:
        output = target.generate(**inputs, **settings, custom_generate=strategy)
    return output, torch.get_rng_state(), strategy.report, forwards.ids


@pytest.mark.parametrize(("model_and_attention", "rows", "settings"), all_pairs(MODELS, LENGTHS, [GREEDY, SAMPLED]))
def test_equals_stock(
    model_and_attention: tuple[str, str], rows: int, settings: dict, monkeypatch: pytest.MonkeyPatch
):
    """With prompts and texts far longer than mistral's window of 8, and with rejections."""
    model_type, attention = model_and_attention
    monkeypatch.setitem(LAYOUTS_OF, model_type, ("ragged", "packed"))
    target = model(model_type, attention)
    assert target.config._attn_implementation == attention
    inputs = unequal(LENGTHS[rows], first=4)
    expected, state = stock(target, inputs, **settings, max_new_tokens=NEW_TOKENS)
    output, left, report, fed = ours(target, near(target, 0.05), inputs, **settings, max_new_tokens=NEW_TOKENS)
    assert torch.equal(output, expected)
    assert torch.equal(left, state)
    assert report.layout == "packed"
    assert fed[0].shape == (1, sum(LENGTHS[rows]))
    assert fed[1].shape == (1, rows * (K + 1))
    assert math.ceil((NEW_TOKENS - 1) / (K + 1)) < len(fed) - 1 < NEW_TOKENS - 5


@pytest.mark.usefixtures("draft_pays")
def test_auto_numbers_of_candidates_and_a_draft_of_another_kind():
    """Bare forwards are timed behind the prompts and taken back; the draft may have another layout."""
    target, inputs = tiny("llama"), unequal((3, 40, 1, 17))
    settings = GREEDY | {"max_new_tokens": NEW_TOKENS}
    expected, _ = stock(target, inputs, **settings)
    output, _, report, _ = ours(target, tiny("gpt2"), inputs, number="auto", **settings)
    assert torch.equal(output, expected)
    assert report.layout == "packed"


def test_positions_of_the_user():
    """Positions need not count from the first token of a row."""
    target, inputs = tiny("gpt2"), unequal((3, 11, 1))
    places = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    inputs["position_ids"] = places + torch.tensor([[7], [0], [20]])
    expected, _ = stock(target, inputs, **GREEDY, max_new_tokens=20)
    output, *_ = ours(target, near(target, 0.05), inputs, **GREEDY, max_new_tokens=20)
    assert torch.equal(output, expected)
    plain, _ = stock(target, {k: v for k, v in inputs.items() if k != "position_ids"}, **GREEDY, max_new_tokens=20)
    assert not torch.equal(plain, expected)


def test_the_prompt_is_read_without_pads():
    """Two prompts, a b and v w x y, are read as v w (a x) (b y); a window of two hides what lies further back."""
    target, seen = tiny("mistral", sliding_window=2), []
    inputs = {"input_ids": torch.tensor([[0, 0, 1, 2], [5, 6, 7, 8]])}
    inputs["attention_mask"] = (inputs["input_ids"] > 0).long()
    target.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    ours(target, near(target, 0.05), inputs, **GREEDY, max_new_tokens=4)
    assert seen[0]["input_ids"].tolist() == [[5, 6, 1, 7, 2, 8]]
    assert seen[0]["position_ids"].tolist() == [[0, 1, 0, 2, 1, 3]]
    visible = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 1, 0, 1, 0, 0],
        [0, 0, 1, 0, 1, 0],
        [0, 0, 0, 1, 0, 1],
    ]
    assert seen[0]["attention_mask"].int().tolist() == [[visible]]


def test_it_is_taken_only_where_it_is_asked_for():
    assert choose_layout(tiny("llama"))[0] == "ragged"
    layout, reason = choose_layout(tiny("llama"), "packed")
    assert layout == "packed"
    assert reason.startswith("asked for: llama takes positions and a 4D mask")
    for kind, model_type in (("seq2seq", "t5"), ("causal", "bloom"), ("causal", "mpt")):
        with pytest.raises(ValueError, match="layout='packed' has not been shown to be exact"):
            choose_layout(zoo.build(kind, model_type), "packed")


@torch.no_grad()
def filled(target: PreTrainedModel) -> DynamicCache:
    """By the first two tokens of two rows."""
    cache = DynamicCache(config=target.config)
    target(input_ids=torch.tensor([[1, 2], [3, 4]]), **{CACHE: cache})
    return cache


REFUSED = {  # what is said, and one more argument, made of the target and the ids [2, 5]
    "inputs_embeds": lambda target, ids: {"inputs_embeds": target.get_input_embeddings()(ids)},
    f"{CACHE} holds 2 tokens": lambda target, ids: {CACHE: filled(target)},
    "token_type_ids": lambda target, ids: {"token_type_ids": torch.ones_like(ids)},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_packed_is_refused(said: str):
    target, inputs = tiny("gpt2"), unequal((5, 5))
    inputs |= REFUSED[said](target, inputs["input_ids"])
    strategy = SpeculativeDecoding(near(target, 0.05), layout="packed")
    with (
        Forwards(target) as forwards,
        pytest.raises(ValueError, match=f"'packed' .*{said}.* use layout='ragged' or 'auto'"),
    ):
        target.generate(**inputs, max_new_tokens=5, custom_generate=strategy)
    assert not forwards.ids
