"""`seeds=`: what a row becomes depends on its own text and seed, whoever its batch mates are."""

from functools import cache
from typing import Any

import pytest
import torch
import zoo
from all_pairs import each_value
from tiny import near, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding, generate


SEEDS = [7, 0, 2**40 + 3, 7]
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 24}


@cache
def models(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = zoo.build("seq2seq", "t5") if model_type == "t5" else tiny(model_type)
    return target, near(target, 0.25 if model_type == "t5" else 0.05)


def ours(model_type: str, verification: str, inputs: dict, seeds: list[int], **settings) -> list[list[int]]:
    """The tokens that each row emits, pads behind its end included."""
    target, draft = models(model_type)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification=verification)
    state = torch.get_rng_state()
    output = target.generate(**inputs, **SAMPLED | settings, custom_generate=strategy, seeds=seeds)
    assert torch.equal(torch.get_rng_state(), state)
    return output[:, 1 if target.config.is_encoder_decoder else inputs["input_ids"].shape[1] :].tolist()


def alone(inputs: dict, row: int) -> dict[str, torch.Tensor]:
    real = inputs["attention_mask"][row].bool()
    return {name: value[row : row + 1, real] for name, value in inputs.items()}


def until_end(tokens: list[int], ends: list[int]) -> list[int]:
    first = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: first + 1]


ENDS = {"no end": {"eos_token_id": None}, "ends": {"eos_token_id": [3, 8], "pad_token_id": 0}}


@pytest.mark.parametrize(("model_type", "ends"), each_value(["llama", "gpt2", "t5"], ENDS))
def test_coupled_rows_equal_stock_alone_under_their_seeds(model_type: str, ends: str):
    target, _ = models(model_type)
    inputs, eos = prompts(4), ENDS[ends]["eos_token_id"] or []
    expected = []
    for row, seed in enumerate(SEEDS):
        torch.manual_seed(seed)
        one = alone(inputs, row)
        output = target.generate(**one, **SAMPLED | ENDS[ends])[0].tolist()
        expected.append(output[1 if model_type == "t5" else one["input_ids"].shape[1] :])
    output = ours(model_type, "coupled", inputs, SEEDS, **ENDS[ends])
    assert [until_end(row, eos) for row in output] == expected
    assert len(set(map(len, expected))) > 2 or ends == "no end"


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(("model_type", "verification"), [("llama", "token"), ("gpt2", "block"), ("t5", "block")])
def test_rows_are_the_same_in_any_company(model_type: str, verification: str, ends: str):
    inputs, others, eos = prompts(4), prompts(4, seed=5), ENDS[ends]["eos_token_id"] or []

    def run(inputs: dict, rows: list[int], seeds: list[int]) -> list[list[int]]:
        chosen = {name: value[rows] for name, value in inputs.items()}
        texts = ours(model_type, verification, chosen, seeds, **ENDS[ends])
        return [until_end(tokens, eos) for tokens in texts]

    together = run(inputs, [0, 1, 2, 3], SEEDS)
    order = [2, 0, 3, 1]
    assert run(inputs, order, [SEEDS[row] for row in order]) == [together[row] for row in order]
    mixed = {name: torch.cat([value[2:3], others[name]]) for name, value in inputs.items()}
    assert run(mixed, [4, 0, 1], [1, SEEDS[2], 2])[1] == together[2]
    for row, seed in enumerate(SEEDS):
        single = ours(model_type, verification, alone(inputs, row), [seed], **ENDS[ends])
        assert until_end(single[0], eos) == together[row]
    assert run(inputs, [0, 1, 2, 3], [8, 0, 1, 9])[0] != together[0]


@pytest.mark.parametrize(
    "seeds", [range(3, 9), torch.arange(3, 9), torch.arange(3, 9).numpy(), tuple(range(3, 9)), [*torch.arange(3, 9)]]
)
def test_seeds_of_each_kind(seeds: Any):
    repeated = {name: value.repeat_interleave(2, 0) for name, value in prompts(3).items()}
    expected = ours("llama", "coupled", repeated, [3, 4, 5, 6, 7, 8])
    assert len({tuple(row) for row in expected}) == 6
    assert ours("llama", "coupled", prompts(3), seeds, num_return_sequences=2) == expected
    target, draft = models("llama")
    settings = SAMPLED | {"num_return_sequences": 2, "verification": "coupled", "num_draft_tokens": 3}
    output = generate(**prompts(3), **settings, model=target, draft_model=draft, seeds=seeds)
    assert output[:, 11:].tolist() == expected
