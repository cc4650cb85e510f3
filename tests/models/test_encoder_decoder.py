"""Encoder-decoder targets: stock's tokens in every layout that they have, and each prompt encoded once."""

import copy
import math
from functools import cache

import pytest
import torch
import zoo
from all_pairs import all_pairs
from counting import counting
from tiny import near, prompts
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.models.slots import CACHE


LAYOUTS = ("padded", "lockstep")
DRAFT_TOKENS = 3
MODEL_TYPES = ("t5", "bart", "marian", "mbart", "pegasus", "m2m_100")
KINDS = ("t5", "bart", "m2m_100")  # of positions: relative, learned, and none for pads
SETTINGS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}
NEW_TOKENS = 21


def stock(target: PreTrainedModel, **call) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    return target.generate(**call), torch.get_rng_state()


def ours(target: PreTrainedModel, draft: PreTrainedModel, layout: str, **call) -> tuple[torch.Tensor, torch.Tensor]:
    strategy = SpeculativeDecoding(draft, num_draft_tokens=DRAFT_TOKENS, verification="coupled", layout=layout)
    torch.manual_seed(4)
    return target.generate(**call, custom_generate=strategy), torch.get_rng_state()


def assert_equals_stock(target: PreTrainedModel, drafts: dict[str, PreTrainedModel], layout: str, **call):
    """Returns stock's tokens."""
    expected, state = stock(target, **call)
    for name, draft in drafts.items():
        output, left = ours(target, draft, layout, **call)
        assert torch.equal(output, expected), name
        assert torch.equal(left, state), name
    return expected


@cache
def models(model_type: str) -> tuple[PreTrainedModel, dict[str, PreTrainedModel]]:
    """A target and its drafts: a copy nearby, one that shares the encoder, and a model of another family."""
    target = zoo.build("seq2seq", model_type)
    noise = 0.15 if model_type == "marian" else 0.25
    copies = near(target, noise), near(target, noise, seed=2)
    (copies[1] if model_type == "t5" else copies[1].model).encoder = target.get_encoder()
    return target, {
        "near": copies[0],
        "shared": copies[1],
        "stranger": zoo.build("seq2seq", "bart" if model_type == "t5" else "t5"),
    }


@pytest.mark.parametrize(("model_type", "layout", "settings"), all_pairs(MODEL_TYPES, LAYOUTS, SETTINGS))
def test_equals_stock(model_type: str, layout: str, settings: str):
    """In fewer forwards than tokens, with rejections, and with the prompts encoded once by each encoder."""
    target, drafts = models(model_type)
    call = zoo.inputs(target, 4) | SETTINGS[settings] | {"max_new_tokens": NEW_TOKENS}
    expected, state = stock(target, **call)
    assert len({tuple(row) for row in expected.tolist()}) >= 3
    for name, draft in drafts.items():
        with (
            counting(target) as forwards,
            counting(target.get_encoder()) as encoded,
            counting(draft.get_encoder()) as by_draft,
        ):
            output, left = ours(target, draft, layout, **call)
        assert torch.equal(output, expected), name
        assert torch.equal(left, state), name
        assert len(encoded) == len(by_draft) == 1, name  # the shared encoder is one module with one forward
        if name == "near":
            fewest = 1 + math.ceil((NEW_TOKENS - 1) / (DRAFT_TOKENS + 1))
            assert fewest < len(forwards) < NEW_TOKENS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", KINDS)
def test_several_sequences_of_each_prompt(model_type: str, layout: str):
    target, drafts = models(model_type)
    call = zoo.inputs(target, 3) | SETTINGS["sampled"] | {"max_new_tokens": 12, "num_return_sequences": 2}
    expected = assert_equals_stock(target, drafts, layout, **call)
    assert len(expected) == 6


@pytest.mark.parametrize(("model_type", "layout", "padded"), all_pairs(MODEL_TYPES, LAYOUTS, [False, True]))
def test_decoder_prompts(model_type: str, layout: str, padded: bool):
    """Of several tokens; padded on the left, stock goes by the mask, and by the columns for positions."""
    target, drafts = models(model_type)
    start = torch.tensor([[2, 11, 12, 13], [2, 21, 22, 23], [2, 31, 32, 33], [2, 41, 42, 43]])
    call = zoo.inputs(target, 4) | SETTINGS["sampled"] | {"max_new_tokens": 12, "decoder_input_ids": start}
    if padded:
        mask = (torch.arange(4) >= torch.tensor([0, 3, 1, 2])[:, None]).long()
        call |= {"decoder_input_ids": start * mask, "decoder_attention_mask": mask}
    assert_equals_stock(target, drafts, layout, **call)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", KINDS)
def test_a_cache_without_a_mask(model_type: str, layout: str):
    """Stock reads all of `decoder_input_ids` behind what the cache holds, which it finds out by a mask only."""
    target, drafts = models(model_type)
    call = zoo.inputs(target, 4) | SETTINGS["greedy"] | {"max_new_tokens": 6}
    first = target.generate(**call, return_dict_in_generate=True)
    turn = call | {"decoder_input_ids": first.sequences}
    expected = target.generate(**turn, **{CACHE: copy.deepcopy(first.past_key_values)})
    output, _ = ours(target, drafts["near"], layout, **turn, **{CACHE: first.past_key_values})
    assert torch.equal(output, expected)


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
def test_a_decoder_that_sees_pads_in_single_steps():
    """LED heeds a mask where it is fed several tokens only: no pads may come in, and those of the call are seen."""
    target = zoo.build("seq2seq", "led")
    drafts = {"near": near(target, 0.05)}
    for seed in (26, 27):  # the last token of some row is fed alone behind others that went on
        assert_equals_stock(target, drafts, "auto", **prompts(4, 9, seed=seed), do_sample=False, max_new_tokens=8)
    mask = (torch.arange(4) >= torch.tensor([0, 3, 1, 2])[:, None]).long()
    start = torch.tensor([[2, 11, 12, 13], [2, 21, 22, 23], [2, 31, 32, 33], [2, 41, 42, 43]]) * mask
    call = zoo.inputs(target, 4) | SETTINGS["sampled"] | {"max_new_tokens": 12}
    assert_equals_stock(target, drafts, "auto", **call, decoder_input_ids=start, decoder_attention_mask=mask)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", KINDS)
def test_first_and_last_tokens(model_type: str, layout: str):
    """A forced first token, as of a language, and rows that end one after another."""
    target, drafts = models(model_type)
    call = zoo.inputs(target, 4) | SETTINGS["sampled"] | {"max_new_tokens": 24}
    ends = {"eos_token_id": list(range(4, 9)), "forced_bos_token_id": 50}
    expected = assert_equals_stock(target, drafts, layout, **call, **ends)
    assert (expected[:, 1] == 50).all()
    lengths = (expected[:, 1:] != 0).sum(-1)
    assert len(set(lengths.tolist())) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pads_in_the_text(layout: str):
    """M2M100 gives an emitted pad id no position, and the tokens after it those of their columns."""
    target, drafts = models("m2m_100")
    call = zoo.inputs(target, 4) | SETTINGS["sampled"] | {"max_new_tokens": NEW_TOKENS, "sequence_bias": {(0,): 6.0}}
    expected = assert_equals_stock(target, drafts, layout, **call)
    assert ((expected[:, 1:] == 0).sum(-1) > 2).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_up_to_the_last_position(layout: str):
    """Rows near the end are fed candidates behind it while others catch up; the table has no place for these."""
    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.4, "vocab_size": 96}
    heads = {f"{side}_{part}": 2 for side in ("encoder", "decoder") for part in ("layers", "attention_heads")}
    torch.manual_seed(0)
    ends = {"eos_token_id": None, "forced_eos_token_id": None}
    target = BartForConditionalGeneration(BartConfig(max_position_embeddings=20, **sizes, **heads, **ends)).eval()
    call = zoo.inputs(target, 4) | {"do_sample": True, "top_k": 0, "max_length": 21}
    expected = assert_equals_stock(target, {"near": near(target, 0.1)}, layout, **call)
    assert expected.shape[1] == 21


def test_inputs_for_the_draft():
    """A draft with an encoder of its own cannot go by `encoder_outputs` alone; one that shares the encoder can."""
    target, drafts = models("bart")
    inputs = zoo.inputs(target, 4)
    encoded = target.get_encoder()(**inputs)
    call = {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"], "max_new_tokens": 12}
    assert_equals_stock(target, {"shared": drafts["shared"]}, "padded", **call)
    with pytest.raises(ValueError, match="has an encoder of its own; pass what the encoder reads"):
        ours(target, drafts["near"], "padded", **call)
