"""Runners that feed a model as `generate` does, by its own preparation of inputs and a 2D mask; the padded layout.

Padded rows are right-aligned and shift into their left padding, as in transformers PR #32189. `lockstep.py` has the
other layout of such models.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_specx.common.altered import ColumnTable, altered, column_tables, without_limits
from hf_specx.common.batch import Batch
from hf_specx.common.devices import to_device_async
from hf_specx.common.wrappers import without_cache_reset

from .attention import Masks, grouped_queries
from .layers import SlotLayer, TailLayer
from .prompts import PreparedInputs
from .runner import ModelRunner, SharedKeys
from .slots import MARGIN, KeysValues, SlotCache, self_attention, with_slots


class TransformersCacheRunner(ModelRunner):
    """A runner that feeds the model through its own `prepare_inputs_for_generation`.

    Attributes:
        length: slots of the cache that are filled, pads among them.
        num_filled_slots: [B], how many of these a row has after its prompt. Candidates that were rejected since are
            among them until the next forward takes them back, so they may be more than `num_computed_tokens`.
        last_column: the last column that `generate` feeds; behind it are only candidates that cannot be emitted.
    """

    length = last_column = 0

    def __init__(self, prompt: PreparedInputs, draft_vocab_size: int | None = None):
        super().__init__(prompt, draft_vocab_size)
        self.num_filled_slots = [0] * len(prompt.input_ids)

    def prefill(self) -> Any:
        output = super().prefill()
        self.length, last = self.width, self.width + self.prompt.max_new_tokens - 2
        self.last_column = last if self.max_positions is None else min(last, self.max_positions - 1)
        mask = self.kwargs.get("attention_mask")
        if mask is not None and takes_whole_masks(self.model):
            self.kwargs["attention_mask"] = None if bool(mask.all()) else mask.bool()[:, None, None]  # [B, 1, 1, S]
        return output

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, logits_to_keep: int) -> torch.Tensor:
        count = tokens.shape[1]
        before = [batch.counts[row] + ahead - count for row in batch.rows]
        if ahead < count or before != [self.num_filled_slots[row] for row in batch.rows]:
            self._rewind(batch, before)
        return self._feed(batch, tokens, before, ahead, logits_to_keep)

    def _rewind(self, batch: Batch, counts: list[int]) -> None:
        """Cut the cache to the first `counts` [R] emitted tokens of the decoding rows."""
        raise NotImplementedError

    def _feed(
        self, batch: Batch, tokens: torch.Tensor, before: list[int], ahead: int, logits_to_keep: int
    ) -> torch.Tensor:
        """As `_forward`, where the cache holds the first `before` [R] emitted tokens of the rows."""
        count = tokens.shape[1]
        emitted_index = batch.columns(ahead - count, count) - batch.width  # [R, q], 0 for a row's first emitted token
        kwargs = self._inputs(batch, tokens, emitted_index)
        total = self.length + count
        lengths = [self.width - self.pad_counts[row] + n + count for row, n in zip(batch.rows, before, strict=True)]
        has_hidden_slots = min(lengths) < total or self.gaps is not None
        if has_hidden_slots:
            kwargs[self.mask_name] = self._mask(batch, ahead, total)
        input_ids = torch.nn.functional.pad(tokens, (self.length, 0))  # of which the last `count` are looked at
        inputs = self.input_preparer.prepare_inputs_for_generation(
            input_ids, next_sequence_length=count, is_first_iteration=False, **kwargs, **{self.cache_name: self.cache}
        )
        if "logits_to_keep" in self.parameters:
            inputs["logits_to_keep"] = logits_to_keep
        for table in self.tables.values():  # candidates after the last column are looked up there: it may be the last
            table.columns = (self.width + emitted_index).clamp(max=self.last_column)
            table.numbers = {min(self.width + n + i, self.last_column) for n in before for i in range(count)}
        # a decoder beside an encoder may make a mask itself, for which transformers would wait for the device too
        needs_mask = has_hidden_slots or (self.model.config.is_encoder_decoder and self.device.type != "cpu")
        with grouped_queries(), always_masked(self.cache) if needs_mask else contextlib.nullcontext():
            output = self.decoding_model(**inputs, return_dict=True)
        self.length = total
        for row, number in zip(batch.rows, before, strict=True):
            self.num_filled_slots[row] = number + count
        return output.logits[:, -logits_to_keep:]

    def _mask(self, batch: Batch, ahead: int, total: int) -> torch.Tensor:
        """The 2D mask [R, total] int64, 1 at slots with a visible token; the last `ahead` are candidates."""
        columns = batch.columns(ahead - total, total) + self.width - batch.width  # of each slot
        is_visible = columns >= self.pads[batch.index, None]
        if self.gaps is not None:
            is_gap = self.gaps[batch.index].gather(1, columns.clamp(0, self.width - 1))
            is_visible &= ~is_gap | (columns >= self.width)
        return is_visible.long()

    def _inputs(self, batch: Batch, tokens: torch.Tensor, emitted_index: torch.Tensor) -> dict[str, Any]:
        """The arguments of `prepare_inputs_for_generation` for tokens [R, q] at `emitted_index` [R, q]."""
        count, kwargs = tokens.shape[1], dict(self.kwargs)
        positions = self._positions(batch, emitted_index)
        if positions is not None:
            kwargs[self.position_name] = positions
        elif self._counts_slots:
            # `generate` gives none, so that models count columns; only Whisper's own preparation leaves out pads
            config, absent = self.model.config, torch.zeros_like(self.pads)
            if config.is_encoder_decoder and config.model_type == "whisper":
                absent = self.pads if self.gaps is None else self.pads + self.gaps.sum(-1)
            first = self.width - absent[batch.index, None]
            kwargs[self.position_name] = first + emitted_index.clamp(max=self.last_column - self.width)
        kwargs |= self._token_types(count)
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 4:
            kwargs["attention_mask"] = mask.expand(-1, -1, count, -1)
        if "cross_attention_mask" in kwargs:
            kwargs["cross_attention_mask"] = kwargs["cross_attention_mask"][:, -1:].expand(-1, count, -1, -1)
        return kwargs

    def shared_keys(self, batch: Batch, layers: dict[str, int]) -> SharedKeys:
        """As in `ModelRunner`; rejected candidates are taken back here, which else the next forward would do."""
        self._rewind(batch, [max(0, batch.counts[row] - 1) for row in batch.rows])
        emitted_index = self._newest_computed(batch)
        is_visible = self._mask(batch, -1 if any(batch.counts) else 0, self.length).bool()
        is_visible = is_visible[:, None, None].to(self.device)
        masks, keys, windows = {}, {}, Masks(self.model).windows
        for kind, number in layers.items():
            layer: Any = self_attention(self.cache).layers[number]
            end = self.length
            if isinstance(layer, TailLayer):  # which may still end with what was taken back
                end += layer.keys.shape[2] - layer.num_columns
            first = -windows.get(kind, 0)
            keys[kind] = layer.keys[:, :, :end][:, :, first:], layer.values[:, :, :end][:, :, first:]
            masks[kind] = is_visible[..., -keys[kind][0].shape[2] :]
        positions = self._positions(batch, emitted_index)
        assert positions is not None
        return SharedKeys(positions, masks, keys)

    @cached_property
    def tables(self) -> dict[nn.Module, ColumnTable]:
        """Replacements of the model's position tables."""
        return column_tables(self.model, self.position_name in self.parameters, self.lockstep)

    @cached_property
    def input_preparer(self) -> Any:
        """The model whose `prepare_inputs_for_generation` is called."""
        return without_cache_reset(self.model)

    @cached_property
    def decoding_model(self) -> PreTrainedModel:
        """The model whose forward over several tokens gives what single steps give."""
        return altered(self.model, self.tables | without_limits(self.model))

    @cached_property
    def _counts_slots(self) -> bool:
        """Whether the model numbers tokens by the slots before them unless it is told their positions."""
        if self.position_name in self.parameters:
            return True
        decoder = self.model.get_decoder()
        parameters = {} if decoder is None else inspect.signature(decoder.forward).parameters
        return not self.tables and "position_ids" in parameters and "kwargs" in self.parameters


def takes_whole_masks(model: PreTrainedModel) -> bool:
    """Whether a decoder takes a 4D mask of its encoder's text, as transformers would make it of the 2D one.

    transformers asks in each forward whether that mask can be left out, and waits for the device; a 4D mask is made
    once for a call.
    """
    decoder = model.get_decoder() if model.config.is_encoder_decoder else None
    if decoder is None or decoder.config._attn_implementation != "sdpa":
        return False
    makes_masks = hasattr(sys.modules[type(decoder).__module__], "create_bidirectional_mask")
    return makes_masks and model.main_input_name == "input_ids"


@contextlib.contextmanager
def always_masked(cache: Cache) -> Iterator[None]:
    """A context for forwards whose mask has zeros: transformers does not wait for the device to see whether it has.

    It leaves out a mask without zeros in each step of one token, unless the cache says that it may be compiled.
    """
    layers = getattr(self_attention(cache), "layers", [])
    # a layer of recurrent states says by itself from 5.24 on whether it may be
    layers = [layer for layer in layers if not isinstance(getattr(type(layer), "is_compileable", None), property)]
    for layer in layers:
        layer.is_compileable = True
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("is_compileable", None)


class PaddedRunner(TransformersCacheRunner):
    """Rows shift right into their left padding when they accepted different numbers."""

    def __init__(self, prompt: PreparedInputs, draft_vocab_size: int | None = None):
        super().__init__(prompt, draft_vocab_size)
        windows = [getattr(layer, "sliding_window", 0) for layer in self_attention(self.cache).layers] or [0]
        self.window, kinds = max(windows), [TailLayer if window else SlotLayer for window in windows]
        limit = prompt.input_ids.shape[1] + prompt.max_new_tokens + MARGIN
        self.cache = with_slots(self.cache, SlotCache(limit, self.window + MARGIN, kinds))
        self.text_cache: Any = self_attention(self.cache)

    def _rewind(self, batch: Batch, counts: list[int]) -> None:
        rejected = [self.num_filled_slots[row] - number for row, number in zip(batch.rows, counts, strict=True)]
        for row, number in zip(batch.rows, counts, strict=True):
            self.num_filled_slots[row] = number
        if len(set(rejected)) == 1:
            self.length -= rejected[0]
            return
        # row r ends at slot length - rejected[r], and moves so that all rows end where the longest one does
        length = max([self.width - self.pad_counts[row] + n for row, n in zip(batch.rows, counts, strict=True)])
        shift = to_device_async([self.length - number - length for number in rejected], self.device)[:, None]
        self.text_cache.shift((torch.arange(length, device=self.device) + shift).clamp(min=0))
        self.length = length

    def _feed(
        self, batch: Batch, tokens: torch.Tensor, before: list[int], ahead: int, logits_to_keep: int
    ) -> torch.Tensor:
        slots = self.text_cache.slots
        slots.ring = max(slots.ring, self.window + ahead + MARGIN)  # a window before all that may be fed again
        slots.set_write_slots(None, self.length, self.length + tokens.shape[1])
        return super()._feed(batch, tokens, before, ahead, logits_to_keep)

    def _max_tokens_at_once(self, batch: Batch) -> int:
        """As in `ModelRunner`; and no more than windows can spare, since rows that lack fewer are fed theirs again."""
        return min(super()._max_tokens_at_once(batch), MARGIN) if self.window else super()._max_tokens_at_once(batch)

    def common_slots(self, length: int) -> slice | None:
        first = self.length - self.width - self.num_filled_slots[0]
        return slice(first, first + length) if first >= 0 and len(set(self.num_filled_slots)) == 1 else None

    def row_keys_values(self, index: int, row: int) -> Iterator[KeysValues]:
        columns = self.width + self.num_filled_slots[row]
        slots = torch.arange(self.length - columns, self.length, device=self.device)
        slots[: self.pad_counts[row]] = -1
        return self.text_cache.read_row(index, slots)
