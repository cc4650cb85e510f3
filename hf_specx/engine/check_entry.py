"""Checks of how we were called: arguments that transformers would drop, misread or fail on."""

import inspect
import sys
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from hf_specx.common.errors import kind, require, similar


WITHHELD = {  # what transformers takes from a call and does not pass on to a strategy object, and the remedy
    "streamer": "use SpeculativeDecoding(streamer=...) or hf_specx.generate(streamer=...)",
    "assistant_model": "the strategy has its draft already, so leave it out or use hf_specx.generate",
    "synced_gpus": "use hf_specx.generate(synced_gpus=...)",
    "tokenizer": "use SpeculativeDecoding(tokenizer=...) or, for stop strings, hf_specx.generate(tokenizer=...)",
    "assistant_tokenizer": "use SpeculativeDecoding(draft_tokenizer=...)",
}


GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
NOT_THE_CLASS = (
    "custom_generate is a class; make a strategy of it first, as in custom_generate=SpeculativeDecoding(draft_model)."
)


def check_entry(model: Any, custom_generate: Any) -> None:
    """Whether a target can be called at all, and by the method that was given with it, if one was."""
    given = f"model is {kind(model)}"
    require(hasattr(model, "can_generate"), f"{given}; give the target itself, as from_pretrained loads it.")
    require(
        model.can_generate(),
        f"{given}, which scores no next token; load it with AutoModelForCausalLM or another class that can generate.",
    )
    require(not isinstance(custom_generate, type), NOT_THE_CLASS)
    require(
        not isinstance(custom_generate, Path),
        f"custom_generate={custom_generate!r} is a Path, which transformers ignores; pass it as a str.",
    )


def check_arguments(inputs: Any, model: Any, kwargs: dict[str, Any], options: Collection[str]) -> None:
    """Check the arguments of `generate` for those that transformers would drop, misread or fail on.

    Args:
        inputs, model: of the call.
        kwargs: all other arguments.
        options: names of arguments that we know and transformers does not.
    """
    for name, value in {"inputs": inputs, "input_ids": kwargs.get("input_ids")}.items():
        require(
            value is None or isinstance(value, torch.Tensor),
            f"{name} is {kind(value)}; pass a tensor of token ids, as in "
            "generate(**tokenizer(texts, return_tensors='pt', padding=True), ...).",
        )
    check_values({"inputs": inputs} | kwargs)
    config = kwargs.get("generation_config")
    require(
        config is None or isinstance(config, GenerationConfig),
        f"generation_config is {kind(config)}; pass GenerationConfig(...), or its fields as arguments.",
    )
    for name in ("logits_processor", "stopping_criteria"):
        functions = kwargs.get(name)
        known = functions is None or isinstance(functions, list | tuple)
        told = f"{name} is {kind(functions)}; pass a list of such objects, [{type(functions).__name__}(...)]."
        require(known, told)
    require(
        kwargs.get("cache_implementation") != "paged",
        "cache_implementation='paged' turns generate into continuous batching, which takes no strategy; leave it out, "
        "or call generate_batch without a draft.",
    )
    for name in sorted(kwargs.keys() - set(options) - known_arguments(model)):
        question = similar(name, options)
        require(not question, f"unknown argument {name!r}; {question.strip()}")


def known_arguments(model: Any) -> set[str]:
    """Names of what `generate` takes for a model: its own arguments, fields of a config, inputs of the model."""
    callables = [GenerationMixin.generate, type(model).generate, model.forward, model.prepare_inputs_for_generation]
    if model.config.is_encoder_decoder:
        callables += [part.forward for part in (model.get_encoder(), model.get_decoder()) if part is not None]
    taken = {name for function in callables for name in inspect.signature(function).parameters}
    return taken | vars(GenerationConfig()).keys()


def check_values(given: dict[str, Any]) -> None:
    """Check that the tensors among the arguments of a call have values."""
    for name, value in given.items():
        told = f"{name} is on the meta device, which has shapes and no values; make it on the device of the model."
        require(not isinstance(value, torch.Tensor) or value.device.type != "meta", told)


def check_pair_call(kwargs: dict[str, Any]) -> None:
    """Check that a call of a pair does not ask for something that the pair brings itself, and can be read."""
    for name in ("custom_generate", "draft_model", "assistant_model", "model"):
        require(
            kwargs.get(name) is None,
            f"{name}= has no place in the call of a pair, which has its own; use hf_specx.generate for that.",
        )
    check_values(kwargs)


def check_draft_found(published: str | None, reason: str | None) -> None:
    """Check that there is a draft for callers who name none.

    Args:
        published: the pair that our code was published with.
        reason: why what the target was loaded from is no pair, None if it is one.
    """
    own = "" if published is None else f" The pair {published!r}, which this code was published with, is not there."
    require(
        reason is None,
        "there is no draft: pass draft_model= or assistant_model=, or load the target from a pair, which brings its "
        f"draft (this one is of no pair: {reason}).{own}",
    )


def check_one_name(ours: str, theirs: str, given: Collection[str]) -> None:
    """Check that an argument with two names, ours and that of transformers, was given by one at most."""
    require(not {ours, theirs} <= set(given), f"{ours}= and {theirs}= mean the same; pass one of them.")


def check_stop_strings(strings: Any, tokenizer: Any) -> None:
    """Check that stop strings can be searched for."""
    known = all(isinstance(each, str) for each in (strings if isinstance(strings, list | tuple) else [strings]))
    require(known, f"stop_strings={strings!r} is no str and no list of str; pass one of these.")
    require(tokenizer is not None, f"stop_strings={strings!r} needs the tokenizer; pass tokenizer=.")


def check_healing(tokenizer: Any) -> None:
    """Check that the last token of the prompt can be healed."""
    require(tokenizer is not None, "token_healing=True needs the tokenizer; pass tokenizer=.")


def check_withheld(frame: FrameType | None) -> None:
    """Refuse what transformers drops on its way to a callable, read from the frame of `GenerationMixin.generate`.

    A streamer was given the prompt already by then; it is ended, so that nobody waits for it.

    Args:
        frame: of whoever was called; that of `generate` is the next one below, whatever wraps the call.
    """
    while frame is not None and frame.f_code is not GENERATE:
        frame = frame.f_back
    if frame is None:
        return
    given = {name: frame.f_locals.get(name) for name in WITHHELD}
    outer = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None  # generate pops it from its own
    for name in ("tokenizer", "assistant_tokenizer"):
        given[name] = outer.get(name) if isinstance(outer, dict) else None
    try:
        for name, remedy in WITHHELD.items():
            passed_on = given[name] is None or given[name] is False
            require(passed_on, f"transformers does not pass {name}= on to a strategy object; {remedy}.")
    except ValueError:
        if given["streamer"] is not None:
            given["streamer"].end()
        raise


def check_unprepared(frame: FrameType | None) -> None:
    """Refuse what transformers fails on in puzzling words, when it asks for the signature of a strategy object.

    Tensors without values it cannot prepare. Of stop strings it has dropped the tokenizer by then, and would say next
    that the tokenizer is missing, even where it was given.

    Args:
        frame: of whoever asks; only `GenerationMixin._extract_generation_mode_kwargs` is looked at.
    """
    while frame is not None and frame.f_code.co_name != "_extract_generation_mode_kwargs":
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return
    model, given = frame.f_locals.get("self"), frame.f_back.f_locals.get("generation_config")
    kwargs = frame.f_locals.get("kwargs", {})
    check_values({"inputs": frame.f_back.f_locals.get("inputs")} | kwargs)
    configs = given, getattr(model, "generation_config", None)
    asked = [kwargs.get("stop_strings"), *(getattr(x, "stop_strings", None) for x in configs)]
    strings = next((each for each in asked if each is not None), None)
    require(
        strings is None,
        f"stop_strings={strings!r} do not work with a strategy object, since transformers drops the tokenizer; use "
        "hf_specx.generate(..., model=model, draft_model=draft, stop_strings=..., tokenizer=tokenizer), or pass "
        "stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)] in place of them.",
    )


class AskedSignature:
    """The signature of an object that can be called.

    transformers asks for it before it prepares anything, which is the first that a strategy hears of a call.
    """

    def __get__(self, strategy: Any, kind: type | None = None) -> inspect.Signature:
        if strategy is None:
            raise AttributeError("__signature__")  # of the class it is that of its constructor
        check_unprepared(sys._getframe(1))
        return inspect.signature(strategy.__call__)
