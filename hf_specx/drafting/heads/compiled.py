"""What the layers of a head do in a round, compiled: over buffers of fixed size, as the forwards of models are."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_specx.models.layers import SlotLayer, Slots
from hf_specx.models.regions import capacity_bucket, length_bucket, regions_of, row_bucket
from hf_specx.models.slots import MARGIN, Columns, SlotCache, move

from .body import Body
from .layers import Entries, Rotary


class CompiledBody:
    """The layers of a head for one call. Prompts are read by forwards that are not compiled.

    Args:
        model: the head.
        cache: where its keys are, in buffers of which the first rows are the decoding ones.
        rotary: of its positions.
        room: slots that the text of each row takes, as far as is known.
    """

    def __init__(self, model: PreTrainedModel, body: Body, cache: SlotCache, rotary: Rotary, room: int):
        weight = next(body.parameters())
        self.model, self.body, self.cache, self.rotary, self.room = model, body, cache, rotary, room + MARGIN
        self.regions = regions_of(model, weight.device)
        self.compiled_before, self.usual = self.regions.compilations, 0
        sizes, layers = (body.config.num_key_value_heads, 0, body.config.head_dim), body.config.num_hidden_layers
        self.buffers: Columns = [2 * (weight.new_zeros(1, *sizes),)] * (layers if body.has_keys else 0)

    @property
    def capacity(self) -> int:
        """Slots of the buffers; 0 until something is read, and for a head without keys."""
        return self.buffers[0][0].shape[2] if self.buffers else 0

    @property
    def compilations(self) -> int:
        """Forwards that were compiled since this call began."""
        return self.regions.compilations - self.compiled_before

    def number(self, number: int) -> int:
        """Candidates that are drafted where so many are wanted: those of the round with most."""
        self.usual = max(self.usual, number)
        return self.usual

    def width(self, width: int) -> int:
        """True entries of a forward where rows have up to `width`: as many as after a round, filled up."""
        return length_bucket(max(width, self.usual + 1))

    def select(self, stay: torch.Tensor) -> None:
        """Keep only the rows at indices `stay` [R']."""
        self.cache.slots.rows = len(stay)
        if self.capacity:
            self._move(row_bucket(len(stay)), self.capacity, stay)

    def reserve(self, extent: int) -> int:
        """Have buffers of so many slots or more; how many the coming forward sees."""
        if self.buffers and self.capacity < extent:
            self._move(row_bucket(self.cache.slots.rows), capacity_bucket(max(extent, self.room)))
        return self.capacity or capacity_bucket(extent)

    def _move(self, rows: int, capacity: int, index: torch.Tensor | None = None) -> None:
        """Have the rows at `index`, or all, in buffers of this size."""
        before = self.buffers
        if before[0][0].shape[::2] != (rows, capacity):
            self.buffers = self.regions.pool.take(self, rows, [capacity] * len(before), before)
            self.cache.layers = [SlotLayer(self.cache.slots, keys, values) for keys, values in self.buffers]
        move(before, self.buffers, index)

    def __call__(self, part: str, entries: tuple[Any, ...] | None, *inputs: Any) -> tuple[Any, ...]:
        """What this method of the body gives, for entries by their slots and positions [R, q], extent and block."""
        first = inputs[0] if entries is None else entries[0]
        count, rows = len(first), row_bucket(len(first))
        sizes: tuple[Any, ...] = ()
        if entries is not None:
            slots, positions, extent, block = entries
            capacity = self.reserve(extent)
            sizes, entries = (capacity, block), (placed(slots, rows), placed(positions, rows), capacity, block)
        given = [placed(x, rows) if isinstance(x, torch.Tensor) else x for x in inputs]
        shapes = (tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in given)
        size = (part, rows, *sizes, *shapes)
        found = self.regions.run(head_forward, size, self.body, part, self.rotary, self.buffers, entries, *given)
        return tuple(x if x is None or rows == count else x[:count] for x in found)


def placed(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Values [R, ...] with zeros for idle rows after them."""
    more = rows - len(values)
    return torch.cat([values, values.new_zeros(more, *values.shape[1:])]) if more else values.contiguous()


def head_forward(
    model: Body, part: str, rotary: Rotary, buffers: Columns, given: tuple[Any, ...] | None, *inputs: Any
) -> tuple[Any, ...]:
    """A method of the layers over buffers of fixed size; no value in it has to be known before it runs."""
    if given is None:
        return getattr(model, part)(*inputs)
    slots, positions, extent, block = given
    places = Slots()
    places.aim(slots, 0, extent)
    cache = Cache(layers=[SlotLayer(places, keys, values) for keys, values in buffers])
    entries = Entries(model.config, rotary, cache, slots, positions, extent, block)
    return getattr(model, part)(entries, *inputs)
