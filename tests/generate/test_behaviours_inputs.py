"""What a call can start from, through both entries, as transformers' users know it: prompts, embeddings, caches."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from alike import ENTRIES, models, same
from tiny import VOCAB_SIZE, Forwards, near, prompts, tiny
from transformers import DynamicCache, PreTrainedModel

from hf_specx.models.slots import CACHE


SAMPLING = [False, True]


@pytest.mark.parametrize("do_sample", SAMPLING)
def test_ways_to_pass_the_prompt(do_sample: bool):
    call = {"do_sample": do_sample, "max_new_tokens": 12}
    inputs = prompts(4)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    expected = same(**inputs, **call)
    assert torch.equal(same(ids, attention_mask=mask, **call), expected)
    assert torch.equal(same(inputs=ids, attention_mask=mask, **call), expected)
    assert torch.equal(same(ids, attention_mask=mask.bool(), **call), expected)
    assert torch.equal(same(ids.int(), attention_mask=mask, **call), expected)
    assert torch.equal(same(ids, eos_token_id=-1, **call), expected), "the mask follows from pads"
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(same(**inputs, position_ids=positions, **call), expected)
    assert not torch.equal(same(**inputs, position_ids=3 * positions, **call), expected)
    full = torch.randint(1, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(same(full, **call), same(full, attention_mask=torch.ones_like(full), **call))


@pytest.mark.parametrize("do_sample", SAMPLING)
def test_no_prompt_starts_from_the_first_token(do_sample: bool):
    assert same(bos_token_id=7, do_sample=do_sample, max_new_tokens=12)[0, 0] == 7


def test_a_call_without_arguments():
    ids = torch.randint(1, VOCAB_SIZE, (1, 9), generator=torch.Generator().manual_seed(0))
    assert same(ids).shape == (1, 29)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", SAMPLING)
def test_embeddings_as_the_prompt(do_sample: bool, rows: int):
    """Alone, only new tokens are returned; with ids these are returned too, and count for the length."""
    inputs = prompts(rows)
    embeds = models()[0].get_input_embeddings()(inputs["input_ids"])
    call = {"attention_mask": inputs["attention_mask"], "inputs_embeds": embeds, "do_sample": do_sample}
    alone = same(**call, max_new_tokens=12)
    together = same(**call, input_ids=inputs["input_ids"], max_new_tokens=12)
    assert torch.equal(together[:, 11:], alone)
    assert same(**call, max_length=20).shape == (rows, 9)
    assert torch.equal(same(**inputs, do_sample=do_sample, max_new_tokens=12), together)


def more(text: torch.Tensor, words: int, seed: int) -> torch.Tensor:
    ids = torch.randint(1, VOCAB_SIZE, (len(text), words), generator=torch.Generator().manual_seed(seed))
    return torch.cat([text, ids], -1)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_conversation_goes_on_in_its_cache(model_type: str, entry: Callable):
    """Three turns in one cache, the user's words between them, as without a cache; and each turn reads only them."""
    target = tiny(model_type)
    draft, inputs, cache = near(target, 0.05), prompts(3), DynamicCache()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for turn in range(3):
        call = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
        expected = target.generate(ids, **call)
        with Forwards(target) as forwards:
            output = entry(target, draft, ids, **call, **{CACHE: cache})
        assert torch.equal(output, expected)
        assert forwards.lengths[0] == (11 if turn == 0 else 6)
        assert len(forwards.lengths) < 12
        assert cache.get_seq_length() == output.shape[1] - 1
        ids = more(output, 5, turn)
        mask = torch.cat([mask, mask.new_ones(3, ids.shape[1] - mask.shape[1])], -1)


@cache
def translators(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """An encoder-decoder and its draft."""
    target = zoo.build("seq2seq", model_type)
    return target, near(target, 0.2)


STARTS: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "nothing": lambda ids: {},
    "a prompt": lambda ids: {"decoder_input_ids": torch.cat([0 * ids[:, :1], ids], -1)},
    "a prompt without the first token": lambda ids: {"decoder_input_ids": ids},
    "a first token for each row": lambda ids: {"decoder_start_token_id": ids[:, 0].tolist()},
    "a forced token": lambda ids: {"forced_bos_token_id": 5, "forced_eos_token_id": 6},
    "a minimum": lambda ids: {"min_length": 9, "eos_token_id": list(range(2, 20))},
    "what the text must not repeat": lambda ids: {
        "encoder_no_repeat_ngram_size": 1,
        "encoder_repetition_penalty": 1.5,
    },
}


@pytest.mark.parametrize("do_sample", SAMPLING)
@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_what_a_decoder_starts_with(model_type: str, name: str, do_sample: bool):
    pair = translators(model_type)
    ids = torch.randint(3, 30, (3, 4), generator=torch.Generator().manual_seed(2))
    call = zoo.inputs(pair[0], 3) | STARTS[name](ids) | {"do_sample": do_sample, "max_new_tokens": 12}
    same(**call, pair=pair)


@pytest.mark.parametrize("do_sample", SAMPLING)
@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_encodings_that_are_given(model_type: str, do_sample: bool):
    """With what was encoded, which a draft with an encoder of its own needs; as embeddings too."""
    pair = translators(model_type)
    inputs = zoo.inputs(pair[0], 3)
    call = inputs | {"do_sample": do_sample, "max_new_tokens": 12}
    expected = same(**call, pair=pair)
    given = {name: x for name, x in inputs.items() if not name.startswith("decoder")}
    encoded = pair[0].get_encoder()(**given)
    assert torch.equal(same(**call, encoder_outputs=encoded, pair=pair), expected)
    embeds = pair[0].get_encoder().get_input_embeddings()(inputs["input_ids"])
    call = {name: x for name, x in call.items() if name != "input_ids"}
    same(**call, inputs_embeds=embeds, pair=pair)
