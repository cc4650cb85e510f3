"""Prompts of few tokens, so that texts repeat themselves, and calls that read them."""

import torch
from tiny import prompts
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding


NEW_TOKENS = 40
GREEDY = {"do_sample": False, "repetition_penalty": 1.05}


def few_tokens(rows: int, width: int = 17) -> dict[str, torch.Tensor]:
    """Prompts whose tokens repeat."""
    inputs = prompts(rows, width)
    return inputs | {"input_ids": inputs["input_ids"] % 12}


def run(model: PreTrainedModel, inputs: dict, strategy: SpeculativeDecoding | None = None, **settings) -> torch.Tensor:
    torch.manual_seed(4)
    given = {} if strategy is None else {"custom_generate": strategy}
    return model.generate(**inputs, **{"max_new_tokens": NEW_TOKENS, "pad_token_id": 0} | settings, **given)
