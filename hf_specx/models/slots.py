"""`SlotCache`, a key-value cache whose slots are written in place; and the cache that a call returns, made from it."""

import copy
import threading
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    QuantizedCache,
    QuantizedLayer,
    StaticCache,
    StaticLayer,
)

from hf_specx.common.architectures import CACHE
from hf_specx.common.devices import to_device_async
from hf_specx.common.errors import require

from .layers import SlotLayer, Slots


QUANTIZED: type = getattr(cache_utils, "BaseQuantizedLayer", QuantizedLayer)
# caches without a rollback: in quantised layers several tokens share a scale
NO_ROLLBACK = (StaticCache, StaticLayer, QuantizedCache, QUANTIZED)
PARTS = ("self_attention_cache", "cross_attention_cache")
OF_LOCKSTEP = ("update", "record_past")  # attributes that the lockstep layout sets in a layer, and no user wants
MARGIN = 32  # slots for candidates after the last token that can be emitted
MAX_EXCESS = 1.25  # a buffer with at most so many times the slots that are needed is returned without a copy
KeysValues = tuple[torch.Tensor, torch.Tensor]
LayersKeysValues = list[KeysValues]  # layer by layer


class SlotCache(Cache):
    """A cache of `SlotLayer`s, which are made when the model first writes to them.

    Attributes:
        slots: where the next forward writes, for all layers.
    """

    def __init__(self, limit: int = 0, ring: int = 0, kinds: Sequence[type[SlotLayer]] = (SlotLayer,)):
        """`kinds` are the classes of the layers in order, or one for all; `limit` and `ring` are as in `Slots`."""
        self.slots = slots = Slots(limit, ring)
        coming = cycle(kinds)
        # with a reference to `self` the buffers would stay until the garbage collector comes
        super().__init__(layer_class_to_replicate=lambda: next(coming)(slots))  # type: ignore[arg-type]

    def gather_rows(self, keep_indices: torch.Tensor) -> None:
        """Keep only the rows at indices `keep_indices` [R']."""
        self.slots.rows = len(keep_indices)
        self._gather(0, keep_indices)

    def gather_slots(self, slots: torch.Tensor) -> None:
        """Keep only the slots [n] of all rows, in that order; the next forward writes behind them."""
        self._gather(2, slots)
        self.slots.start = self.slots.kv_length = len(slots)

    def _gather(self, dim: int, index: torch.Tensor) -> None:
        self.slots.spare.clear()
        for layer in self._written_layers():
            layer.keys = layer.keys.index_select(dim, index.to(layer.keys.device))
            layer.values = layer.values.index_select(dim, index.to(layer.values.device))

    def widen(self, count: int) -> None:
        """Put `count` slots before the first of all rows."""
        self.slots.spare.clear()
        for layer in self._written_layers():
            layer.widen(count)
        self.slots.limit += count

    def _written_layers(self) -> list[Any]:
        """The layers that hold something: one that shares the keys of another is never written to."""
        return [layer for layer in self.layers if layer.is_initialized]  # type: ignore[union-attr]

    def write_rows(self, other: "SlotCache", rows: list[int], start: int, end: int) -> None:
        """Write the first slots of another cache, which has a row for each of `rows`, to slots `start` to `end`."""
        for layer, source in zip(self._written_layers(), other._written_layers(), strict=True):
            layer.write_rows(source, to_device_async(rows, layer.keys.device), start, end)

    def write_from(self, other: "SlotCache", rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write to the next slots what another cache has in its rows [R] at slots [R, n]."""
        for number, (keys, values) in enumerate(keys_values_of(other)):
            if other.layers[number].is_initialized:  # type: ignore[union-attr]
                keys, values = (x[rows[:, None].to(x.device), :, slots.to(x.device)] for x in (keys, values))
                self.update(keys.transpose(1, 2), values.transpose(1, 2), number)  # [R, H, n, D]

    def shift(self, source: torch.Tensor) -> None:
        """Write to the first n slots of each row what its slots `source` [R, n] hold."""
        for layer in self._written_layers():
            layer.shift(source)

    def move(self, rows: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Write to the slots `target` [n] of rows [n] what their slots `source` [n] hold."""
        for layer in self._written_layers():
            layer.move(rows, source, target)

    def read_row(self, index: int, slots: torch.Tensor) -> Iterator[KeysValues]:
        """By layer keys and values [H, n, D] of one row at slots [n]; zeros where a slot is negative."""
        return (layer.read_row(index, slots) for layer in self._written_layers())


def gather_cache_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Keep only the rows at indices `rows` [R'], in ascending order, of any cache that a runner has."""
    if isinstance(cache, SlotCache):
        cache.gather_rows(rows)
    elif isinstance(cache, EncoderDecoderCache):
        gather_cache_rows(cache.self_attention_cache, rows)
        gather_cache_rows(cache.cross_attention_cache, rows)
    elif type(cache) is DynamicCache:
        cache.reorder_cache(rows)  # type: ignore[arg-type]
    else:  # a model's own kind, which knows what else it holds
        cache.batch_select_indices(rows)


def has_columns(cache: Cache) -> bool:
    """Whether a cache is empty, or each of its layers has the keys and values of all tokens."""
    text_cache = self_attention(cache)
    keys = [getattr(layer, "keys", None) for layer in text_cache.layers]
    lengths = {None if x is None else x.shape[2] for x in keys}
    return lengths <= {None} or lengths == {text_cache.get_seq_length()}


def num_cached_tokens(cache: Cache) -> int:
    """How many tokens are in a cache; 0 where it has recurrent states alone, which do not count them."""
    try:
        return cache.get_seq_length()
    except ValueError:
        return 0


def unknown_cache(cache: Any) -> str:
    """Why no layout can roll back or move a cache, in words; empty if one can.

    Layers of transformers and its models can that grow with the text, or keep a window of it or a state.
    """
    if type(cache) is EncoderDecoderCache:
        return unknown_cache(cache.self_attention_cache) or unknown_cache(cache.cross_attention_cache)
    layers = [type(layer) for layer in getattr(cache, "layers", ())]
    for kind in (type(cache), *layers, getattr(cache, "layer_class_to_replicate", None) or type(cache)):
        is_transformers = kind.__module__.startswith("transformers.") and isinstance(kind, type)
        if not is_transformers or issubclass(kind, NO_ROLLBACK):
            description = f"{CACHE} is a {type(cache).__name__}"
            return description if kind is type(cache) else f"{description} with a {kind.__name__}"
    return f"{CACHE} is offloaded to the CPU" if getattr(cache, "offloading", False) else ""


def cache_name(kwargs: Collection[str]) -> str:
    """The name of the cache among inputs that `generate` has prepared."""
    return "cache_params" if "cache_params" in kwargs else CACHE


def self_attention(cache: Cache) -> Cache:
    """The part of a cache that grows with the text."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def is_window(layer: Any) -> bool:
    """Whether a layer of transformers drops columns that are out of its window."""
    return bool(getattr(layer, "is_sliding", False))


def with_slots(cache: Cache, slot_cache: SlotCache) -> Cache:
    """`slot_cache`, after the keys and values of another cache were copied to it; with those of an encoder beside it.

    Raises:
        ValueError: if a layer has dropped columns (a full sliding window), or keeps more than keys and values.
    """
    text_cache = self_attention(cache)
    require(
        has_columns(text_cache),
        f"{CACHE} is a {type(text_cache).__name__} without the keys of all its tokens; pass the whole text as "
        "input_ids, and leave it out.",
    )
    if text_cache.get_seq_length():
        for number, (keys, values) in enumerate(keys_values_of(text_cache)):
            slot_cache.update(keys, values, number)
    if text_cache is cache:
        return slot_cache
    return EncoderDecoderCache(slot_cache, own_copy(cache).cross_attention_cache)


def own_copy(cache: Any) -> Any:
    """A copy of a cache that the user has passed, whose rows and columns stay as they are; any other as it is."""
    return copy.deepcopy(cache) if getattr(cache, "_is_user_defined", False) else cache


def keys_values_of(cache: Cache) -> LayersKeysValues:
    """Keys and values [R, H, n, D] of all layers of a cache."""
    return [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[misc, union-attr]


def pop_layers(layers: LayersKeysValues) -> Iterator[KeysValues]:
    """Yields the keys and values of each layer, and takes them off the list, so that their memory becomes free."""
    while layers:
        yield layers.pop(0)


def fill_returned_cache(
    cache: Cache,
    source: Cache,
    rows: Mapping[int, Iterator[KeysValues]],
    ends: list[int],
    length: int,
    common_slots: slice | None,
    cross_attention: LayersKeysValues,
) -> Cache:
    """Fill an empty cache, which the next call can continue, and return it; with an encoder as its text's part.

    Layer by layer, keys and values move from the source to it, so that only one layer at a time takes memory twice.

    Args:
        source: the cache of the rows that were the last to end.
        rows: keys and values [H, n, D] of each row, layer by layer.
        ends: how many columns of each row are valid; then there are zeros up to `length`.
        common_slots: slots of the source that hold the columns of all rows; None if rows have others each.
        cross_attention: its keys and values, empty without an encoder.
    """
    layers: list[Any] = source.layers
    layers = [layer for layer in layers if layer.is_initialized]
    capacities = [layer.keys.shape[2] if type(layer) is SlotLayer else 0 for layer in layers]
    # nothing is copied if buffers have the rows in common slots, and few more slots than are needed
    is_reused = common_slots is not None and all(length <= number <= MAX_EXCESS * length for number in capacities)
    for number, layer in enumerate(layers):
        if is_reused:
            keys, values = layer.keys[:, :, common_slots], layer.values[:, :, common_slots]
            cache.update(keys[:, :, :0], values[:, :, :0], number)
            written: Any = cache.layers[number]
            written.keys, written.values = keys, values  # `update` would copy them
            for row, end in enumerate(ends):
                if end < length:
                    keys[row, :, end:], values[row, :, end:] = 0, 0
        else:
            of_rows = {row: next(layers_of_row) for row, layers_of_row in rows.items()}
            keys, values = (x.new_zeros(len(ends), x.shape[0], length, x.shape[2]) for x in of_rows[0])
            for row, (row_keys, row_values) in of_rows.items():
                end = ends[row]
                keys[row, :, :end], values[row, :, :end] = row_keys[:, :end], row_values[:, :end]
            cache.update(keys, values, number)
        layer.keys = layer.values = None
    return with_cross_attention(cache, cross_attention)


def with_cross_attention(cache: Cache, layers: LayersKeysValues) -> Cache:
    """A cache of the text with the keys and values of its encoder; the cache itself without an encoder."""
    cross_attention_cache = DynamicCache()
    for number, (keys, values) in enumerate(layers):
        cross_attention_cache.update(keys, values, number)
    return EncoderDecoderCache(cache, cross_attention_cache) if layers else cache


def write_user_cache(user_cache: Cache, past: Cache | None) -> Cache | None:
    """Write `past` to the user's own cache as `generate` would, and return that; if it is None, warn instead."""
    if past is None:
        message = (
            f"{CACHE}= was not filled with this text: its rows ended at different steps, and its states or windows "
            "cannot be put together, or it is spread over ranks; pass the whole text without it in the next turn."
        )
        warnings.warn(message, UserWarning, stacklevel=2)
        return None
    parts = [(user_cache, past)]
    if isinstance(user_cache, EncoderDecoderCache) and isinstance(past, EncoderDecoderCache):
        parts = [(getattr(user_cache, name), getattr(past, name)) for name in PARTS]
        user_cache.is_updated = past.is_updated
    for user_part, past_part in parts:
        for number, layer in enumerate(past_part.layers):
            if number < len(user_part.layers):
                _write_layer(user_part.layers[number], layer)
            else:  # transformers too adds layers as they are written
                user_part.layers.append(layer)
    return user_cache


def _write_layer(layer: Any, source: Any) -> None:
    """Copy what a layer holds to another one, which may have a window where the first has none."""
    if type(layer) is type(source):
        vars(layer).update({name: x for name, x in vars(source).items() if name not in OF_LOCKSTEP})
    elif source.is_initialized:
        layer.is_initialized = False
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = 0
        layer.update(source.keys, source.values)
    window = getattr(layer, "sliding_window", None)
    if window and layer.is_initialized and not getattr(layer, "record_past", False):  # as it keeps between forwards
        layer.keys, layer.values = layer.keys[:, :, 1 - window :], layer.values[:, :, 1 - window :]


class Pool:
    """The buffers [rows, H, capacity, D] of one model's compiled forwards, kept for later calls.

    Captured CUDA graphs use their addresses. Buffers can be used again once the object that they were allocated for no
    longer exists.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: list[tuple[tuple[Any, ...], weakref.ref[object], LayersKeysValues]] = []  # size, owner, buffers

    def allocate(self, owner: object, rows: int, slots: Sequence[int], like: LayersKeysValues) -> LayersKeysValues:
        """Buffers for `owner`, like others but for rows and each layer's `slots`.

        They are of zeros, since hidden slots take part with weight 0.
        """
        size = rows, *slots, *(x.dtype for layer in like for x in layer)  # in autocast values have another one
        with self.lock:
            # idle ones of another capacity are not kept: they may be as large as the model
            # nor those that its owner has outgrown
            self.entries = [x for x in self.entries if x[1]() not in (None, owner) or x[0][1:] == size[1:]]
            for number, (entry_size, user, buffers) in enumerate(self.entries):
                if entry_size == size and user() is None:
                    self.entries[number] = size, weakref.ref(owner), buffers
                    break
            else:
                buffers = [(_zeros(x, rows, n), _zeros(y, rows, n)) for (x, y), n in zip(like, slots, strict=True)]
                self.entries.append((size, weakref.ref(owner), buffers))
        for layer in buffers:
            for buffer in layer:
                buffer.zero_()
        return buffers


def _zeros(like: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    with torch.inference_mode(False):  # what is made in that mode could not be written outside of it, by a later call
        buffer = like.new_zeros(rows, like.shape[1], capacity, like.shape[3])
    torch._dynamo.mark_static_address(buffer, guard=False)  # captured graphs then write in place
    return buffer


def copy_buffers(source: LayersKeysValues, target: LayersKeysValues, index: torch.Tensor | None = None) -> None:
    """Copy the rows at `index` [R] of buffers, all that fit if None, to the first rows of others or of these."""
    for source_layer, target_layer in zip(source, target, strict=True):
        for old, new in zip(source_layer, target_layer, strict=True):
            rows, slots = min(len(old), len(new)), min(old.shape[2], new.shape[2])
            values = old[:rows, :, :slots] if index is None else old[index.to(old.device), :, :slots]
            new[: len(values), :, :slots] = values
