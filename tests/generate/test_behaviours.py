"""transformers' own behaviours as its users know them, through both entries: the same tokens, warnings and errors.

What a call can start from is in test_behaviours_inputs.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import ENTRIES, models, said, same, stock
from all_pairs import once
from tiny import VOCAB_SIZE, near, prompts, tiny
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from hf_specx.models.slots import CACHE


SAMPLING = [False, True]


def common(do_sample: bool, count: int = 3) -> list[int]:
    """Tokens that the target emits often."""
    output = models()[0].generate(**prompts(4), do_sample=do_sample, max_new_tokens=40)
    return torch.bincount(output[:, 11:].flatten(), minlength=VOCAB_SIZE).argsort(descending=True)[:count].tolist()


CALLS: dict[str, Callable[[list[int]], dict[str, Any]]] = {  # of tokens that the target emits often
    "nothing said": lambda ids: {},
    "max_length": lambda ids: {"max_length": 17},
    "max_new_tokens": lambda ids: {"max_new_tokens": 9},
    "both": lambda ids: {"max_length": 13, "max_new_tokens": 9},
    "one token": lambda ids: {"max_new_tokens": 1},
    "both minima": lambda ids: {"min_length": 30, "min_new_tokens": 4, "max_new_tokens": 20, "eos_token_id": ids},
    "a minimum above the maximum": lambda ids: {"min_new_tokens": 30, "max_new_tokens": 12, "eos_token_id": ids},
    "a minimum without an end": lambda ids: {"min_new_tokens": 5, "max_new_tokens": 9},
    "scores without a dict": lambda ids: {"max_new_tokens": 9, "output_scores": True, "output_attentions": False},
    "beams of one": lambda ids: {"max_new_tokens": 9, "num_beams": 1, "length_penalty": 2.0, "early_stopping": True},
    "an end": lambda ids: {"eos_token_id": ids},
    "an end in a tensor": lambda ids: {"eos_token_id": torch.tensor(ids)},
    "the pad as well": lambda ids: {"eos_token_id": ids[:2], "pad_token_id": ids[1]},
    "no pad": lambda ids: {"eos_token_id": ids[0], "pad_token_id": None},
    "no end": lambda ids: {"eos_token_id": -1},
    "forced at the end": lambda ids: {"forced_eos_token_id": ids[2]},
    "forced at first": lambda ids: {"eos_token_id": ids[0], "forced_bos_token_id": ids[1]},
    "forced as several": lambda ids: {"forced_eos_token_id": ids},
    "several sequences": lambda ids: {"num_return_sequences": 3, "do_sample": True, "max_new_tokens": 12},
}


@pytest.mark.parametrize("do_sample", SAMPLING)
@pytest.mark.parametrize("name", CALLS)
def test_lengths_and_ends(name: str, do_sample: bool):
    """With the warnings of stock about what is missing or cannot be."""
    same(**prompts(4) | {"do_sample": do_sample} | CALLS[name](common(do_sample)))


@pytest.mark.parametrize("do_sample", SAMPLING)
def test_an_end_as_the_first_token(do_sample: bool):
    """Of some rows, and of all of them."""
    first = said(stock, **prompts(4), do_sample=do_sample, max_new_tokens=1)[0][:, 11].tolist()
    some = same(**prompts(4), do_sample=do_sample, max_new_tokens=20, eos_token_id=first[0])
    assert some[0, 12:].sum() == 0
    assert same(**prompts(4), do_sample=do_sample, max_new_tokens=20, eos_token_id=first).shape == (4, 12)


class Doubled(LogitsProcessor):
    """Not the same before and behind a cut of the unlikely tokens."""

    stateless = True

    def __call__(self, input_ids, scores):
        return torch.where(scores > scores.mean(-1, keepdim=True), 2 * scores, scores - 3)


OWN = [[Doubled()], [TemperatureLogitsWarper(0.4), Doubled()], [Doubled(), RepetitionPenaltyLogitsProcessor(3.0)]]


@pytest.mark.parametrize("processors", OWN)
def test_processors_of_the_user_come_before_warpers_or_in_the_place_of_their_like(processors: list[LogitsProcessor]):
    call = prompts(3) | {"do_sample": True, "temperature": 1.7, "top_k": 6, "repetition_penalty": 1.2}
    plain = same(**call, max_new_tokens=16, logits_processor=LogitsProcessorList())
    output = same(**call, max_new_tokens=16, logits_processor=LogitsProcessorList(processors))
    assert not torch.equal(output, plain)
    assert torch.equal(same(**call, max_new_tokens=16, logits_processor=processors), output)


@pytest.mark.parametrize("criteria", [StoppingCriteriaList(), [MaxLengthCriteria(5)], [MaxLengthCriteria(17)]])
def test_criteria_of_the_user_take_the_place_of_their_like(criteria: list):
    """Stock looks at a length after a token, so even one that the prompt exceeds lets a token through."""
    output = same(**prompts(3), do_sample=True, max_new_tokens=16, stopping_criteria=criteria)
    assert output.shape[1] == (max(12, criteria[0].max_length) if criteria else 27)


def test_no_time_is_left():
    for entry in (stock, *ENTRIES):
        assert said(entry, **prompts(3), do_sample=False, max_new_tokens=30, max_time=0.0)[0].shape[1] < 30


@pytest.mark.parametrize("do_sample", SAMPLING)
def test_a_config_of_the_user_is_left_alone(do_sample: bool):
    """It serves several calls, and arguments of a call go before it."""
    config = GenerationConfig(do_sample=do_sample, max_new_tokens=12, repetition_penalty=1.2)
    before = config.to_dict()
    first = same(**prompts(3), generation_config=config)
    assert torch.equal(same(**prompts(3), generation_config=config), first)
    longer = same(**prompts(3), generation_config=config, max_new_tokens=20)
    assert longer.shape[1] == 11 + 20
    assert torch.equal(longer[:, :23], first)
    assert config.to_dict() == before


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_models_own_config_counts(entry: Callable, tmp_path: Path):
    """Its file says to sample, how, and where to end; the call says the rest. A draft's file says nothing."""
    target, draft = tiny(), near(tiny(), 0.05)
    for name, model, own in (
        ("target", target, {"do_sample": True, "repetition_penalty": 1.5, "top_k": 9, "eos_token_id": common(True)}),
        ("draft", draft, {"do_sample": True, "repetition_penalty": 9.0, "min_length": 40, "bad_words_ids": [[3]]}),
    ):
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "generation_config.json").write_text(json.dumps(own | {"pad_token_id": 0}))
    pair = tuple(type(target).from_pretrained(tmp_path / name) for name in ("target", "draft"))
    before = [model.generation_config.to_dict() for model in pair]
    expected, _ = said(stock, **prompts(4), max_new_tokens=20, pair=pair)
    assert torch.equal(said(entry, **prompts(4), max_new_tokens=20, pair=pair)[0], expected)
    plain, _ = said(stock, **prompts(4), max_new_tokens=20, do_sample=True)
    assert not torch.equal(expected, plain[:, : expected.shape[1]])
    assert [model.generation_config.to_dict() for model in pair] == before


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_returned(entry: Callable):
    call = prompts(2) | {"do_sample": False, "max_new_tokens": 9}
    plain, _ = said(entry, **call)
    assert type(plain) is torch.Tensor
    assert plain.dtype == torch.int64
    output, _ = said(entry, **call, return_dict_in_generate=True)
    assert type(output) is GenerateDecoderOnlyOutput
    assert list(output) == ["sequences", CACHE]
    assert torch.equal(output.sequences, plain)
    assert output.past_key_values.get_seq_length() == 11 + 9 - 1


ERRORS: dict[str, dict[str, Any]] = {
    "no temperature": {"do_sample": True, "temperature": 0.0},
    "no new tokens": {"max_new_tokens": 0},
    "a prompt as long as the text": {"max_length": 11, "max_new_tokens": None},
    "a misspelt argument": {"max_new_token": 5},
    "several greedy sequences": {"do_sample": False, "num_return_sequences": 2},
    "two prompts": {"inputs": prompts(2)["input_ids"]},
    "stop strings without a tokenizer": {"stop_strings": ["a"]},
    "no bad words": {"bad_words_ids": []},
    "no top_k": {"do_sample": True, "top_k": -1},
    "a penalty of zero": {"repetition_penalty": 0.0},
    "a mask of three dimensions": {"attention_mask": torch.ones(2, 11, 11)},
    "a cache that is none": {CACHE: ((torch.zeros(1),),)},
    "no allowed tokens": {"prefix_allowed_tokens_fn": lambda row, ids: []},
    "no allowed tokens to draw from": {"prefix_allowed_tokens_fn": lambda row, ids: [], "do_sample": True},
    "an unknown cache": {"cache_implementation": "mine"},
}


@pytest.mark.parametrize(("name", "entry"), once(ERRORS, ENTRIES))
def test_errors_are_of_stocks_type(name: str, entry: Callable):
    call = prompts(2) | {"max_new_tokens": 5} | ERRORS[name]
    with pytest.raises(Exception) as expected:  # noqa: PT011
        said(stock, **call)
    with pytest.raises(expected.type):
        said(entry, **call)
