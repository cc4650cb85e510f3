"""Layers of a key-value cache whose slots are written in place: of the whole text, or of a sliding window.

What lies after the end of a row is hidden by the mask and overwritten later, so a rollback only changes lengths. Slots
are indices into the buffers of a layer; in a layer of the whole text, slots and columns of the text are the same.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin

from .attention import columns_of_ring


MAX_COPIED_BYTES = 1 << 21  # of keys: up to here a CPU is faster with a copy than with a part of a larger buffer


class Slots:
    """Where the next forward writes keys and values: one object, which all layers of a cache share.

    Attributes:
        start: the first slot to write, if all rows write the same consecutive slots.
        index: row indices [R, 1] and slots [R, q] of the tokens, if rows differ; else None.
        kv_length: how many leading slots attention sees; 0 while prompts are computed, when each layer writes after
            what it holds.
        rows: how many rows the buffers are made for; 0 is as many as are written first.
        limit: slots that will be needed as far as is known; buffers double up to it, and again beyond it.
        ring: how many slots layers with a window have at most; 0 if no layer has a window.
        has_lost: whether the text has outgrown that, so that such layers have lost its first columns.
        spare: a buffer to shift into, by shape, dtype and device.
    """

    def __init__(self, limit: int = 0, ring: int = 0) -> None:
        self.start = self.kv_length = self.rows = 0
        self.limit, self.ring, self.has_lost = limit, ring, False
        self.index: tuple[torch.Tensor, torch.Tensor] | None = None
        self.spare: dict[tuple[Any, ...], torch.Tensor] = {}

    def set_write_slots(
        self, index: torch.Tensor | None, start: int, kv_length: int, rows: torch.Tensor | None = None
    ) -> None:
        """Let the next forward write to slots `index` [R, q] of `rows` [R], by default of all; without `index` from
        `start` on in all rows.
        """
        self.start, self.kv_length, self.index = start, kv_length, None
        if index is not None:
            rows = torch.arange(len(index), device=index.device) if rows is None else rows
            self.index = rows[:, None], index


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [R, H, capacity, D], written in place."""

    is_sliding = False
    num_columns = 0  # columns of the text that were written, also those that a window has lost since
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, slots: Slots, keys: torch.Tensor | None = None, values: torch.Tensor | None = None):
        """Buffers given here never grow, and all of their slots are visible, as compiled forwards need it."""
        super().__init__()
        self.slots = slots
        if keys is not None and values is not None:
            self.keys, self.values = keys, values
            self.is_initialized = self.is_compileable = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows = self.slots.rows or len(key_states)
        empty = (states[:1, :, :0].expand(rows, -1, -1, -1) for states in (key_states, value_states))
        self.keys, self.values = (self._grown(states, 0) for states in empty)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write key and value states [R, H, q, D] and return the visible slots [R, H, kv_length, D] of these rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        self.num_columns = end = self.slots.kv_length or self.num_columns + count
        before = end - count
        appends = self.slots.index is None and self.keys.shape[2] >= before
        appends = appends and key_states.device.type == "cpu" and not torch.compiler.is_compiling()
        if appends and key_states.nbytes // count * end <= MAX_COPIED_BYTES:
            if self.keys.shape[2] > before:
                self.keys, self.values = self.keys[:, :, :before], self.values[:, :, :before]
            self.keys, self.values = torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)
            return self.keys, self.values
        if self.keys.shape[2] < end:
            self.keys, self.values = self._grown(self.keys, end), self._grown(self.values, end)
        if self.slots.index is None:
            self.keys[:, :, before:end] = key_states
            self.values[:, :, before:end] = value_states
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

    def write_rows(self, other: "SlotLayer", rows: torch.Tensor, start: int, end: int) -> None:
        """Write the first slots of another layer to `rows` [r], and there to the slots from `start` to `end`."""
        self.keys[rows, :, start:end] = other.keys[:, :, : end - start]
        self.values[rows, :, start:end] = other.values[:, :, : end - start]

    def move(self, rows: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Write to the slots `target` [n] of rows [n] what their slots `source` [n] hold."""
        rows, source, target = (x.to(self.keys.device) for x in (rows, source, target))
        for stored in (self.keys, self.values):
            stored[rows, :, target] = stored[rows, :, source]  # all are read before the first is written

    def widen(self, count: int) -> None:
        """Put `count` slots before the first of all rows."""
        self.keys, self.values = (nn.functional.pad(x, (0, 0, count, 0)) for x in (self.keys, self.values))

    def shift(self, source: torch.Tensor) -> None:
        """Write to the first n slots of each row what its slots `source` [R, n] hold, by one read and one write."""
        self.keys, self.values = self._shifted(self.keys, source), self._shifted(self.values, source)

    def _shifted(self, stored: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        index = source.to(stored.device)[:, None, :, None].expand(-1, stored.shape[1], -1, stored.shape[3])
        key = (stored.shape, stored.dtype, stored.device)
        target = self.slots.spare.pop(key, None)
        target = torch.empty_like(stored) if target is None else target
        torch.gather(stored, 2, index, out=target[:, :, : source.shape[1]])
        self.slots.spare[key] = stored
        return target

    def _gather_slots(self, source: torch.Tensor) -> None:
        """Keep only the slots `source` [R, n] of each row, in that order."""
        index = source.to(self.keys.device)[:, None, :, None]
        self.keys, self.values = (
            x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (self.keys, self.values)
        )

    def read_row(self, index: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [H, n, D] of one row at slots [n]; zeros where a slot is negative."""
        slots = slots.to(self.keys.device)
        absent = (slots < 0)[:, None]
        keys, values = (
            x[index].index_select(1, slots.clamp(min=0)).masked_fill(absent, 0) for x in (self.keys, self.values)
        )
        return keys, values

    def in_text_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, H, n, D] of the n last columns of the text, as many as the layer still has, in order."""
        return self.keys[:, :, : self.num_columns], self.values[:, :, : self.num_columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.kv_length or self.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.slots.start if self.slots.kv_length else self.num_columns

    def get_max_length(self) -> int:
        return -1


class TailLayer(SlotLayer):
    """The last `ring` columns in their order: a layer with a window in a layout whose rows end in the same slot."""

    is_sliding = True

    def _num_columns_before(self) -> int:
        """How many of the columns before the next tokens the layer still has."""
        return max(0, self.keys.shape[2] + self.get_seq_length() - self.num_columns)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = key_states.shape[2]
        if self.is_initialized:
            before = self._num_columns_before()
            key_states = torch.cat([self.keys[:, :, :before], key_states], 2)
            value_states = torch.cat([self.values[:, :, :before], value_states], 2)
        self.num_columns, self.is_initialized = self.slots.kv_length or self.num_columns + count, True
        last = (x[:, :, -self.slots.ring :] for x in (key_states, value_states))
        self.keys, self.values = (
            last if self.slots.kv_length else (x.clone() for x in last)
        )  # a view keeps all prompts
        self.slots.has_lost |= self.num_columns > self.keys.shape[2]
        return key_states, value_states

    def shift(self, source: torch.Tensor) -> None:
        size = self.keys.shape[2]
        first = self.num_columns - size
        self._gather_slots((source[:, -size:] - first).clamp(0, size - 1))
        self.num_columns = source.shape[1]

    def read_row(self, index: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().read_row(index, slots - self.num_columns + self.keys.shape[2])

    def in_text_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        before = self._num_columns_before()
        return before + query_length, self.get_seq_length() - before


class RingLayer(SlotLayer):
    """A ring buffer for a layer with a window: column c of the text is in slot c modulo `ring`.

    It is as long as the window and all that a round feeds. So a column that was overwritten, even if by a candidate
    that was rejected since, lies before the window of all that is fed from then on.
    """

    is_sliding = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ring, count, kv_length = self.slots.ring, key_states.shape[2], self.slots.kv_length
        if (kv_length or self.num_columns + count) <= ring:
            return super().update(key_states, value_states)
        if not kv_length:
            return self._append_prompts(key_states, value_states)
        self._extend_to_ring()
        self.num_columns = kv_length
        rows: Any = slice(None)
        if self.slots.index is None:
            columns = torch.arange(kv_length - count, kv_length, device=self.keys.device)
        else:
            rows, columns = (x.to(self.keys.device) for x in self.slots.index)
            key_states, value_states = key_states.transpose(1, 2), value_states.transpose(1, 2)
        self.keys[rows, :, columns % ring] = key_states
        self.values[rows, :, columns % ring] = value_states
        return self.keys, self.values

    def _append_prompts(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a part of the prompts; returns what it attends to: what is left of earlier parts, and itself."""
        ring, end = self.slots.ring, self.num_columns + keys.shape[2]
        self.slots.has_lost = True
        if self.num_columns:
            keys_before, values_before = self.in_text_order()
            keys, values = torch.cat([keys_before, keys], 2), torch.cat([values_before, values], 2)
        self.keys, self.values = (x[:, :, -ring:].roll(end % ring, 2) for x in (keys, values))
        self.num_columns, self.is_initialized = end, True
        return keys, values

    def in_text_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        count, ring = self.num_columns, self.slots.ring
        if count > ring:
            return self.keys.roll(-(count % ring), 2), self.values.roll(-(count % ring), 2)
        return self.keys[:, :, :count], self.values[:, :, :count]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        before = min(self.num_columns, self.slots.ring)
        return self.slots.kv_length or before + query_length, self.num_columns - before

    def _extend_to_ring(self) -> None:
        """Grow the buffer to all `ring` slots, as the text outgrows them from now on."""
        self.slots.has_lost = True
        lacking = self.slots.ring - self.keys.shape[2]
        if lacking:
            self.keys, self.values = (nn.functional.pad(x, (0, 0, 0, lacking)) for x in (self.keys, self.values))

    def write_rows(self, other: SlotLayer, rows: torch.Tensor, start: int, end: int) -> None:
        """As in `SlotLayer`, from a layer with equally many `ring` slots."""
        ring, count = self.slots.ring, end - start
        if end > ring:
            self._extend_to_ring()
        columns = torch.arange(max(0, count - ring), count, device=rows.device)
        rows = rows[:, None]
        source, target = columns % ring, (start + columns) % ring
        self.keys[rows, :, target] = other.keys[:, :, source].transpose(1, 2)
        self.values[rows, :, target] = other.values[:, :, source].transpose(1, 2)

    def widen(self, count: int) -> None:
        self.num_columns += count
        if self.num_columns <= self.slots.ring:
            super().widen(count)
            return
        self._extend_to_ring()
        self.keys, self.values = self.keys.roll(count, 2), self.values.roll(count, 2)

    def move(self, rows: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        super().move(rows, source % self.slots.ring, target % self.slots.ring)

    def enlarge(self, ring: int, newest: torch.Tensor) -> None:
        """Move to a longer ring buffer of `ring` slots; `newest` [R, 1] are the newest columns to keep."""
        if self.keys.shape[2] < self.slots.ring:
            return
        self._gather_slots(columns_of_ring(newest.to(self.keys.device), ring) % self.slots.ring)

    def read_row(self, index: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `SlotLayer`, for `slots` that are all columns from 0 on; lost ones give zeros."""
        is_lost = slots < len(slots) - self.slots.ring
        return super().read_row(index, (slots % self.slots.ring).masked_fill(is_lost, -1))
