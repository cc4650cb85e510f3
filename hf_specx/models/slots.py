"""A key-value cache in slots that are written in place, used instead of transformers' own; and how it is handed over.

What lies after the end of a row is hidden by the mask and overwritten later, so a rollback only changes lengths.
"""

import copy
import warnings
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache
from transformers.generation.utils import ALL_CACHE_NAMES

from hf_specx.common.errors import require


# By which argument a model is given its cache: "cache" from 5.24 on, then Mamba too
CACHE = ALL_CACHE_NAMES[0]
MARGIN = 32  # slots for candidates after the last token that can be emitted
COPIED_BYTES = 1 << 21  # of keys: up to here a CPU reads a copy sooner than slots of a larger buffer
Columns = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values, layer by layer


class Slots:
    """Where the tokens of the coming forward are written, shared by all layers of a cache.

    Attributes:
        start: the first slot to write, if all rows write the same consecutive slots.
        index: row indices [R, 1] and slots [R, q] of the tokens, if rows differ; else None.
        extent: how many leading slots attention sees; 0 before `aim` was called, where each layer writes after what it
            holds, as it is fed a prompt.
        rows: how many there are, where the first keys may be those of some; 0 is as many as are written.
        limit: slots that will be needed as far as is known; buffers double up to it, and again beyond it.
    """

    def __init__(self, limit: int = 0) -> None:
        self.start = self.extent = self.rows = 0
        self.limit = limit
        self.index: tuple[torch.Tensor, torch.Tensor] | None = None
        self.spare: dict[tuple[Any, ...], torch.Tensor] = {}  # a buffer to roll into, by shape, dtype and device

    def aim(self, index: torch.Tensor | None, start: int, extent: int, rows: torch.Tensor | None = None) -> None:
        """Say where the next forward writes: at slots index [R, q], or in those from `start` up to `extent`.

        With `rows` [r] these are the rows that it is of, out of all.
        """
        if index is not None and rows is None:
            rows = torch.arange(len(index), device=index.device)
        self.index = None if index is None or rows is None else (rows[:, None], index)
        self.start, self.extent = start, extent


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [R, H, capacity, D], written in place."""

    is_sliding = False
    held = 0  # leading slots that are filled
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, slots: Slots):
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows = self.slots.rows or len(key_states)
        empty = (states[:1, :, :0].expand(rows, -1, -1, -1) for states in (key_states, value_states))
        self.keys, self.values = (self._grown(states, 0) for states in empty)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write key and value states [R, H, q, D] and return the visible slots [R, H, extent, D] of these rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        self.held = end = self.slots.extent or self.held + count
        adjoins = self.slots.index is None and self.keys.shape[2] >= end - count
        adjoins = adjoins and key_states.device.type == "cpu" and not torch.compiler.is_compiling()
        if adjoins and key_states.nbytes // count * end <= COPIED_BYTES:
            self.keys = torch.cat([self.keys[:, :, : end - count], key_states], 2)
            self.values = torch.cat([self.values[:, :, : end - count], value_states], 2)
            return self.keys, self.values
        if self.keys.shape[2] < end:
            self.keys, self.values = self._grown(self.keys, end), self._grown(self.values, end)
        if self.slots.index is None:
            self.keys[:, :, end - count : end] = key_states
            self.values[:, :, end - count : end] = value_states
        else:
            rows, slots = self.slots.index
            rows, slots = rows.to(key_states.device), slots.to(key_states.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
            if len(rows) < len(self.keys):
                return self.keys[rows[:, 0], :, :end], self.values[rows[:, 0], :, :end]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, stored: torch.Tensor, end: int) -> torch.Tensor:
        """A larger buffer of zeros: a masked slot still takes part with weight 0, and 0 * NaN is NaN."""
        self.slots.spare.clear()
        limit = self.slots.limit
        capacity = min(2 * end, limit) if end <= limit else 2 * end  # so that buffers are seldom copied
        grown = stored.new_zeros(*stored.shape[:2], capacity, stored.shape[3])
        grown[:, :, : stored.shape[2]] = stored
        return grown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.extent or self.held + query_length, 0

    def get_seq_length(self) -> int:
        return self.slots.start if self.slots.extent else self.held

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """A cache whose layers are `SlotLayer`, made when the model first writes to them."""

    def __init__(self, limit: int = 0) -> None:
        self.slots = Slots(limit)
        super().__init__(layer_class_to_replicate=partial(SlotLayer, self.slots))  # type: ignore[arg-type]

    def select(self, stay: torch.Tensor) -> None:
        """Keep only the rows at indices `stay` [R']."""
        self.slots.rows = len(stay)
        self._change(lambda stored: stored.index_select(0, stay.to(stored.device)))

    def keep(self, kept: torch.Tensor) -> None:
        """Keep only the slots `kept` [n] of all rows, in that order."""
        self._change(lambda stored: stored.index_select(2, kept.to(stored.device)))
        self.slots.start = self.slots.extent = len(kept)

    def widen(self, count: int) -> None:
        """Put `count` slots before the first of all rows."""
        self._change(lambda stored: torch.nn.functional.pad(stored, (0, 0, count, 0)))
        self.slots.limit += count

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put other tensors in the places of all keys and values; from then on a forward is told what is filled."""
        self.slots.spare.clear()
        for layer in self._filled():
            layer.keys, layer.values = change(layer.keys), change(layer.values)

    def _filled(self) -> list[Any]:
        """The layers that hold something: one that shares the keys of another is never written to."""
        return [layer for layer in self.layers if layer.is_initialized]  # type: ignore[union-attr]

    def take(self, other: "SlotCache", rows: list[int], start: int, end: int) -> None:
        """Copy the first slots of another cache, a row for each of `rows`, to the slots from `start` to `end`."""
        for layer, read in zip(self._filled(), other._filled(), strict=True):
            index = torch.tensor(rows).to(layer.keys.device, non_blocking=True)
            layer.keys[index, :, start:end] = read.keys[:, :, : end - start]
            layer.values[index, :, start:end] = read.values[:, :, : end - start]

    def begin(self, other: "SlotCache", rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write into the first slots what another cache has in its rows [R] at slots [R, n]."""
        for number, layer in enumerate(columns_of(other)):
            if other.layers[number].is_initialized:  # type: ignore[union-attr]
                keys, values = (_at(stored, rows, slots) for stored in layer)
                self.update(keys, values, number)

    def roll(self, source: torch.Tensor) -> None:
        """Fill the first n slots of each row from its slots `source` [R, n], by one read and one write."""
        for layer in self._filled():
            layer.keys, layer.values = self._rolled(layer.keys, source), self._rolled(layer.values, source)

    def _rolled(self, stored: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        index = source.to(stored.device)[:, None, :, None].expand(-1, stored.shape[1], -1, stored.shape[3])
        key = (stored.shape, stored.dtype, stored.device)
        target = self.slots.spare.pop(key, None)
        target = torch.empty_like(stored) if target is None else target
        torch.gather(stored, 2, index, out=target[:, :, : source.shape[1]])
        self.slots.spare[key] = stored
        return target

    def row(self, index: int, slots: torch.Tensor) -> Columns:
        """Keys and values [H, n, D] of one row at slots [n], made on the device; zeros where a slot is negative."""

        def found(stored: torch.Tensor) -> torch.Tensor:
            there = slots.to(stored.device)
            return stored[index].index_select(1, there.clamp(min=0)).masked_fill((there < 0)[:, None], 0)

        return [(found(layer.keys), found(layer.values)) for layer in self._filled()]


def _at(stored: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[R, H, n, D] of stored rows [R] at slots [R, n]."""
    return stored[rows[:, None].to(stored.device), :, slots.to(stored.device)].transpose(1, 2)


def select_rows(cache: Cache, stay: torch.Tensor) -> None:
    """Keep only the rows at indices `stay` [R'], in ascending order, of any cache that can be reordered."""
    if isinstance(cache, SlotCache):
        cache.select(stay)
    elif isinstance(cache, EncoderDecoderCache):
        select_rows(cache.self_attention_cache, stay)
        select_rows(cache.cross_attention_cache, stay)
    elif type(cache) is DynamicCache:
        cache.reorder_cache(stay)  # type: ignore[arg-type]
    else:  # a model's own kind, which knows what else it holds
        cache.batch_select_indices(stay)


def has_columns(cache: Cache) -> bool:
    """Whether a cache is empty, or each of its layers has the keys and values of all tokens."""
    text = self_attention(cache)
    keys = [getattr(layer, "keys", None) for layer in text.layers]
    lengths = {None if x is None else x.shape[2] for x in keys}
    return lengths <= {None} or lengths == {text.get_seq_length()}


def tokens_held(cache: Cache) -> int:
    """How many tokens a cache has read; 0 where it has recurrent states alone, which do not count them."""
    try:
        return cache.get_seq_length()
    except ValueError:
        return 0


def cache_name(kwargs: Collection[str]) -> str:
    """The name of the cache among inputs that `generate` has prepared."""
    return "cache_params" if "cache_params" in kwargs else CACHE


def self_attention(cache: Cache) -> Cache:
    """The part of a cache that grows with the text."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def with_slots(cache: Cache, max_length: int = 0) -> Cache:
    """A cache for rows of `max_length` tokens in slots, with a copy of what one holds; keys of an encoder stay.

    Raises:
        ValueError: if a layer has dropped columns (a full sliding window), or keeps more than keys and values.
    """
    text, slots = self_attention(cache), SlotCache(max_length + MARGIN)
    if text.layers and text.get_seq_length():
        told = f"{CACHE} is a {type(text).__name__} without the keys of all its tokens"
        require(has_columns(text), f"{told}; pass the whole text as input_ids, and leave it out.")
        for number, (keys, values) in enumerate(columns_of(text)):
            slots.update(keys, values, number)
    return EncoderDecoderCache(slots, own_copy(cache).cross_attention_cache) if text is not cache else slots


def own_copy(cache: Any) -> Any:
    """A copy of a cache that the user has passed, whose rows and columns stay as they are; any other as it is."""
    return copy.deepcopy(cache) if getattr(cache, "_is_user_defined", False) else cache


def columns_of(cache: Cache) -> Columns:
    """Keys and values [R, H, n, D] of a cache of transformers."""
    return [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[misc, union-attr]


def assemble(rows: dict[int, Columns], ends: list[int], length: int, crossed: Columns) -> Cache:
    """A `DynamicCache`, or an `EncoderDecoderCache` of two, which the next call can continue.

    Of each row's keys and values [H, n, D] the first `ends` are valid; then there are zeros up to `length`, where
    `generate` would have keys of pads. Those of cross-attention are `crossed`, empty without an encoder.
    """
    cache, encoded = DynamicCache(), DynamicCache()
    for number, layer in enumerate(rows[0]):
        keys, values = (x.new_zeros(len(ends), x.shape[0], length, x.shape[2]) for x in layer)
        for row, columns in rows.items():
            end = min(ends[row], length)
            keys[row, :, :end], values[row, :, :end] = (x[:, :end] for x in columns[number])
        cache.update(keys, values, number)
    for number, (keys, values) in enumerate(crossed):
        encoded.update(keys, values, number)
    return EncoderDecoderCache(cache, encoded) if crossed else cache


def fill(user_cache: Cache, past: Cache | None) -> Cache | None:
    """Fill the user's own cache as `generate` would, and return it; without a `past`, warn and return None."""
    if past is None:
        told = (
            f"{CACHE}= was not filled with this text: its rows ended at different steps, and its states or windows "
            "cannot be put together from them, or it is spread over ranks; pass the whole text without it in the next "
            "turn."
        )
        warnings.warn(told, UserWarning, stacklevel=2)
        return None
    vars(user_cache).update(vars(past))
    return user_cache
