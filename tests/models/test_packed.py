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
from hf_specx.models.choose import choose_layout, layouts_of
from hf_specx.models.packed import PackedDecoder
from hf_specx.models.ragged import Masks
from hf_specx.models.slots import SlotCache


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


def ours(target: PreTrainedModel, draft: PreTrainedModel, inputs: dict, layout: str = "packed", **settings):
    """Our output, the generator's state, the report and the tokens of each target forward."""
    options = {"num_draft_tokens": K, "verification": "coupled"}
    strategy = SpeculativeDecoding(
        draft, layout=layout, **options | {name: settings.pop(name) for name in options if name in settings}
    )
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


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2"])
def test_rows_that_end_leave(model_type: str, settings: dict):
    target = tiny(model_type)
    inputs = unequal((3, 40, 1, 17, 8, 2))
    free, _ = stock(target, inputs, **settings, max_new_tokens=NEW_TOKENS)
    common = torch.bincount(free[:, 40:].flatten(), minlength=VOCAB_SIZE).argsort(descending=True)
    eos = common[[3, 8]].tolist()
    settings = settings | {"max_new_tokens": NEW_TOKENS, "eos_token_id": eos, "pad_token_id": eos[0]}
    expected, state = stock(target, inputs, **settings)
    output, left, _, fed = ours(target, near(target, 0.05), inputs, **settings)
    assert torch.equal(output, expected)
    assert torch.equal(left, state)
    full_rounds = {tokens.shape[1] // (K + 1) for tokens in fed[1:] if tokens.shape[1] % (K + 1) == 0}
    assert len(full_rounds) >= 3, "rows leave one after another"


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2"])
def test_verdicts_are_those_of_the_ragged_layout(model_type: str, verification: str):
    target, inputs = tiny(model_type), unequal((3, 40, 1, 17))
    settings = SAMPLED | {"max_new_tokens": NEW_TOKENS, "verification": verification}
    draft = near(target, 0.05)
    packed, _, report, _ = ours(target, draft, inputs, **settings)
    ragged, _, expected, _ = ours(target, draft, inputs, layout="ragged", **settings)
    assert torch.equal(packed, ragged)
    assert report.history == expected.history
    assert report.accepted == expected.accepted
    assert report.accepted_per_row == expected.accepted_per_row
    assert 0 < report.accepted < report.drafted


@pytest.mark.usefixtures("draft_pays")
def test_auto_numbers_of_candidates_and_a_draft_of_another_kind():
    """Bare forwards are timed behind the prompts and taken back; the draft may have another layout."""
    target, inputs = tiny("llama"), unequal((3, 40, 1, 17))
    settings = GREEDY | {"max_new_tokens": NEW_TOKENS}
    expected, _ = stock(target, inputs, **settings)
    output, _, report, _ = ours(target, tiny("gpt2"), inputs, num_draft_tokens="auto", **settings)
    assert torch.equal(output, expected)
    assert report.layout == "packed"
    bloom = zoo.build("causal", "bloom")
    bloom.resize_token_embeddings(VOCAB_SIZE)
    assert "packed" not in layouts_of(bloom)
    output, _, report, _ = ours(target, bloom, inputs, **settings)
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


def test_the_cache_that_is_returned():
    """Its columns are stock's, although rows left one after another."""
    target, inputs = tiny("llama"), unequal((3, 40, 1, 17))
    settings = SAMPLED | {"max_new_tokens": NEW_TOKENS, "eos_token_id": list(range(1, 6))}
    settings["return_dict_in_generate"] = True
    expected, _ = stock(target, inputs, **settings)
    output, _, _, fed = ours(target, near(target, 0.05), inputs, **settings)
    assert fed[-1].shape[1] < 4 * (K + 1)
    text = expected.sequences[:, 40:]
    ends = torch.isin(text, torch.arange(1, 6)).int()
    lengths = torch.where(ends.any(-1), ends.argmax(-1), text.shape[1] - 1)
    for ours_, stocks in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert ours_.keys.shape == stocks.keys.shape
        for row, (length, prompt) in enumerate(zip(lengths.tolist(), (3, 40, 1, 17), strict=True)):
            real = slice(40 - prompt, 40 + length)
            torch.testing.assert_close(ours_.keys[row, :, real], stocks.keys[row, :, real], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours_.values[row, :, real], stocks.values[row, :, real], rtol=1e-4, atol=1e-4)


def test_the_prompt_is_read_without_pads(monkeypatch: pytest.MonkeyPatch):
    """Two prompts, a b and v w x y, are read as v w (a x) (b y); a window of two hides what lies further back."""
    target = tiny("mistral", sliding_window=2)
    inputs = {"input_ids": torch.tensor([[0, 0, 1, 2], [5, 6, 7, 8]])}
    inputs["attention_mask"] = (inputs["input_ids"] > 0).long()
    seen, stored = [], []
    target.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    read = PackedDecoder.read
    monkeypatch.setattr(PackedDecoder, "read", lambda self: stored.append(self.cache) or read(self))
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
    _, cache = stored  # of the draft, which nobody has left yet
    assert cache.layers[0].keys.shape[0] == 1
    assert cache.slots.written == 6


def test_it_is_taken_only_where_it_is_asked_for():
    assert choose_layout(tiny("llama"))[0] == "ragged"
    layout, reason = choose_layout(tiny("llama"), "packed")
    assert layout == "packed"
    assert reason.startswith("asked for: llama takes positions and a 4D mask")
    for kind, model_type in (("seq2seq", "t5"), ("causal", "bloom"), ("causal", "mpt")):
        with pytest.raises(ValueError, match="layout='packed' has not been shown to be exact"):
            choose_layout(zoo.build(kind, model_type), "packed")


def three_positions(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Prepared as models with a time, a height and a width of each token do."""
    prepare = target.prepare_inputs_for_generation

    def prepared(*args, **kwargs):
        inputs = prepare(*args, **kwargs)
        return inputs | {"position_ids": inputs["position_ids"].expand(3, -1, -1)}

    target.prepare_inputs_for_generation = prepared
    return unequal((3, 5))


def embeddings(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    inputs = unequal((3, 5))
    return inputs | {"inputs_embeds": target.get_input_embeddings()(inputs["input_ids"])}


@torch.no_grad()
def past(target: PreTrainedModel) -> dict:
    cache = DynamicCache(config=target.config)
    target(input_ids=torch.tensor([[1, 2], [3, 4]]), past_key_values=cache)
    return {"input_ids": torch.tensor([[1, 2, 5], [3, 4, 6]]), "past_key_values": cache}


def token_types(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    inputs = unequal((3, 5))
    return inputs | {"token_type_ids": torch.ones_like(inputs["input_ids"])}


REFUSED = {
    "position_ids of shape .3, 2, 5.": three_positions,
    "inputs_embeds": embeddings,
    "past_key_values holds 2 tokens": past,
    "token_type_ids": token_types,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_packed_is_refused(said: str):
    target = tiny("gpt2")
    draft, inputs = near(target, 0.05), REFUSED[said](target)
    strategy = SpeculativeDecoding(draft, layout="packed")
    with (
        Forwards(target) as forwards,
        pytest.raises(ValueError, match=f"'packed' .*{said}.* use layout='ragged' or 'auto'"),
    ):
        target.generate(**inputs, max_new_tokens=5, custom_generate=strategy)
    assert not forwards.ids


def rows_mixed(self: Masks, queries: torch.Tensor, keys: torch.Tensor, known: torch.Tensor, *args):
    return BETWEEN(self, queries, keys, torch.ones_like(known), *args)


def others_kept(self: SlotCache, kept: torch.Tensor):
    KEEP(self, kept.roll(1))


def held_too_few(self: PackedDecoder, lengths: list[int]):
    HOLD(self, [max(1, length - 1) for length in lengths])


BETWEEN, KEEP, HOLD = Masks.between, SlotCache.keep, PackedDecoder._hold
FAULTS = {
    "mask": (Masks, "between", rows_mixed),
    "dropped slots": (SlotCache, "keep", others_kept),
    "lengths": (PackedDecoder, "_hold", held_too_few),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch):
    """The tests above can fail: each of these errors gives other tokens."""
    target, inputs = tiny("llama"), unequal((3, 40, 1, 17))
    settings = SAMPLED | {"max_new_tokens": NEW_TOKENS, "eos_token_id": list(range(1, 6))}
    expected, _ = stock(target, inputs, **settings)
    assert torch.equal(ours(target, near(target, 0.05), inputs, **settings)[0], expected)
    monkeypatch.setattr(*FAULTS[fault])
    assert not torch.equal(ours(target, near(target, 0.05), inputs, **settings)[0], expected)
