"""The ragged layout: each token stays in the slot of its column, and a mask by position hides the rest."""

import contextlib
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import utils

from hf_specx.common.batch import Batch

from .attention import SLIDING, Mask, Masks, columns_of_ring, grouped_queries
from .decoder import Decoder
from .prompts import Prompt, prepare
from .slots import MARGIN, Columns, SlotCache, SlotLayer, Slots, with_slots


DROPPED = set(getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))  # fed with prompts only


class RaggedDecoder(Decoder):
    """Rows of unequal length side by side; the model must take positions and 4D masks as given."""

    def __init__(self, prompt: Prompt, known_ids: int | None = None):
        super().__init__(prompt, known_ids)
        self.masks = Masks(self.model)
        self.cache = with_slots(self.cache, self._slot_cache(prompt.input_ids.shape[1] + prompt.longest + MARGIN))
        assert isinstance(self.cache, SlotCache)

    def _slot_cache(self, limit: int) -> SlotCache:
        """An empty cache in which layers with a window keep that alone, and what a round may feed."""
        window, layers = self.masks.longest_window, self.masks.layers
        if not window:
            return SlotCache(limit)

        def new_layer(slots: Slots, number: int) -> SlotLayer:
            kind = layers[number] if layers else SLIDING
            return RingLayer(slots) if kind in self.masks.windows else SlotLayer(slots)

        return SlotCache(limit, window + MARGIN, new_layer)

    def _empty_cache(self, length: int) -> Cache:
        ring = self.cache.slots.ring
        return DynamicCache(config=self.model.config) if 0 < ring < length else super()._empty_cache(length)

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        count, counts = tokens.shape[1], [batch.counts[row] for row in batch.rows]
        emitted = batch.columns(ahead - count, count) - batch.width  # [R, q], those before each token
        longest, even = max(counts), len(set(counts)) == 1
        if 1 < count - ahead > batch.shortest():  # a row with fewer tokens is fed its first one again and again
            emitted, even = emitted.maximum((batch.starts - batch.width)[batch.index, None]), False
        slots, extent = (self.width + emitted).to(self.device), self.width + longest + ahead
        if 0 < self.cache.slots.ring < (ring := self.masks.longest_window + count + ahead):
            self._enlarge(ring, slots[:, :1] - 1)
        self.cache.slots.aim(None if even else slots, extent - count, extent)
        given = self._others(count) if self.per_row else {}
        if "logits_to_keep" in self.parameters:
            given["logits_to_keep"] = keep
        positions = self._positions(batch, emitted, longest + ahead)
        if positions is not None and "position_ids" in self.parameters:
            given["position_ids"] = positions.to(self.device)
        mask = self._mask(batch, slots, extent, even)
        with contextlib.nullcontext() if mask is None else grouped_queries():
            output = self.model(
                input_ids=tokens.to(self.device),
                attention_mask=mask,
                **{self.cache_name: self.cache},
                use_cache=True,
                return_dict=True,
                **given,
            )
        return output.logits[:, -keep:]

    def _enlarge(self, ring: int, newest: torch.Tensor) -> None:
        """Have rings of so many slots, where the newest columns that are needed have the numbers [R, 1]."""
        for layer in self.cache.layers:
            if isinstance(layer, RingLayer) and layer.is_initialized:
                layer.enlarge(ring, newest)
        self.cache.slots.ring = ring

    def _mask(self, batch: Batch, slots: torch.Tensor, extent: int, even: bool) -> Mask | None:
        """None if one token of each row sees all that the cache holds; `even` says whether rows are equally long."""
        pads = holes = None
        if self.holes is not None:
            holes = nn.functional.pad(self.holes[batch.index], (0, extent - self.width)).to(self.device)
        if holes is not None or max([self.padding[row] for row in batch.rows]):
            pads = self.pads[batch.index].to(self.device)
        elif even and slots.shape[1] == 1 and self.masks.only_causal:
            return None
        return self.masks(slots, pads, extent, holes, self.cache.slots.ring)

    def _others(self, count: int) -> dict[str, Any]:
        """What else the forward is given for each row, as `generate` gives it to the next tokens."""
        names = self.per_row & self.parameters.keys() - DROPPED
        given = {name: value for name, value in self.kwargs.items() if name in names}
        return given | self._token_types(count)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        if batch.width > self.width:
            self.widen(batch.width - self.width)
        index = torch.tensor(rows).to(batch.ids.device, non_blocking=True)
        width = max(batch.prompt_lengths[row] for row in rows)
        ids = batch.ids[index, batch.width - width : batch.width]
        mask = torch.arange(batch.width - width, batch.width, device=index.device) >= batch.starts[index, None]
        given = {"input_ids": ids, "attention_mask": mask.long()}
        prompt = prepare(self.model, self.prompt.max_new_tokens, given)
        prompt.gives_hidden, prompt.places = self.prompt.gives_hidden, self.prompt.places
        fresh = RaggedDecoder(prompt, self.known_ids)
        fresh.cache = self._slot_cache(width)
        fresh.read()
        self.prompt_hidden = fresh.prompt_hidden
        self.opening, self.after_prompt = rows == list(range(len(batch.counts))), fresh.after_prompt
        self.cache.slots.limit = self.width + max(batch.limits) + MARGIN
        self.cache.take(fresh.cache, [batch.rows.index(row) for row in rows], self.width - width, self.width)
        self.pads = self.pads.index_copy(0, index, fresh.pads + self.width - width)
        for row, number in zip(rows, fresh.padding, strict=True):
            self.held[row], self.valid[row], self.padding[row] = 0, 0, number + self.width - width
        if self.holes is not None:
            self.holes = self.holes.index_fill(0, index, False)
        if self.first_position is not None and fresh.first_position is not None:
            self.first_position = self.first_position.index_copy(-2, index, fresh.first_position)

    def widen(self, count: int) -> None:
        """Put `count` columns of pads before the prompts of all rows."""
        self._widen_cache(count)
        self.width += count
        self.pads = self.pads + count
        self.padding = [number + count for number in self.padding]
        if self.holes is not None:
            self.holes = nn.functional.pad(self.holes, (count, 0))

    def _widen_cache(self, count: int) -> None:
        self.cache.widen(count)

    def columns(self, index: int, row: int) -> Columns:
        return self.cache.row(index, torch.arange(self.width + self.held[row], device=self.device))


class RingLayer(SlotLayer):
    """Keys and values of the last columns alone, for a layer with a window: each in its number modulo `ring`.

    A ring is as long as the window and all that a round feeds. So a column whose slot has gone to another, be it to a
    candidate that was rejected since, lies before the window of all that is fed from then on.
    """

    is_sliding = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ring, count, extent = self.slots.ring, key_states.shape[2], self.slots.extent
        if (extent or self.held + count) <= ring:
            return super().update(key_states, value_states)
        if not extent:
            return self._read(key_states, value_states)
        self._fit()
        rows: Any = slice(None)
        columns, self.held = torch.arange(extent - count, extent, device=self.keys.device), extent
        if self.slots.index is not None:
            rows, columns = (x.to(self.keys.device) for x in self.slots.index)
            key_states, value_states = key_states.transpose(1, 2), value_states.transpose(1, 2)
        self.keys[rows, :, columns % ring] = key_states
        self.values[rows, :, columns % ring] = value_states
        return self.keys, self.values

    def _read(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take up a part of the prompts, which sees what is still held of the parts before."""
        ring, held, self.held = self.slots.ring, self.held, self.held + keys.shape[2]
        if held:
            before = (x.roll(-(held % ring), 2) if held > ring else x[:, :, :held] for x in (self.keys, self.values))
            keys, values = (torch.cat(both, 2) for both in zip(before, (keys, values), strict=True))
        self.keys, self.values = (x[:, :, -ring:].roll(self.held % ring, 2) for x in (keys, values))
        self.is_initialized = True
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        known = min(self.held, self.slots.ring)
        return self.slots.extent or known + query_length, self.held - known

    def _fit(self) -> None:
        """Have a buffer of a whole ring."""
        lacking = self.slots.ring - self.keys.shape[2]
        if lacking:
            self.keys, self.values = (nn.functional.pad(x, (0, 0, 0, lacking)) for x in (self.keys, self.values))

    def take(self, other: SlotLayer, rows: torch.Tensor, start: int, end: int) -> None:
        if end <= min(self.slots.ring, other.slots.ring):
            super().take(other, rows, start, end)
            return
        self._fit()
        of_other, count = other.slots.ring, end - start
        columns = torch.arange(max(0, count - of_other), count, device=rows.device)
        there, here = (rows[:, None], (start + columns) % self.slots.ring), columns % of_other
        self.keys[there[0], :, there[1]] = other.keys[:, :, here].transpose(1, 2)
        self.values[there[0], :, there[1]] = other.values[:, :, here].transpose(1, 2)

    def widen(self, count: int) -> None:
        self.held += count
        if self.held <= self.slots.ring:
            super().widen(count)
            return
        self._fit()
        self.keys, self.values = self.keys.roll(count, 2), self.values.roll(count, 2)

    def enlarge(self, ring: int, newest: torch.Tensor) -> None:
        """Move to a longer ring, where the newest columns that are needed have the numbers [R, 1]."""
        if self.keys.shape[2] < self.slots.ring:
            return
        columns = columns_of_ring(newest.to(self.keys.device), ring) % self.slots.ring
        index = columns[:, None, :, None]
        self.keys, self.values = (
            x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (self.keys, self.values)
        )

    def row(self, index: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See there; slots are the numbers of all columns from 0 on, and those that are gone give zeros."""
        ring = self.slots.ring
        if len(slots) > ring:
            slots = torch.cat([slots.new_full((len(slots) - ring,), -1), slots[-ring:] % ring])
        return super().row(index, slots)
