"""Encoder-decoder targets: stock's tokens in every layout that they have, and each prompt encoded once."""

import copy
import math
from functools import cache

import pytest
import torch
import zoo
from all_pairs import each_value
from counting import counting
from plain import assert_plain
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


def assert_equals_stock(target: PreTrainedModel, drafts: dict[str, PreTrainedModel], layout: str, **call):
    """Returns stock's tokens."""
    compared = None
    for draft in drafts.values():
        strategy = SpeculativeDecoding(draft, num_draft_tokens=DRAFT_TOKENS, verification="coupled", layout=layout)
        compared = assert_plain(target, strategy, {}, lambda: copy.deepcopy(call), seed=4, before=compared)
    return compared.text


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


@pytest.mark.parametrize(("model_type", "layout", "settings"), each_value(MODEL_TYPES, LAYOUTS, SETTINGS))
def test_equals_stock(model_type: str, layout: str, settings: str):
    """In fewer forwards than tokens, with rejections, and with the prompts encoded once by each encoder."""
    target, drafts = models(model_type)
    call = zoo.inputs(target, 4) | SETTINGS[settings] | {"max_new_tokens": NEW_TOKENS}
    for name, draft in drafts.items():
        strategy = SpeculativeDecoding(draft, num_draft_tokens=DRAFT_TOKENS, verification="coupled", layout=layout)
        with counting(target.get_encoder()) as encoded, counting(draft.get_encoder()) as by_draft:
            compared = assert_plain(target, strategy, call)
        assert len({tuple(row) for row in compared.text.tolist()}) >= 3
        assert len(encoded) == 2, name  # one of them by plain `generate`
        assert len(by_draft) == 1 + (name == "shared"), name  # the shared encoder is one module with one forward
        if name == "near":
            fewest = 1 + math.ceil((NEW_TOKENS - 1) / (DRAFT_TOKENS + 1))
            assert fewest < compared.forwards < NEW_TOKENS


START = torch.tensor([[2, 11, 12, 13], [2, 21, 22, 23], [2, 31, 32, 33], [2, 41, 42, 43]])
MASK = (torch.arange(4) >= torch.tensor([0, 3, 1, 2])[:, None]).long()
PADDED = {"decoder_input_ids": START * MASK, "decoder_attention_mask": MASK}
CALLS = {
    "decoder prompts": {"decoder_input_ids": START},
    "padded decoder prompts": PADDED,  # stock goes by the mask, and by the columns for positions
    "several sequences": {"num_return_sequences": 2},
    "a first token for each row": {"decoder_start_token_id": [5, 6, 7, 8]},
    "what the text must not repeat": {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.5},
    "first and last tokens": {"eos_token_id": list(range(4, 9)), "forced_bos_token_id": 50, "max_new_tokens": 24},
}


@pytest.mark.parametrize(("model_type", "layout", "name"), each_value(MODEL_TYPES, LAYOUTS, CALLS))
def test_other_calls(model_type: str, layout: str, name: str):
    target, drafts = models(model_type)
    call = zoo.inputs(target, 4) | SETTINGS["sampled"] | {"max_new_tokens": 12} | CALLS[name]
    text = assert_equals_stock(target, drafts, layout, **call)
    if name == "first and last tokens" and model_type in KINDS:
        assert (text[:, 1] == 50).all()
        assert len(set((text[:, 1:] != 0).sum(-1).tolist())) > 1


@pytest.mark.parametrize(("model_type", "layout"), each_value(KINDS, LAYOUTS))
def test_a_cache_without_a_mask(model_type: str, layout: str):
    """Stock reads all of `decoder_input_ids` behind what the cache holds, which it finds out by a mask only."""
    target, drafts = models(model_type)
    call = zoo.inputs(target, 4) | SETTINGS["greedy"] | {"max_new_tokens": 6}
    first = target.generate(**call, return_dict_in_generate=True)
    turn = call | {"decoder_input_ids": first.sequences, CACHE: first.past_key_values}
    assert_equals_stock(target, {"near": drafts["near"]}, layout, **turn)


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
def test_a_decoder_that_sees_pads_in_single_steps():
    """LED heeds a mask where it is fed several tokens only: no pads may come in, and those of the call are seen."""
    target = zoo.build("seq2seq", "led")
    drafts = {"near": near(target, 0.05)}
    for seed in (26, 27):  # the last token of some row is fed alone behind others that went on
        assert_equals_stock(target, drafts, "auto", **prompts(4, 9, seed=seed), do_sample=False, max_new_tokens=8)
    call = zoo.inputs(target, 4) | SETTINGS["sampled"] | {"max_new_tokens": 12}
    assert_equals_stock(target, drafts, "auto", **call, **PADDED)


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
    sizes |= {f"{side}_{part}": 2 for side in ("encoder", "decoder") for part in ("layers", "attention_heads")}
    torch.manual_seed(0)
    config = BartConfig(max_position_embeddings=20, eos_token_id=None, forced_eos_token_id=None, **sizes)
    target = BartForConditionalGeneration(config).eval()
    call = zoo.inputs(target, 4) | SETTINGS["sampled"] | {"max_length": 21}
    assert assert_equals_stock(target, {"near": near(target, 0.1)}, layout, **call).shape[1] == 21


@pytest.mark.parametrize("layout", LAYOUTS)
def test_encodings_that_are_given(layout: str):
    """With what was encoded, for a draft with an encoder of its own; or as embeddings."""
    target, drafts = models("bart")
    inputs = zoo.inputs(target, 4)
    call = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 12}
    with torch.no_grad():
        encoded = {"encoder_outputs": target.get_encoder()(**inputs)}
        embeds = target.get_encoder().get_input_embeddings()(inputs["input_ids"])
    assert_equals_stock(target, {"shared": drafts["shared"]}, layout, **call, **encoded)
    assert_equals_stock(target, drafts, layout, **call, **encoded, input_ids=inputs["input_ids"])
    assert_equals_stock(target, {"near": drafts["near"]}, layout, **call, inputs_embeds=embeds)
