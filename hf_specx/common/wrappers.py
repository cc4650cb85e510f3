"""Models inside the wrappers of `torch.compile` and PEFT; copies, references and names of models."""

import copy
import math
import sys
import weakref
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel


Value = TypeVar("Value")


class OfModels(WeakKeyDictionary[PreTrainedModel, Value]):
    """A cache by model, whose entries go when the model does. Copies and pickles of it are empty."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def __deepcopy__(self, memo: Any) -> "OfModels[Value]":
        return type(self)()


class ModelReference(weakref.ref[PreTrainedModel]):
    """A weak reference to a model; a pickle has None in its place, since the model is another one there."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> "ModelReference":
        return self


def unwrapped(model: Any, adapters: bool = False) -> Any:
    """The model inside the wrapper of `torch.compile`, which has no `generate` of its own; anything else as it is.

    With `adapters` also the model inside PEFT's wrapper. Its LoRA layers stay, being part of that model, and a tuned
    prompt is lost; so this is for drafts, whose tokens may come from any distribution.
    """
    compiled = getattr(model, "_modules", {}).get("_orig_mod")
    if compiled is not None:
        return unwrapped(compiled, adapters)
    if adapters and not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        return unwrapped(model.get_base_model(), adapters)
    return model


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether PEFT has put layers of its own into a model, which are not saved with it."""
    return any(type(module).__module__.startswith("peft.tuners") for module in model.modules())


def unwrapped_draft(draft: Any) -> Any:
    """A draft, or each draft of a list, without the wrappers of `torch.compile` and PEFT if it is a model."""
    return [unwrapped(part, True) for part in draft] if isinstance(draft, list | tuple) else unwrapped(draft, True)


def shallow(module: Any) -> Any:
    """A copy of a module with the same weights and submodules; methods bound to the module are bound to the copy.

    A compiled call of the module is left out, since it would run the module itself.
    """
    new_module = object.__new__(type(module))  # `copy.copy` fails for a class that FSDP2 has made
    attributes = {name: value for name, value in vars(module).items() if name != "_compiled_call_impl"}
    vars(new_module).update({name: _rebound(value, module, new_module) for name, value in attributes.items()})
    new_module._modules = dict(module._modules)
    return new_module


def _rebound(value: Any, module: torch.nn.Module, new_module: torch.nn.Module) -> Any:
    """An attribute of a module for a copy of it: what was bound to the module is bound to the copy."""
    if isinstance(value, FunctionType):  # a forward that torch has compiled
        value = getattr(value, "_torchdynamo_orig_callable", value)
    if value is module:
        return new_module
    if isinstance(value, MethodType):
        return MethodType(value.__func__, new_module) if value.__self__ is module else value
    if not isinstance(value, partial):
        return value
    args = [_rebound(argument, module, new_module) for argument in value.args]
    keywords = {name: _rebound(argument, module, new_module) for name, argument in value.keywords.items()}
    bound = partial(_rebound(value.func, module, new_module), *args, **keywords)
    vars(bound).update({name: _rebound(attribute, module, new_module) for name, attribute in vars(value).items()})
    return bound


def without_cache_reset(model: PreTrainedModel) -> Any:
    """The model, or a shallow copy of it whose `prepare_inputs_for_generation` never drops the cache.

    That of Phi-3 does so once a text outgrows its short rotary frequencies, to compute all of it anew.
    """
    if not hasattr(model.config, "original_max_position_embeddings"):
        return model
    new_model = shallow(model)
    new_model.config = copy.copy(model.config)
    new_model.config.original_max_position_embeddings = sys.maxsize
    return new_model


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model whose output is the hidden states after the final norm."""
    decoder: Any = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # a head may have that name
        decoder = model.base_model
    while hasattr(decoder, "lm_head"):  # Llama 4's own decoder is the whole model
        inner = next((part for part in decoder.children() if isinstance(part, PreTrainedModel)), None)
        if inner is None:
            break
        decoder = inner
    return decoder


def reads_text(model: PreTrainedModel) -> bool:
    """Whether prompts of a model may be texts alone; an encoder may read sounds or images in their place."""
    return not model.config.is_encoder_decoder or model.main_input_name == "input_ids"


def vocabulary(model: PreTrainedModel) -> int:
    """How many token ids a model scores."""
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear):
        return head.out_features
    return int(model.config.get_text_config(decoder=True).vocab_size)


def logical_parameters(model: PreTrainedModel) -> int:
    """How many parameters a model computes with: tied ones count once, quantised ones as many as they stand for."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    counted = set[int]()
    total = 0
    for path, module in model.named_modules():
        linear_size = _linear_size(module)
        if linear_size and "weight" not in module._parameters:  # it is in buffers, as that of GPTQ
            total += linear_size
        for name, weight in module._parameters.items():
            if weight is None or id(weight) in counted or f"{path}.{name}" in tied:
                continue
            counted.add(id(weight))
            total += linear_size if linear_size and name == "weight" else weight.numel()
    return total


def _linear_size(module: Any) -> int:
    """How many parameters the weight of a linear layer stands for; 0 for other modules."""
    sizes = [getattr(module, name, None) for name in ("in_features", "out_features")]
    has_base_layer = hasattr(module, "base_layer")  # as layers of LoRA, beside which the weight is counted
    if has_base_layer or not all(isinstance(size, int) for size in sizes):
        return 0
    return math.prod(sizes)  # type: ignore[arg-type]


def public_name(model: Any) -> str:
    """The name by which a model was loaded; of a folder on this machine its last part alone, "" if it has none."""
    name = str(getattr(model, "name_or_path", None) or "")
    return Path(name).resolve().name if name and Path(name).exists() else name


def label_of(part: Any) -> str:
    """The text for a draft in a `repr`: of a model its class and name; of a list those of its items."""
    if isinstance(part, list):
        return f"[{', '.join(map(label_of, part))}]"
    name = type(part).__name__
    if isinstance(part, torch.nn.Module):
        return f"{name} {getattr(part, 'name_or_path', '') or ''}".strip()
    return name if type(part).__repr__ is object.__repr__ else repr(part)


class NoModel:
    """A base for objects that hold models and are none: says so where one is taken for a model, as by `pipeline`."""

    if not TYPE_CHECKING:  # which would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__} has no attribute {name!r}"
            if name in ("config", "device", "generation_config", "can_generate", "forward", "eval"):
                message += (
                    " and is no model; give the model itself (of a pair its .target), and the strategy (of a pair its "
                    ".strategy) as custom_generate=, as in pipeline(task, model=model)(text, custom_generate=strategy)"
                )
            if name in ("max_length", "update"):  # of a generation config, the second argument of `generate`
                message += " and is no GenerationConfig; give a strategy by its name, as custom_generate=strategy"
            raise AttributeError(message)
