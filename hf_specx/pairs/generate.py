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
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.drafter import check_number
from hf_specx.drafting.early_exit import EarlyExitDraft, check_exit_layer
from hf_specx.drafting.forward_times import ForwardTimes
from hf_specx.drafting.heads.mtp import MtpDraft
from hf_specx.drafting.schedule import explicit_draft_settings
from hf_specx.drafting.suffix import SuffixDraft
from hf_specx.engine.check_arguments import check_assistant_model, check_entry, check_values, known_arguments
from hf_specx.engine.entry import bind_stop_strings, prepared_inputs, setting, unset
from hf_specx.engine.strategy import SpeculativeDecoding
from hf_specx.hub.find_draft import find_draft


STRATEGY_OPTIONS = tuple(inspect.getfullargspec(SpeculativeDecoding.__init__).kwonlyargs)
NOT_OF_TRANSFORMERS = (*STRATEGY_OPTIONS, "draft_model", "assistant_tokenizer", "seeds")
NAMED_ARGUMENTS = inspect.signature(GenerationMixin.generate).parameters.keys() - {
    "self",
    "inputs",
    "custom_generate",
    "kwargs",
}
LOADER_OPTIONS: tuple[str, ...] = ("revision", "token", "cache_dir", "force_download", "local_files_only")
LOADER_OPTIONS += ("proxies", "repo_type", "trust_remote_code")
EXIT_DRAFTS: dict[int, EarlyExitDraft] = {}  # so that each remembers times and compiled forwards from call to call
# how long forwards take, by draft, and by what else they depend on; an attribute of the draft would change its traits
TIMES: WeakKeyDictionary[Any, dict[str, dict[int, ForwardTimes]]] = WeakKeyDictionary()


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
        raise TypeError(
            "the target is given by name: hf_specx.generate(ids, model=model, draft_model=draft); and as "
            "custom_generate= in a call of model.generate give SpeculativeDecoding(draft)"
        )
    with EndStreamerOnError(kwargs.get("streamer")) as streamer_end:
        model = unwrapped(model)
        check_entry(model, kwargs.get("custom_generate"))
        # called by string, we may be inside the class's own `generate` already; all arguments are then named
        owner: Any = GenerationMixin if kwargs.keys() >= NAMED_ARGUMENTS else type(model)
        kwargs = add_positional(owner, more, kwargs)
        custom_generate = kwargs.pop("custom_generate", None)
        if custom_generate is not None:
            streamer_end.strategy_called = True
            first = () if inputs is None else (inputs,)
            return owner.generate(model, *first, custom_generate=custom_generate, **kwargs)
        if kwargs.get("assistant_model") is not None and owner is not type(model):
            check_assistant_model(model)
        check_before_loading(inputs, model, kwargs)
        options = pop_options(kwargs)
        SpeculativeDecoding(EarlyExitDraft(1), **options)  # a wrong one is refused before any draft is loaded
        draft, recommended, costs = pop_draft(model, kwargs)
        strategy = SpeculativeDecoding(draft, **recommended | options)
        strategy.load(model)
        if "costs" in options:
            return call_generate(strategy, owner, model, inputs, kwargs, streamer_end)
        with remembered_times(strategy, model) as times:  # those at batch sizes of other calls must not count
            strategy.costs = replace(costs.copy(), measured=times)
            return call_generate(strategy, owner, model, inputs, kwargs, streamer_end)


def pop_draft(model: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], Costs]:
    """The draft, popped from the arguments of a call or found, with the options that go with it, and its costs."""
    draft = pop_either(kwargs, "draft_model", "assistant_model")
    if draft is not None:
        return draft, {}, Costs()
    exit_layer = setting("assistant_early_exit", model, kwargs)
    if exit_layer is not None:
        unset("assistant_early_exit", model, kwargs)
        check_exit_layer("assistant_early_exit", exit_layer, model)
        return EXIT_DRAFTS.setdefault(int(exit_layer), EarlyExitDraft(int(exit_layer))), {}, Costs()
    if setting("use_mtp", model, kwargs):
        unset("use_mtp", model, kwargs)
        return mtp_draft(), {}, Costs()
    lookup = lookup_draft(model, kwargs)
    if lookup is not None:
        return lookup, {"num_draft_tokens": lookup.max_candidates}, Costs()
    return find_draft(model, kwargs)


@functools.cache
def mtp_draft() -> MtpDraft:
    """One `MtpDraft` for all calls, which remembers times, compiled forwards and the layers of each target."""
    return MtpDraft()


def lookup_draft(model: PreTrainedModel, kwargs: dict[str, Any]) -> SuffixDraft | None:
    """The draft that transformers' two options of prompt lookup ask for, in the call or in a config; None without.

    `prompt_lookup_num_tokens` is how many tokens at most; `max_matching_ngram_size` how many last tokens are compared
    at most, down to one. Without it 2 tokens or more have to match, and the longest match counts.
    """
    num_tokens = setting("prompt_lookup_num_tokens", model, kwargs)
    ngram_size = setting("max_matching_ngram_size", model, kwargs)
    require(
        num_tokens is not None or kwargs.get("max_matching_ngram_size") is None,
        f"max_matching_ngram_size={ngram_size} is for prompt_lookup_num_tokens, which is not given; give both, or "
        "leave it out.",
    )
    if num_tokens is None:
        return None
    check_number("prompt_lookup_num_tokens", num_tokens)
    if ngram_size is not None:
        check_number("max_matching_ngram_size", ngram_size)
    unset("prompt_lookup_num_tokens", model, kwargs)  # else `generate` would look them up itself
    if ngram_size is None:
        return SuffixDraft(num_tokens)
    return SuffixDraft(num_tokens, min_match=1, max_match=ngram_size)


@contextmanager
def remembered_times(strategy: SpeculativeDecoding, target: PreTrainedModel) -> Iterator[dict[int, ForwardTimes]]:
    """A context with the forward times of earlier calls with the draft, by batch size; this call's are added to them.

    They hold for targets of one class, size and dtype on one kind of device.
    """
    size = sum(weight.numel() for weight in target.parameters())
    device_name = hardware(execution_device(target))
    key = f"{type(target).__name__} of {size} parameters in {target.dtype} on {device_name}"
    if strategy.compile:
        key += ", compiled"
    draft: Any = strategy.draft_model
    if isinstance(draft, list):
        draft = next((part for part in draft if isinstance(part, PreTrainedModel)), draft[0])
    try:
        times_of_draft = TIMES.setdefault(draft, {})
    except TypeError:  # it takes no weak references, or has no hash
        times_of_draft = {}
    times = times_of_draft.get(key, {})
    try:
        yield times
    finally:
        if times:  # another thread may have been first
            times_of_draft.setdefault(key, times).update(times)


class EndStreamerOnError:
    """A context that ends a streamer after an error, unless the strategy was called: that ends the streamer itself."""

    def __init__(self, streamer: Any):
        self.streamer = streamer
        self.strategy_called = False

    def __enter__(self) -> "EndStreamerOnError":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: Any) -> None:
        if error_type is not None and not self.strategy_called and hasattr(self.streamer, "end"):
            self.streamer.end()


def add_positional(owner: Any, more: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call with those added that were given by position, named as in `owner.generate`."""
    parameters = inspect.signature(owner.generate).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][2:]
    if len(more) > len(names):
        raise TypeError(f"{owner.__name__}.generate takes no {len(more) + 1} positional arguments; pass them by name.")
    return dict(**dict(zip(names, more, strict=False)), **kwargs)


def check_before_loading(inputs: Any, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raise ValueError or TypeError for wrong names and types of arguments, before anything is loaded for a call."""
    a_tensor = "a tensor of token ids, as tokenizer(texts, return_tensors='pt', padding=True) gives"
    types: dict[str, tuple[Any, str]] = {
        "inputs": (torch.Tensor, a_tensor),
        "input_ids": (torch.Tensor, a_tensor),
        "generation_config": (GenerationConfig, "GenerationConfig(...), or its fields as arguments"),
        "logits_processor": (list | tuple, "a list of such objects"),
        "stopping_criteria": (list | tuple, "a list of such objects"),
    }
    arguments = {"inputs": inputs} | kwargs
    for name, (expected, remedy) in types.items():
        value = arguments.get(name)
        require(value is None or isinstance(value, expected), f"{name} is {kind(value)}; pass {remedy}.")
    check_values(arguments)
    is_paged = kwargs.get("cache_implementation") == "paged"
    require(
        not is_paged,
        "cache_implementation='paged' turns generate into continuous batching, which takes no strategy; leave it "
        "out, or call generate_batch without a draft.",
    )
    names = [*NOT_OF_TRANSFORMERS, *vars(GenerationConfig())]
    for name in sorted(kwargs.keys() - {*NOT_OF_TRANSFORMERS, *LOADER_OPTIONS} - known_arguments(model)):
        if similar(name, names):  # others may be what the model reads
            check_names("generate", [name], names)


def pop_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of `SpeculativeDecoding`, popped from the arguments of a call; None counts as not given."""
    kwargs |= {"draft_tokenizer": pop_either(kwargs, "draft_tokenizer", "assistant_tokenizer")}
    options = {name: kwargs.pop(name, None) for name in STRATEGY_OPTIONS}
    asked = explicit_draft_settings(kwargs, kwargs.get("generation_config"))
    if options["num_draft_tokens"] is None and "num_assistant_tokens" in asked:
        options["num_draft_tokens"] = "auto"  # so that the number that a pair recommends does not win over it
    return {name: value for name, value in options.items() if value is not None}


def pop_either(kwargs: dict[str, Any], ours: str, theirs: str) -> Any:
    """The value of an argument that has two names, of which a call may use one, popped; None if it is not given."""
    our_value = kwargs.pop(ours, None)
    their_value = kwargs.pop(theirs, None)
    require(our_value is None or their_value is None, f"{ours}= and {theirs}= mean the same; pass one of them.")
    return their_value if our_value is None else our_value


def call_generate(
    strategy: SpeculativeDecoding,
    owner: Any,
    model: PreTrainedModel,
    inputs: torch.Tensor | None,
    kwargs: dict[str, Any],
    streamer_end: EndStreamerOnError,
) -> Any:
    """Call `owner.generate`, of the model's class or of `GenerationMixin`, with a strategy; returns what it returns.

    `streamer_end` is told when the strategy is called.
    """
    for name in LOADER_OPTIONS:
        kwargs.pop(name, None)
    draft_settings = explicit_draft_settings(kwargs, kwargs.get("generation_config"), model.generation_config)
    withheld = {"draft_settings": draft_settings, "synced_gpus": kwargs.pop("synced_gpus", None)}

    @functools.wraps(prepared_inputs)
    def decode(called_model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        streamer_end.strategy_called = True
        target = model if called_model is served else called_model  # PEFT gives the model inside its wrapper
        # Whisper calls once for each window, and its report is of all
        return strategy.decode(prepared_inputs(target, *args, **kwargs), strategy.report, **withheld)

    bind_stop_strings(model, strategy.tokenizer, kwargs)
    served = model
    if setting("token_healing", model, kwargs):
        served = healing(model, strategy.tokenizer)
    first = () if inputs is None else (inputs,)  # which a class may name differently
    result = owner.generate(served, *first, custom_generate=decode, **kwargs)
    if isinstance(result, ModelOutput):
        result.speculation_report = strategy.report
    elif isinstance(result, dict):  # what Whisper makes of several windows
        result["speculation_report"] = strategy.report
    return result


def healing(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
    """A shallow copy of a model whose `heal_tokens` uses this tokenizer, which transformers does not pass on here."""
    require(tokenizer is not None, "token_healing=True needs the tokenizer; pass tokenizer=.")
    plain = shallow(model)
    vars(plain).pop("generate", None)  # healing calls `generate`, and an override would want a draft
    healed = shallow(plain)
    vars(healed)["heal_tokens"] = lambda input_ids, _: GenerationMixin.heal_tokens(plain, input_ids, tokenizer)
    return healed
