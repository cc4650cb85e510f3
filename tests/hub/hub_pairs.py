"""Pairs on a Hub on loopback: how clients push one, and the ways to have it speak.

What is called in clients imports the package itself, since there are clients that have none.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from hub_answers import OWNER
from tiny import VOCAB_SIZE, Forwards, near, prompts, tiny
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast


NAME, TOKENS = "org/pair", 20
SETTINGS = {"do_sample": True, "max_new_tokens": TOKENS, "top_k": 0}
DRAFT_WEIGHTS = "draft/model.safetensors"
MODELS: dict[str, Any] = {}  # of a client, from call to call


def a_pair(draft: int = 1):
    """One of several pairs, which differ by their draft."""
    from hf_specx import DraftTargetPair
    from hf_specx.pair_files.pair_config import ModelSource, PairConfig

    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w1")), pad_token="w0")
    config = PairConfig(ModelSource(), ModelSource(subfolder="draft"), num_draft_tokens=3)
    return DraftTargetPair(tiny(), near(tiny(), 0.1, seed=draft), tokenizer, config)


def push(name: str, draft: int = 1, private: bool | None = None, **options: Any) -> str:
    return a_pair(draft).push_to_hub(name, token=OWNER, private=private, **options)


def said(generate: Callable[..., torch.Tensor], target: PreTrainedModel, **options: Any) -> list[list[int]]:
    """The tokens after the prompts, of a call that must have speculated."""
    torch.manual_seed(0)
    with Forwards(target) as forwards:
        output = generate(**prompts(2), **SETTINGS, **options)
    assert len(forwards.ids) < TOKENS
    return output[:, prompts(2)["input_ids"].shape[1] :].tolist()


@cache
def expected(draft: int = 1) -> list[list[int]]:
    """What the package says, here, of the pair as it was before it was pushed."""
    pair = a_pair(draft)
    return said(pair.generate, pair.target)


def by_package(name: str, **options: Any) -> list[list[int]]:
    from hf_specx import DraftTargetPair

    if name not in MODELS:
        MODELS[name] = DraftTargetPair.from_pretrained(name, **options)
    return said(MODELS[name].generate, MODELS[name].target)


def by_string(name: str, **options: Any) -> list[list[int]]:
    options = {"trust_remote_code": True, "custom_generate": name} | options
    if name not in MODELS:
        MODELS[name] = AutoModelForCausalLM.from_pretrained(name, token=options.get("token"))
    return said(MODELS[name].generate, MODELS[name], **options)


def by_override(name: str, **options: Any) -> list[list[int]]:
    """The first call loads the draft: a token is for that one as well."""
    first = {} if name in MODELS else {key: options[key] for key in options if key == "token"}
    if name not in MODELS:
        MODELS[name] = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, **options)
    return said(MODELS[name].generate, MODELS[name], **first)


def by_function(name: str, **options: Any) -> list[list[int]]:
    """The draft is found by where the target was loaded from."""
    from hf_specx import generate

    if name not in MODELS:
        MODELS[name] = AutoModelForCausalLM.from_pretrained(name, **options)
    return said(generate, MODELS[name], model=MODELS[name], **options)


FORMS = [by_package, by_string, by_override]
OURS = [by_package, by_function]
