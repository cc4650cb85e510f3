"""Copies of models that share all weights with them and have a few other parts: the model itself is never changed."""

from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn


NO_LIMIT = (0.0, float("inf"))


def altered(model: Any, parts: Mapping[nn.Module, nn.Module]) -> Any:
    """A model with other modules in the places of some of its own; the model itself if it has none of these.

    Only modules that hold one of them are copied; what is registered on a module later, as hooks are, is on its copy
    as well.
    """
    if not parts or model in parts:
        return parts.get(model, model)
    children = {name: module if module is None else altered(module, parts) for name, module in model._modules.items()}
    if all(child is model._modules[name] for name, child in children.items()):
        return model
    made = shallow(model)
    made._modules = children
    return made


def without_limits(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """For the Mamba-2 layers of a model, these without limits to the time step (5.23), as in single steps."""
    limited = [module for module in model.modules() if hasattr(module, "time_step_limit")]
    found = {module: shallow(module) for module in limited}
    for made in found.values():
        made.time_step_limit = NO_LIMIT
    return found


def shallow(module: Any) -> Any:
    """A copy of a module that holds the same things, in a dict of modules of its own.

    What was bound to the module, as forwards are under hooks of accelerate, is bound to the copy. What torch has
    compiled of the module is not: it would run the module itself.
    """
    made = object.__new__(type(module))
    held = {name: value for name, value in vars(module).items() if name != "_compiled_call_impl"}
    vars(made).update({name: _rebound(value, module, made) for name, value in held.items()})
    made._modules = dict(module._modules)
    return made


def _rebound(value: Any, module: nn.Module, made: nn.Module) -> Any:
    if isinstance(value, FunctionType):  # a forward that torch has compiled
        value = getattr(value, "_torchdynamo_orig_callable", value)
    if value is module:
        return made
    if isinstance(value, MethodType):
        return MethodType(value.__func__, made) if value.__self__ is module else value
    if not isinstance(value, partial):
        return value
    args = [_rebound(x, module, made) for x in value.args]
    named = {name: _rebound(x, module, made) for name, x in value.keywords.items()}
    bound = partial(_rebound(value.func, module, made), *args, **named)
    vars(bound).update({name: _rebound(x, module, made) for name, x in vars(value).items()})
    return bound
