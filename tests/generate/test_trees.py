"""Candidates that branch, through `generate`: the text of plain `generate` whatever the tree."""

from typing import Any

import pytest
import torch
from all_pairs import all_pairs
from plain import assert_plain
from random_trees import RandomTrees, emitted_texts
from rounds import Heard
from tiny import VOCAB_SIZE, WINDOW, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding


MODELS = {
    "llama": {},
    "gpt2": {},
    "mistral": {},
    "smollm3": {},
    "qwen2": {},
    "gpt_neox": {},
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"],
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
    },
}
SAMPLED = {"do_sample": True, "top_k": 0}
GREEDY = {"do_sample": False}


def trees_of(target: PreTrainedModel, inputs: dict[str, torch.Tensor], seed: int = 0, **settings: Any) -> RandomTrees:
    """Random trees, in which the text of the call under seed 1 is planted."""
    torch.manual_seed(1)
    text = target.generate(**inputs, **settings)
    return RandomTrees(emitted_texts(inputs, text), target.config.get_text_config().vocab_size, seed)


def assert_branches(strategy: SpeculativeDecoding, branches: Heard) -> None:
    """Some rounds left the chain of first choices, and some went deep."""
    taken = [branch for of_round in branches for branch in of_round]
    assert any(any(branch) for branch in taken)
    assert max(map(len, taken)) >= 3
    assert strategy.report.nodes > strategy.report.drafted


def listened(strategy: SpeculativeDecoding) -> Heard:
    """The branches of each round of a strategy's calls."""
    branches = Heard(lambda done: done.branches)
    strategy.listeners = (*strategy.listeners, branches)
    return branches


@pytest.mark.parametrize(("rows", "settings", "model_type"), all_pairs([1, 3, 8], [GREEDY, SAMPLED], MODELS))
def test_random_trees_give_the_text_of_plain(rows: int, settings: dict, model_type: str):
    target, inputs = tiny(model_type, **MODELS[model_type]).double(), prompts(rows)
    settings = settings | {"max_new_tokens": 40, "pad_token_id": 0}
    strategy = SpeculativeDecoding(trees_of(target, inputs, **settings), tree=9)
    branches = listened(strategy)
    done = assert_plain(target, strategy, inputs, **settings)
    assert done.forwards < done.plain
    assert_branches(strategy, branches)
