"""Targets of few tokens and prompts of these, so that texts repeat themselves, and calls with them."""

from functools import cache

import torch
from tiny import prompts, tiny, without_layers
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding


LAYOUTS = ("ragged", "padded", "packed", "lockstep")
NEW_TOKENS = 40
GREEDY = {"do_sample": False, "repetition_penalty": 1.05}


@cache
def repetitive(model_type: str = "llama") -> PreTrainedModel:
    """Of few tokens, so that its text repeats itself."""
    return tiny(model_type, vocab_size=12)


@cache
def cyclic() -> PreTrainedModel:
    """Goes by the last token alone, so that its greedy text goes round."""
    return without_layers(tiny(vocab_size=40))


def few_tokens(rows: int, width: int = 17) -> dict[str, torch.Tensor]:
    """Prompts whose tokens repeat."""
    inputs = prompts(rows, width)
    return inputs | {"input_ids": inputs["input_ids"] % 12}


def run(model: PreTrainedModel, inputs: dict, strategy: SpeculativeDecoding | None = None, **settings) -> torch.Tensor:
    torch.manual_seed(4)
    settings = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0} | settings
    return model.generate(**inputs, **settings, custom_generate=strategy)
