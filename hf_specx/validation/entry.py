"""Checks of how we were called: arguments that transformers would drop, misread or stumble over."""

import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from hf_specx.common.errors import refusal

from .models import target_of_no_kind, target_without_head
from .options import similar


def withheld(name: str, remedy: str) -> Callable[[Any], None]:
    """The check of an argument that does not reach a strategy object."""

    def check(value: Any) -> str | None:
        if value is None or value is False:
            return None
        return f"transformers does not pass {name}= on to a strategy object; {remedy}."

    check.__name__ = f"withheld_{name}"
    return refusal(check)


WITHHELD = {
    name: withheld(name, remedy)
    for name, remedy in {
        "streamer": "use SpeculativeDecoding(streamer=...) or hf_specx.generate(streamer=...)",
        "assistant_model": "the strategy has its draft already, so leave it out or use hf_specx.generate",
        "synced_gpus": "use hf_specx.generate(synced_gpus=...)",
        "tokenizer": "use SpeculativeDecoding(tokenizer=...) or, for stop strings, hf_specx.generate(tokenizer=...)",
        "assistant_tokenizer": "use SpeculativeDecoding(draft_tokenizer=...)",
    }.items()
}


@refusal
def no_draft(published: str | None, reason: str | None) -> str | None:
    if reason is None:
        return None
    source = "names no pair" if published is None else f"names {published!r}, which is not there"
    return (
        "no draft: pass draft_model= or assistant_model=; else it is that of the pair in pair_source.py, which "
        f"{source} (specx publish writes it), or of the pair that the target was loaded from, and {reason}."
    )


@refusal
def argument_of_another_entry(given: Collection[str]) -> str | None:
    for name in ("custom_generate", "draft_model", "assistant_model", "model"):
        if name in given:
            return f"{name}= has no place in the call of a pair, which has its own; use hf_specx.generate for that."
    return None


@refusal
def given_twice(ours: str, stocks: str, given: Collection[str]) -> str | None:
    return f"{ours}= and {stocks}= mean the same; pass one of them." if {ours, stocks} <= set(given) else None


@refusal
def method_by_path(custom_generate: Any) -> str | None:
    if not isinstance(custom_generate, Path):
        return None
    return f"custom_generate={custom_generate!r} is a Path, which transformers ignores; pass it as a str."


@refusal
def inputs_that_are_no_tensor(name: str, value: Any) -> str | None:
    if value is None or isinstance(value, torch.Tensor):
        return None
    return (
        f"{name} is a {type(value).__name__}; pass a tensor of token ids, as in "
        "generate(**tokenizer(texts, return_tensors='pt', padding=True), ...)."
    )


@refusal
def config_of_no_kind(config: Any) -> str | None:
    if config is None or isinstance(config, GenerationConfig):
        return None
    return f"generation_config is a {type(config).__name__}; pass GenerationConfig(...), or its fields as arguments."


@refusal
def functions_without_a_list(name: str, functions: Any) -> str | None:
    if functions is None or isinstance(functions, list | tuple):
        return None
    return f"{name} is a {type(functions).__name__}; pass a list of such objects, [{type(functions).__name__}(...)]."


@refusal
def paged_cache(cache_implementation: Any) -> str | None:
    if cache_implementation != "paged":
        return None
    return (
        "cache_implementation='paged' turns generate into continuous batching, which takes no strategy; leave it out, "
        "or call generate_batch without a draft."
    )


@refusal
def misspelt_option(names: Collection[str], known: Collection[str], model: Any) -> str | None:
    callables = GenerationMixin.generate, type(model).generate, model.forward
    taken = vars(GenerationConfig()).keys() | {x for f in callables for x in inspect.signature(f).parameters}
    for name in sorted(names):
        if name not in taken and (question := similar(name, known)):
            return f"unknown argument {name!r}; {question}"[:-1]
    return None


@refusal
def stop_strings_of_no_kind(strings: Any) -> str | None:
    if isinstance(strings, str) or (isinstance(strings, list | tuple) and all(isinstance(s, str) for s in strings)):
        return None
    return f"stop_strings={strings!r} is no str and no list of str; pass one of these."


@refusal
def stop_strings_without_tokenizer(strings: Any, tokenizer: Any) -> str | None:
    if tokenizer is not None:
        return None
    return f"stop_strings={strings!r} needs the tokenizer; pass tokenizer=."


@refusal
def healing_without_tokenizer(tokenizer: Any) -> str | None:
    if tokenizer is not None:
        return None
    return "token_healing=True needs the tokenizer; pass tokenizer=."


def check_entry(model: Any, custom_generate: Any) -> None:
    """Whether a target can be called at all, and by the method that was given with it, if one was."""
    target_of_no_kind(model)
    target_without_head(model)
    method_by_path(custom_generate)


def check_arguments(inputs: Any, model: Any, kwargs: dict[str, Any], options: Collection[str]) -> None:
    """Arguments of `generate` that transformers would drop, misread or stumble over.

    Args:
        inputs, model: of the call.
        kwargs: all other arguments.
        options: names that we know and transformers does not.
    """
    for name, value in {"inputs": inputs, "input_ids": kwargs.get("input_ids")}.items():
        inputs_that_are_no_tensor(name, value)
    config_of_no_kind(kwargs.get("generation_config"))
    for name in ("logits_processor", "stopping_criteria"):
        functions_without_a_list(name, kwargs.get(name))
    paged_cache(kwargs.get("cache_implementation"))
    misspelt_option(kwargs.keys() - set(options), options, model)


def check_pair_call(kwargs: dict[str, Any]) -> None:
    """Whether a call of a pair asks for something that a pair brings itself."""
    argument_of_another_entry([name for name, value in kwargs.items() if value is not None])


def check_draft_found(published: str | None, reason: str | None) -> None:
    """Whether there is a draft for callers who name none.

    Args:
        published: the pair that our code was published with.
        reason: why what the target was loaded from is no pair, None if it is one.
    """
    no_draft(published, reason)


def check_one_name(ours: str, stocks: str, given: Collection[str]) -> None:
    """Whether an argument with two names was given by one of them at most."""
    given_twice(ours, stocks, given)


def check_stop_strings(strings: Any, tokenizer: Any) -> None:
    """Whether stop strings, if there are any, can be searched for."""
    if strings is not None:
        stop_strings_of_no_kind(strings)
        stop_strings_without_tokenizer(strings, tokenizer)


def check_healing(tokenizer: Any) -> None:
    """Whether the last token of the prompt can be healed."""
    healing_without_tokenizer(tokenizer)


def check_withheld(frame: FrameType | None) -> None:
    """Refuse what transformers drops on its way to a callable, read from the frame of `GenerationMixin.generate`.

    A streamer was given the prompt already by then; it is ended, so that nobody waits for it.
    """
    if frame is None or frame.f_code.co_name != "generate" or "custom_generate" not in frame.f_locals:
        return
    given = {name: frame.f_locals.get(name) for name in WITHHELD}
    outer = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None  # generate pops it from its own
    for name in ("tokenizer", "assistant_tokenizer"):
        given[name] = outer.get(name) if isinstance(outer, dict) else None
    try:
        for name, refuse in WITHHELD.items():
            refuse(given[name])
    except ValueError:
        if given["streamer"] is not None:
            given["streamer"].end()
        raise
