"""transformers' own behaviours as its users know them, through both entries: the same tokens and warnings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import ENTRIES, models, said, same, stock
from all_pairs import each_value
from tiny import VOCAB_SIZE, Forwards, near, prompts, tiny
from transformers import DynamicCache
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


@pytest.mark.parametrize(("name", "do_sample"), each_value(CALLS, SAMPLING))
def test_lengths_and_ends(name: str, do_sample: bool):
    """With the warnings of stock about what is missing or cannot be."""
    same(**prompts(4) | {"do_sample": do_sample} | CALLS[name](common(do_sample)))


@pytest.mark.parametrize("do_sample", SAMPLING)
def test_an_end_as_the_first_token(do_sample: bool):
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


HOSTILE = {"num_return_sequences": 3, "use_cache": False, "stop_strings": ["a"], "cache_implementation": "static"}
HOSTILE |= {"do_sample": True, "repetition_penalty": 9.0, "min_length": 40, "bad_words_ids": [[3]]}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_models_own_config_counts(entry: Callable, tmp_path: Path):
    """Its file says to sample, how, and where to end; the call says the rest. A draft's file says nothing."""
    target, draft = tiny(), near(tiny(), 0.05)
    for name, model, config in (
        ("target", target, {"do_sample": True, "repetition_penalty": 1.5, "top_k": 9, "eos_token_id": common(True)}),
        ("draft", draft, HOSTILE),
    ):
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "generation_config.json").write_text(json.dumps(config | {"pad_token_id": 0}))
    pair = tuple(type(target).from_pretrained(tmp_path / name) for name in ("target", "draft"))
    before = [model.generation_config.to_dict() for model in pair]
    expected, _ = said(stock, **prompts(4), max_new_tokens=20, pair=pair)
    assert torch.equal(said(entry, **prompts(4), max_new_tokens=20, pair=pair)[0], expected)
    plain, _ = said(stock, **prompts(4), max_new_tokens=20, do_sample=True)
    assert not torch.equal(expected, plain[:, : expected.shape[1]])
    assert [model.generation_config.to_dict() for model in pair] == before


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


def test_the_length_of_embeddings_counts():
    """Though new tokens alone are returned."""
    inputs = prompts(3)
    embeds = models()[0].get_input_embeddings()(inputs["input_ids"])
    call = {"attention_mask": inputs["attention_mask"], "inputs_embeds": embeds, "do_sample": False}
    assert same(**call, max_length=20).shape == (3, 9)


def more(text: torch.Tensor, words: int, seed: int) -> torch.Tensor:
    ids = torch.randint(1, VOCAB_SIZE, (len(text), words), generator=torch.Generator().manual_seed(seed))
    return torch.cat([text, ids], -1)


@pytest.mark.parametrize(("model_type", "entry"), each_value(["llama", "gpt2"], ENTRIES))
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
