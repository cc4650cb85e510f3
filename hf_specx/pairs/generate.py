"""`SpeculativeDecoding` as a function, with the arguments that transformers does not pass on to a strategy."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import ModelOutput

from hf_specx.common.devices import execution_device, hardware
from hf_specx.common.errors import check_names, kind, require, similar
from hf_specx.common.wrappers import shallow, unwrapped
from hf_specx.drafting.auto import Costs
from hf_specx.drafting.drafter import check_number
from hf_specx.drafting.early_exit import EarlyExitDraft, check_exit_layer
from hf_specx.drafting.heads.mtp import MtpDraft
from hf_specx.drafting.schedule import given_drafting
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.engine.entry import (
    bind_stop_strings,
    check_entry,
    check_lifted,
    check_values,
    known_arguments,
    prepared,
    setting,
    unset,
)
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.hub.find_draft import find_draft


STRATEGY_OPTIONS: tuple[str, ...] = ("num_draft_tokens", "verification", "layout", "compile", "costs")
STRATEGY_OPTIONS += ("draft_tokenizer", "tokenizer_match", "tokenizer", "streamer", "stream_by")
OWN = (*STRATEGY_OPTIONS, "draft_model", "assistant_tokenizer", "seeds")  # arguments that transformers has not
NAMED = inspect.signature(GenerationMixin.generate).parameters.keys() - {"self", "inputs", "custom_generate", "kwargs"}
LOADER_OPTIONS: tuple[str, ...] = ("revision", "token", "cache_dir", "force_download", "local_files_only")
LOADER_OPTIONS += ("proxies", "repo_type", "trust_remote_code")
KNOWN_EXITS: dict[int, EarlyExitDraft] = {}  # so that each remembers times and compiled forwards from call to call
# how long forwards take, by draft, and by what else they depend on; an attribute of the draft would change its traits
TIMES: WeakKeyDictionary[Any, dict[str, dict[int, dict[str, Any]]]] = WeakKeyDictionary()
OWN_LAYERS = MtpDraft()  # likewise, and so that a target's layers are read once


def generate(
    inputs: torch.Tensor | None = None, *more: Any, model: PreTrainedModel | None = None, **kwargs: Any
) -> Any:
    """`model.generate` with speculative sampling; takes also the arguments that a strategy object does not get.

    The only thing remembered from call to call is how long forwards took, where they had to be timed before the call,
    as where they are compiled: by batch size, as long as the draft exists. A strategy object also remembers acceptance
    and the times of rounds, and so does the `SuffixDraft` of a pair.

    Args:
        *more: further positional arguments of the model's own `generate`.
        model: the target, by name.
        **kwargs: everything that `generate` takes, and every option of `SpeculativeDecoding`. The draft is given as
            `draft_model` or `assistant_model`; else `assistant_early_exit=n` means `EarlyExitDraft(n)`; else
            `use_mtp=True` means `MtpDraft()`; else `prompt_lookup_num_tokens` means a `SuffixDraft`, see
            `lookup_draft`; else it is looked for as `find_draft` says, and the options that its pair recommends are
            used. With `custom_generate`, that is called instead.
    """
    if model is None or hasattr(inputs, "can_generate"):
        told = "the target is given by name: hf_specx.generate(ids, model=model, draft_model=draft); and as "
        raise TypeError(f"{told}custom_generate= in a call of model.generate give SpeculativeDecoding(draft)")
    with ending(kwargs.get("streamer")) as reached:
        model = unwrapped(model)
        check_entry(model, kwargs.get("custom_generate"))
        # called by string, we may be inside the class's own `generate` already; all arguments are then named
        owner: Any = GenerationMixin if kwargs.keys() >= NAMED else type(model)
        kwargs = add_positional(owner, more, kwargs)
        other = kwargs.pop("custom_generate", None)
        if other is not None:
            reached.append(True)
            return owner.generate(model, *(() if inputs is None else (inputs,)), custom_generate=other, **kwargs)
        if kwargs.get("assistant_model") is not None and owner is not type(model):
            check_lifted(model)
        check_before_loading(inputs, model, kwargs)
        options = take_options(kwargs)
        SpeculativeDecoding(EarlyExitDraft(1), **options)  # a wrong one is refused before any draft is loaded
        draft, recommended, costs = take_draft(model, kwargs)
        strategy = SpeculativeDecoding(draft, **recommended | options)
        strategy.load(model)
        if "costs" in options:
            return run(strategy, owner, model, inputs, kwargs, reached)
        with noted_times(strategy, model) as times:  # those at batch sizes of other calls must not count
            strategy.costs = replace(costs.apart(), measured=times)
            return run(strategy, owner, model, inputs, kwargs, reached)


def take_draft(model: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], Costs]:
    """Take the draft out of the arguments of a call, or find it; with options that go with it, and its costs."""
    draft = either(kwargs, "draft_model", "assistant_model")
    if draft is not None:
        return draft, {}, Costs()
    exit_layer = setting("assistant_early_exit", model, kwargs)
    if exit_layer is not None:
        unset("assistant_early_exit", model, kwargs)
        check_exit_layer("assistant_early_exit", exit_layer, model)
        return KNOWN_EXITS.setdefault(int(exit_layer), EarlyExitDraft(int(exit_layer))), {}, Costs()
    if setting("use_mtp", model, kwargs):
        unset("use_mtp", model, kwargs)
        return OWN_LAYERS, {}, Costs()
    lookup = lookup_draft(model, kwargs)
    if lookup is not None:
        return lookup, {"num_draft_tokens": lookup.max_candidates}, Costs()
    return find_draft(model, kwargs)


def lookup_draft(model: PreTrainedModel, kwargs: dict[str, Any]) -> SuffixDraft | None:
    """The draft that transformers' two options of prompt lookup ask for, in the call or in a config; None without.

    `prompt_lookup_num_tokens` is how many tokens at most; `max_matching_ngram_size` how many last tokens are compared
    at most, down to one. Without it 2 tokens or more have to match, and the longest match counts.
    """
    names = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
    number, size = (setting(name, model, kwargs) for name in names)
    told = f"{names[1]}={size} is for {names[0]}, which is not given; give both, or leave it out."
    require(number is not None or kwargs.get(names[1]) is None, told)
    if number is None:
        return None
    for name, value in zip(names, (number, size), strict=True):
        check_number(name, 1 if value is None else value)
    unset(names[0], model, kwargs)  # else `generate` would look them up itself
    return SuffixDraft(number) if size is None else SuffixDraft(number, min_match=1, max_match=size)


@contextmanager
def noted_times(strategy: SpeculativeDecoding, target: PreTrainedModel) -> Iterator[dict[int, dict[str, Any]]]:
    """The times of earlier calls with the draft, to which this one adds its own, if any: by batch size.

    They hold for targets of one class, size and dtype on one kind of device.
    """
    size = sum(weight.numel() for weight in target.parameters())
    where = f"{target.dtype} on {hardware(execution_device(target))}{', compiled' * strategy.compile}"
    kind = f"{type(target).__name__} of {size} parameters in {where}"
    draft: Any = strategy.draft_model
    if isinstance(draft, list):
        draft = next((part for part in draft if isinstance(part, PreTrainedModel)), draft[0])
    try:
        of_draft = TIMES.setdefault(draft, {})
    except TypeError:  # it takes no weak references, or has no hash
        of_draft = {}
    times = of_draft.get(kind, {})
    try:
        yield times
    finally:
        if times:  # another thread may have been first
            of_draft.setdefault(kind, times).update(times)


@contextmanager
def ending(streamer: Any) -> Iterator[list[bool]]:
    """End a streamer after an error, unless the list that this yields has an item: the strategy ends it itself."""
    reached: list[bool] = []
    try:
        yield reached
    except BaseException:
        if not reached and hasattr(streamer, "end"):
            streamer.end()
        raise


def add_positional(owner: Any, more: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name; `owner.generate` names those given by position after the first."""
    parameters = inspect.signature(owner.generate).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][2:]
    if len(more) > len(names):
        raise TypeError(f"{owner.__name__}.generate takes no {len(more) + 1} positional arguments; pass them by name.")
    return dict(**dict(zip(names, more, strict=False)), **kwargs)


def check_before_loading(inputs: Any, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Check the arguments of a call by name and type, before anything is loaded for it."""
    ids = "a tensor of token ids, as tokenizer(texts, return_tensors='pt', padding=True) gives"
    kinds: dict[str, tuple[Any, str]] = {
        "inputs": (torch.Tensor, ids),
        "input_ids": (torch.Tensor, ids),
        "generation_config": (GenerationConfig, "GenerationConfig(...), or its fields as arguments"),
        "logits_processor": (list | tuple, "a list of such objects"),
        "stopping_criteria": (list | tuple, "a list of such objects"),
    }
    given = {"inputs": inputs} | kwargs
    for name, (expected, what) in kinds.items():
        value = given.get(name)
        require(value is None or isinstance(value, expected), f"{name} is {kind(value)}; pass {what}.")
    check_values(given)
    told = "cache_implementation='paged' turns generate into continuous batching, which takes no strategy; "
    paged = kwargs.get("cache_implementation") == "paged"
    require(not paged, f"{told}leave it out, or call generate_batch without a draft.")
    for name in sorted(kwargs.keys() - {*OWN, *LOADER_OPTIONS} - known_arguments(model)):
        if similar(name, known := [*OWN, *vars(GenerationConfig())]):  # others may be what the model reads
            check_names("generate", [name], known)


def take_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `SpeculativeDecoding` out of the arguments of a call; None counts as not given."""
    kwargs |= {"draft_tokenizer": either(kwargs, "draft_tokenizer", "assistant_tokenizer")}
    options = {name: kwargs.pop(name, None) for name in STRATEGY_OPTIONS}
    asked = given_drafting(kwargs, kwargs.get("generation_config"))
    if options["num_draft_tokens"] is None and "num_assistant_tokens" in asked:
        options["num_draft_tokens"] = "auto"  # so that the number that a pair recommends does not win over it
    return {name: value for name, value in options.items() if value is not None}


def either(kwargs: dict[str, Any], ours: str, theirs: str) -> Any:
    """Take an argument that has two names, of which a call may use one; None if it is not given."""
    found = {name: value for name in (ours, theirs) if (value := kwargs.pop(name, None)) is not None}
    require(len(found) < 2, f"{ours}= and {theirs}= mean the same; pass one of them.")
    return next(iter(found.values()), None)


def run(
    strategy: SpeculativeDecoding,
    owner: Any,
    model: PreTrainedModel,
    inputs: torch.Tensor | None,
    kwargs: dict[str, Any],
    reached: list[bool],
) -> Any:
    """Call `owner.generate`, of the class or of `GenerationMixin`, with a strategy made for this call; note in
    `reached` that this was called.
    """
    for name in LOADER_OPTIONS:
        kwargs.pop(name, None)
    drafting = given_drafting(kwargs, kwargs.get("generation_config"), model.generation_config)
    withheld = {"drafting": drafting, "synced_gpus": kwargs.pop("synced_gpus", None)}

    @functools.wraps(prepared)
    def called(given: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        reached.append(True)
        target = model if given is served else given  # PEFT gives the model inside its wrapper
        # Whisper calls once for each window, and its report is of all
        return strategy.decode(prepared(target, *args, **kwargs), strategy.report, **withheld)

    bind_stop_strings(model, strategy.tokenizer, kwargs)
    heals = setting("token_healing", model, kwargs)
    served = healing(model, strategy.tokenizer) if heals else model
    first = () if inputs is None else (inputs,)  # which a class may name differently
    result = owner.generate(served, *first, custom_generate=called, **kwargs)
    if isinstance(result, ModelOutput):
        result.speculation_report = strategy.report
    elif isinstance(result, dict):  # what Whisper makes of several windows
        result["speculation_report"] = strategy.report
    return result


def healing(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
    """A shallow copy of a model whose `generate`, which has no tokenizer here, heals the ends of prompts with this."""
    require(tokenizer is not None, "token_healing=True needs the tokenizer; pass tokenizer=.")
    plain = shallow(model)
    vars(plain).pop("generate", None)  # healing calls `generate`, and an override would want a draft
    healed, heal = shallow(plain), GenerationMixin.heal_tokens
    vars(healed)["heal_tokens"] = lambda input_ids, _: heal(plain, input_ids, tokenizer)
    return healed
