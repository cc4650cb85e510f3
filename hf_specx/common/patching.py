"""Patches of transformers: put in their place once, they stay, and do what `OVERRIDES` says, or else what was there.

`OVERRIDES` is empty but for the length of our forwards, and belongs to one thread or asyncio task: others, and plain
`generate`, find what was in the place before. A patch of an attribute lies on the class, so that no module is changed,
nor what is copied, pickled or saved of it. Two copies of this file, as each published pair has its own, may patch the
same place: the patch of one lies over that of the other, and passes on what it has no override for.
"""

import threading
from collections.abc import Hashable, Mapping, MutableMapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch


OVERRIDES: ContextVar[Mapping[Hashable, Any]] = ContextVar("OVERRIDES", default=MappingProxyType({}))
LOCK: threading.Lock = vars(threading).setdefault("_hf_specx_lock", threading.Lock())  # one for all copies


class Overriding:
    """A context manager: inside, and in this context alone, patches do something else.

    Args:
        overrides: by what `patch_function` and `patch_attribute` return; added to those that are in force.
    """

    def __init__(self, overrides: Mapping[Hashable, Any]):
        self.overrides = overrides

    def __enter__(self) -> None:
        self.token = OVERRIDES.set({**OVERRIDES.get(), **self.overrides})

    def __exit__(self, *error: object) -> None:
        OVERRIDES.reset(self.token)


class FunctionPatch:
    """Stands in a mapping for the function `patched`.

    While torch compiles, which cannot trace a `ContextVar`, an override has no effect unless it is `traced`: the
    compiled code of a user serves plain forwards as well.
    """

    def __init__(self, patched: Any, traced: Any):
        self.patched, self.traced = patched, traced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return (self.traced if self.traces() else self.patched)(*args, **kwargs)
        return OVERRIDES.get().get(self, self.patched)(*args, **kwargs)

    @torch.compiler.assume_constant_result
    def traces(self) -> bool:
        """Whether the override is `traced`, as torch finds it when it compiles."""
        return OVERRIDES.get().get(self, self) is self.traced


class AttributePatch:
    """Stands on a class for the attribute `name`, which was `patched` there, or None where only instances have it."""

    def __init__(self, patched: Any, name: str):
        self.patched, self.name, self.plain = patched, name, beneath(patched)[-1]

    def __get__(self, module: Any, owner: type) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            override = OVERRIDES.get().get((self, id(module)), self)
            if override is not self:
                return override
        # what the module has itself, as from accelerate, comes first, unless a subclass calls `super`
        lowest = module is not None and self.patched is self.plain
        if lowest and self.name in vars(module) and getattr(owner, self.name, None) is self.plain:
            return vars(module)[self.name]
        if self.patched is None:
            raise AttributeError(self.name)
        return self.patched.__get__(module, owner)

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self.name] = value

    def __delete__(self, module: Any) -> None:
        if vars(module).pop(self.name, self) is self:
            raise AttributeError(self.name)


def patch_function(place: MutableMapping[str, Any], name: str, traced: Any = None) -> Hashable:
    """Patch a function that others look up in a mapping, unless it is patched already.

    Args:
        place, name: where they look.
        traced: the override that torch may trace when it compiles; none if None.

    Returns:
        The key of its override, a function.
    """
    with LOCK:
        own = [x for x in beneath(place[name]) if isinstance(x, FunctionPatch)]
        if not own:
            own = [FunctionPatch(place[name], traced)]
            place[name] = own[0]
        return own[0]


def patch_attribute(module: torch.nn.Module, name: str) -> Hashable:
    """Patch an attribute of a module on the class that has it, unless it is patched already.

    Returns:
        The key of its override for this module, which has to outlive it.
    """
    with LOCK:
        owner = next((x for x in type(module).__mro__ if name in vars(x)), type(module))
        found = vars(owner).get(name)
        own = [x for x in beneath(found) if isinstance(x, AttributePatch)]
        if not own:
            own = [AttributePatch(found, name)]
            setattr(owner, name, own[0])
        return own[0], id(module)


def beneath(found: Any) -> list[Any]:
    """What lies in a place, from the top: patches of this copy and of others, and last what they are put over."""
    layers = [found]
    while hasattr(layers[-1], "patched"):
        layers.append(layers[-1].patched)
    return layers
