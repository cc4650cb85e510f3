"""The ways to call hf_specx, around the same two models."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny import Forwards, near, prompts, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specx import DraftTargetPair, SpeculativeDecoding, generate
from hf_specx.hub.flatten import PACKAGE
from hf_specx.hub.publish import write_code


FORMS = ("function", "folder", "override", "pair")
ALL_FORMS = (*FORMS, "strategy", "attached")  # the last two take no options of ours in the call
SAMPLED = {"do_sample": True, "top_k": 20, "max_new_tokens": 14}
GREEDY = {"do_sample": False, "max_new_tokens": 14}
OURS = {"verification": "coupled", "num_draft_tokens": 3}


def make_world(folder: Path) -> SimpleNamespace:
    """A target, a draft and their tokenizer, with the ways to call them in `call`: {form: function}."""
    tokenizer = AutoTokenizer.from_pretrained(PACKAGE / "hub" / "embedded")
    tokenizer.bos_token = tokenizer.eos_token
    target = tiny(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    draft = near(target, 0.05)
    target.save_pretrained(folder)
    write_code(folder, str(folder))
    own = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    pair = DraftTargetPair(target, draft, tokenizer)

    def by_folder(*args: Any, **kwargs: Any) -> Any:
        loaded = {"custom_generate": str(folder), "trust_remote_code": True}
        return target.generate(*args, assistant_model=draft, **loaded, **kwargs)

    def strategy_of(kwargs: dict[str, Any]) -> SpeculativeDecoding:
        return SpeculativeDecoding(draft, **{name: kwargs.pop(name) for name in OURS.keys() & kwargs.keys()})

    def by_strategy(*args: Any, **kwargs: Any) -> Any:
        return target.generate(*args, custom_generate=strategy_of(kwargs), **kwargs)

    def attached(*args: Any, **kwargs: Any) -> Any:
        with strategy_of(kwargs).attached(target):
            return target.generate(*args, **kwargs)

    call = {
        "function": lambda *args, **kwargs: generate(*args, model=target, draft_model=draft, **kwargs),
        "folder": by_folder,
        "override": lambda *args, **kwargs: own.generate(*args, assistant_model=draft, **kwargs),
        "pair": pair.generate,
        "strategy": by_strategy,
        "attached": attached,
    }
    return SimpleNamespace(
        target=target, draft=draft, tokenizer=tokenizer, folder=folder, own=own, pair=pair, call=call
    )


def equal(
    world: SimpleNamespace,
    form: str,
    *args: Any,
    rows: int = 3,
    stock: dict | None = None,
    drafts: bool = True,
    **kwargs: Any,
) -> Any:
    """Call both; `stock` has what only stock is given, and `drafts` says whether we speculate. Returns our output."""
    inputs = {} if args or {"inputs", "input_ids"} & kwargs.keys() else prompts(3)
    torch.manual_seed(5)
    expected = world.target.generate(*args, **inputs, **kwargs | (stock or {}))
    torch.manual_seed(5)
    with Forwards(world.draft) as drafted:
        output = world.call[form](*args, **inputs, **kwargs, **OURS)
    assert bool(drafted.ids) == drafts
    tokens, expected_tokens = (getattr(o, "sequences", o) for o in (output, expected))
    assert torch.equal(tokens, expected_tokens)
    return output
