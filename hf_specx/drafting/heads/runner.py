"""Runs what the layers of a head do in a call over buffers of fixed size; compiled, as the forwards of models are."""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.models.compiled_forwards import (
    CompiledForwards,
    capacity_bucket,
    compiled_forwards_of,
    length_bucket,
    row_bucket,
)
from hf_specx.models.slots import MARGIN, LayersKeysValues, Pool, copy_buffers

from .layers import HeadCache, Rotary, SlotMapping
from .network import HeadNetwork


class HeadRunner:
    """The layers of a head for one call, with their keys and values.

    Args:
        rows: of the call.
        expected_slots: that the text of each row takes, as far as is known.
        model: the head, if its layers are compiled; those that read prompts are not.

    Attributes:
        rows: of the buffers of keys and values; the decoding ones come first.
        most_candidates: of a round so far.
    """

    def __init__(self, network: HeadNetwork, rows: int, expected_slots: int, model: PreTrainedModel | None = None):
        weight, config = next(network.parameters()), network.config
        self.network = network
        self.expected_slots = expected_slots + MARGIN
        self.most_candidates = 0
        self.rotary = Rotary(config, weight.device)
        self.forwards: CompiledForwards | None = None if model is None else compiled_forwards_of(model, weight.device)
        self.compiled_before = 0 if self.forwards is None else self.forwards.compilations
        self.rows = rows if self.forwards is None else row_bucket(rows)
        num_layers = config.num_hidden_layers if network.has_attention else 0
        empty = weight.new_zeros(1, config.num_key_value_heads, 0, config.head_dim)
        self.buffers: LayersKeysValues = [(empty, empty)] * num_layers

    @property
    def capacity(self) -> int:
        """Slots of the buffers; 0 until something is read, and for a head without attention."""
        return self.buffers[0][0].shape[2] if self.buffers else 0

    @property
    def compilations(self) -> int:
        """Forwards that were compiled since this call began."""
        return 0 if self.forwards is None else self.forwards.compilations - self.compiled_before

    def padded_candidates(self, number: int) -> int:
        """Candidates that are drafted where so many are wanted; compiled, those of the round with most."""
        self.most_candidates = max(self.most_candidates, number)
        return number if self.forwards is None else self.most_candidates

    def padded_width(self, width: int) -> int:
        """Context entries of a forward where rows have up to `width`; compiled, as after a round, padded."""
        return width if self.forwards is None else length_bucket(max(width, self.most_candidates + 1))

    def gather_rows(self, indices: torch.Tensor) -> None:
        """Have the rows at `indices` [R'], which may be the same for rows that are written later."""
        self.rows = len(indices) if self.forwards is None else max(self.rows, row_bucket(len(indices)))
        if self.capacity:
            self._reallocate(self.capacity, indices)

    def _reallocate(self, capacity: int, index: torch.Tensor | None = None) -> None:
        """Have the rows at `index`, or all, in buffers of this size."""
        before = self.buffers
        if before[0][0].shape[::2] != (self.rows, capacity):
            pool = Pool() if self.forwards is None else self.forwards.pool
            self.buffers = pool.allocate(self, self.rows, [capacity] * len(before), before)
        copy_buffers(before, self.buffers, index)

    def __call__(self, method: str, mapping: SlotMapping | None, *inputs: Any) -> Any:
        """What this method of the network returns, for entries in these slots if it takes any."""
        if mapping is not None and self.buffers and self.capacity < mapping.kv_length:
            self._reallocate(capacity_bucket(max(mapping.kv_length, self.expected_slots)))
        if self.forwards is not None and method != "append_context":
            return self._call_compiled(self.forwards, method, mapping, *inputs)
        return head_forward(self.network, method, self.rotary, self.buffers, mapping, *inputs)

    def _call_compiled(
        self, forwards: CompiledForwards, method: str, mapping: SlotMapping | None, *inputs: Any
    ) -> tuple[Any, ...]:
        count = len(inputs[0] if mapping is None else mapping.slots)
        rows_before = self.rows
        self.rows = rows = forwards.rows(count, rows_before, self.capacity)
        if rows < rows_before and self.buffers:
            self._reallocate(self.capacity)
        sizes: tuple[Any, ...] = ()
        if mapping is not None:
            sizes = self.capacity or capacity_bucket(mapping.kv_length), mapping.block_size
            mapping = SlotMapping(with_idle_rows(mapping.slots, rows), with_idle_rows(mapping.positions, rows), *sizes)
        padded = [with_idle_rows(x, rows) if isinstance(x, torch.Tensor) else x for x in inputs]
        shapes = (tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in padded)
        key = (method, rows, *sizes, *shapes)
        outputs = forwards.run(head_forward, key, self.network, method, self.rotary, self.buffers, mapping, *padded)
        return tuple(x if x is None or rows == count else x[:count] for x in outputs)


def with_idle_rows(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Values [R, ...] with zeros for idle rows after them."""
    idle = rows - len(values)
    return torch.cat([values, values.new_zeros(idle, *values.shape[1:])]) if idle else values.contiguous()


def head_forward(
    model: HeadNetwork,
    method: str,
    rotary: Rotary,
    buffers: LayersKeysValues,
    mapping: SlotMapping | None,
    *inputs: Any,
) -> tuple[Any, ...]:
    """A method of the layers over buffers of fixed size; no value in it has to be known before it runs."""
    cache = () if mapping is None else (HeadCache(model.config, rotary, buffers, mapping),)
    return getattr(model, method)(*cache, *inputs)
