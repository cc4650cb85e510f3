"""States that cannot be cropped (recurrent, convolutional): kept as they were before a forward, and put back."""

import copy
from collections.abc import Container
from types import MethodType
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from .slots import self_attention


KEPT = ("conv_states", "recurrent_states")


class Copies:
    """Snapshots of a whole cache, of a class of the model's own, by the number of emitted tokens it had read."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self.snapshots: dict[int, Cache] = {}

    def save(self, seen: int) -> None:
        """Copy the cache, which has read `seen` emitted tokens, before the first forward of a round changes it."""
        if not self.snapshots:
            self.snapshots[seen] = copy.deepcopy(self.cache)

    def restore(self, wanted: int, seen: int) -> int:
        """Go back from `seen` to at most `wanted` emitted tokens; returns how many the cache has read then."""
        reached = seen if wanted == seen else max(number for number in self.snapshots if number <= wanted)
        if reached < seen:
            vars(self.cache).update(vars(self.snapshots[reached]))
        self.snapshots.clear()
        return reached

    def select(self, stay: torch.Tensor) -> None:
        """Keep only the rows at indices `stay` [R']."""
        for snapshot in self.snapshots.values():
            snapshot.batch_select_indices(stay)

    def crop(self, tokens: int, fixed: Container[int] = ()) -> None:
        pass


class States:
    """Snapshots of the recurrent states in a cache, by the number of emitted tokens they had read.

    Where convolutions are the only states there are none: transformers records their past, and crops them.
    """

    def __init__(self, cache: Cache):
        self.cache = cache
        linear = [x for x in cache.layers if isinstance(x, LinearAttentionCacheLayerMixin)]
        self.layers = linear if any(any(x.is_recurrent_states_initialized.values()) for x in linear) else []
        self.snapshots: dict[int, list[dict[int, torch.Tensor]]] = {}

    def save(self, seen: int) -> None:
        """Copy the states, which have read `seen` emitted tokens, before a forward overwrites them."""
        if self.layers:
            self.snapshots[seen] = [_copy(getattr(layer, name)) for layer in self.layers for name in KEPT]

    def restore(self, wanted: int, seen: int) -> int:
        """Go back from `seen` to at most `wanted` emitted tokens; returns how many the states have read then."""
        if not self.layers or wanted == seen:
            self.snapshots.clear()
            return wanted
        reached = max(number for number in self.snapshots if number <= wanted)
        saved = iter(self.snapshots[reached])
        for layer in self.layers:
            for name in KEPT:
                setattr(layer, name, next(saved))
        self.snapshots.clear()
        return reached

    def select(self, stay: torch.Tensor) -> None:
        """Keep only the rows at indices `stay` [R']."""
        for snapshot in self.snapshots.values():
            for states in snapshot:
                states.update((n, x[stay.to(x.device)]) for n, x in states.items() if x is not None)

    def crop(self, tokens: int, fixed: Container[int] = ()) -> None:
        """Take the last `tokens` off the keys of all layers, except layers whose numbers are in `fixed`."""
        for number, layer in enumerate(self.cache.layers):
            if number in fixed or not getattr(layer, "is_initialized", True):  # as if it shares the keys of another
                continue
            if layer not in self.layers:
                layer.crop(-tokens)  # type: ignore[union-attr]
            elif isinstance(layer, DynamicSlidingWindowLayer):
                DynamicSlidingWindowLayer.crop(layer, -tokens)
            elif isinstance(layer, DynamicLayer):
                DynamicLayer.crop(layer, -tokens)


def _copy(states: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {number: None if state is None else state.clone() for number, state in states.items()}


def _update(
    layer: DynamicSlidingWindowLayer, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's own `update`, cut to the columns that its mask has: 5.17 gives all that was recorded."""
    columns, _ = layer.get_mask_sizes(key_states.shape[-2])
    keys, values = type(layer).update(layer, key_states, value_states, *args, **kwargs)
    return keys[:, :, -columns:], values[:, :, -columns:]


def states_of(cache: Cache) -> States | Copies:
    """Snapshots for a cache that has read its prompts; from now on its other layers record what a crop needs."""
    text = self_attention(cache)
    if type(text) is not DynamicCache:
        return Copies(cache)
    states = States(text)
    for layer in text.layers:
        if layer not in states.layers and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.update = MethodType(_update, layer)  # type: ignore[method-assign]
    return states
