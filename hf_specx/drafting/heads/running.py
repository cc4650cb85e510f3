"""Runs what the layers of a head do in a call over buffers of fixed size; compiled, as the forwards of models are."""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.models.compiled_forwards import CompiledForwards, capacity_bucket, length_bucket, regions_of, row_bucket
from hf_specx.models.slots import MARGIN, Columns, Pool, copy_buffers

from .body import Body
from .layers import Entries, Places, Rotary


class Layers:
    """The layers of a head for one call.

    Args:
        rows: of the call.
        room: slots that the text of each row takes, as far as is known.
        model: the head, if its layers are compiled; those that read prompts are not.

    Attributes:
        rows: of the buffers of keys and values; the first are those of the decoding ones.
        usual: candidates of the round with most.
    """

    def __init__(self, body: Body, rows: int, room: int, model: PreTrainedModel | None = None):
        weight, config = next(body.parameters()), body.config
        self.body, self.room, self.usual = body, room + MARGIN, 0
        self.rotary = Rotary(config, weight.device)
        self.regions: CompiledForwards | None = None if model is None else regions_of(model, weight.device)
        self.compiled_before = 0 if self.regions is None else self.regions.compilations
        self.rows = rows if self.regions is None else row_bucket(rows)
        sizes, layers = (config.num_key_value_heads, 0, config.head_dim), config.num_hidden_layers
        self.buffers: Columns = [2 * (weight.new_zeros(1, *sizes),)] * (layers if body.has_keys else 0)

    @property
    def capacity(self) -> int:
        """Slots of the buffers; 0 until something is read, and for a head without keys."""
        return self.buffers[0][0].shape[2] if self.buffers else 0

    @property
    def compilations(self) -> int:
        """Forwards that were compiled since this call began."""
        return 0 if self.regions is None else self.regions.compilations - self.compiled_before

    def number(self, number: int) -> int:
        """Candidates that are drafted where so many are wanted; compiled, those of the round with most."""
        self.usual = max(self.usual, number)
        return number if self.regions is None else self.usual

    def width(self, width: int) -> int:
        """True entries of a forward where rows have up to `width`; compiled, as many as after a round, filled up."""
        return width if self.regions is None else length_bucket(max(width, self.usual + 1))

    def gather_rows(self, stay: torch.Tensor) -> None:
        """Keep only the rows at indices `stay` [R']."""
        self.rows = len(stay) if self.regions is None else self.rows
        if self.capacity:
            self._move(self.capacity, stay)

    def _move(self, capacity: int, index: torch.Tensor | None = None) -> None:
        """Have the rows at `index`, or all, in buffers of this size."""
        before = self.buffers
        if before[0][0].shape[::2] != (self.rows, capacity):
            pool = Pool() if self.regions is None else self.regions.pool
            self.buffers = pool.allocate(self, self.rows, [capacity] * len(before), before)
        copy_buffers(before, self.buffers, index)

    def __call__(self, part: str, places: Places | None, *inputs: Any) -> Any:
        """What this method of the body gives, for entries at these places if it asks for them."""
        if places is not None and self.buffers and self.capacity < places.extent:
            self._move(capacity_bucket(max(places.extent, self.room)))
        if self.regions is not None and part != "read":
            return self._compiled(self.regions, part, places, *inputs)
        return head_forward(self.body, part, self.rotary, self.buffers, places, *inputs)

    def _compiled(self, regions: CompiledForwards, part: str, places: Places | None, *inputs: Any) -> tuple[Any, ...]:
        count, before = len(inputs[0] if places is None else places.slots), self.rows
        self.rows = rows = regions.rows(count, before, self.capacity)
        if rows < before and self.buffers:
            self._move(self.capacity)
        sizes: tuple[Any, ...] = ()
        if places is not None:
            sizes = self.capacity or capacity_bucket(places.extent), places.block
            places = Places(placed(places.slots, rows), placed(places.positions, rows), *sizes)
        given = [placed(x, rows) if isinstance(x, torch.Tensor) else x for x in inputs]
        shapes = (tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in given)
        size = (part, rows, *sizes, *shapes)
        found = regions.run(head_forward, size, self.body, part, self.rotary, self.buffers, places, *given)
        return tuple(x if x is None or rows == count else x[:count] for x in found)


def placed(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Values [R, ...] with zeros for idle rows after them."""
    more = rows - len(values)
    return torch.cat([values, values.new_zeros(more, *values.shape[1:])]) if more else values.contiguous()


def head_forward(
    model: Body, part: str, rotary: Rotary, buffers: Columns, places: Places | None, *inputs: Any
) -> tuple[Any, ...]:
    """A method of the layers over buffers of fixed size; no value in it has to be known before it runs."""
    entries = () if places is None else (Entries(model.config, rotary, buffers, places),)
    return getattr(model, part)(*entries, *inputs)
