"""Models that are fed as `generate` feeds them, under a 2D mask; and the padded layout, where rows shift right.

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
from hf_specx.common.devices import sent
from hf_specx.common.wrappers import keeping_cache

from .attention import Masks, grouped_queries
from .layers import SlotLayer, TailLayer
from .prompts import Prompt
from .runner import ModelRunner, SharedKeys
from .slots import MARGIN, KeysValues, SlotCache, self_attention, with_slots


class HostCacheRunner(ModelRunner):
    """Fed through the model's own `prepare_inputs_for_generation`."""

    length = 0  # slots that hold something, pads among them
    last_column = 0  # the last that `generate` feeds; in those after it are only candidates that cannot be emitted

    def prefill(self) -> Any:
        output = super().prefill()
        self.length, last = self.width, self.width + self.prompt.max_new_tokens - 2
        self.last_column = last if self.max_positions is None else min(last, self.max_positions - 1)
        mask = self.kwargs.get("attention_mask")
        if mask is not None and takes_whole_masks(self.model):
            self.kwargs["attention_mask"] = None if bool(mask.all()) else mask.bool()[:, None, None]  # [B, 1, 1, S]
        return output

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        count = tokens.shape[1]
        wanted = [batch.counts[row] + ahead - count for row in batch.rows]
        if ahead < count or wanted != [self.held[row] for row in batch.rows]:
            self._rewind(batch, wanted)
        return self._fed(batch, tokens, wanted, ahead, keep)

    def _rewind(self, batch: Batch, wanted: list[int]) -> None:
        """Make the cache hold the first `wanted` [R] emitted tokens of the decoding rows."""
        raise NotImplementedError

    def _fed(self, batch: Batch, tokens: torch.Tensor, held: list[int], ahead: int, keep: int) -> torch.Tensor:
        """As `_forward`, where the cache holds the first `held` [R] emitted tokens of the rows."""
        count = tokens.shape[1]
        emitted = batch.columns(ahead - count, count) - batch.width  # [R, q], those before each token
        given = self._inputs(batch, tokens, emitted)
        total = self.length + count
        reals = [self.width - self.padding[row] + n + count for row, n in zip(batch.rows, held, strict=True)]
        masked = min(reals) < total or self.holes is not None
        if masked:
            given[self.mask_name] = self._mask(batch, ahead, total)
        # only the last `count` columns are read
        columns = torch.nn.functional.pad(tokens, (self.length, 0))
        inputs = self.preparing.prepare_inputs_for_generation(
            columns, next_sequence_length=count, is_first_iteration=False, **given, **{self.cache_name: self.cache}
        )
        if "logits_to_keep" in self.parameters:
            inputs["logits_to_keep"] = keep
        for table in self.tables.values():  # candidates after the last column are looked up there: it may be the last
            table.columns = (self.width + emitted).clamp(max=self.last_column)
            table.numbers = {min(self.width + n + i, self.last_column) for n in held for i in range(count)}
        # a decoder beside an encoder may make a mask itself, of which transformers would ask the same
        asked = masked or (self.model.config.is_encoder_decoder and self.device.type != "cpu")
        with grouped_queries(), with_pads(self.cache) if asked else contextlib.nullcontext():
            output = self.stepping(**inputs, return_dict=True)
        self.length = total
        return output.logits[:, -keep:]

    def _mask(self, batch: Batch, ahead: int, total: int) -> torch.Tensor:
        """[R, total] int64, 1 at slots whose token is visible; rows have `ahead` candidates."""
        columns = batch.columns(ahead - total, total) + self.width - batch.width  # of each slot
        seen = columns >= self.pads[batch.index, None]
        if self.holes is not None:
            hidden = self.holes[batch.index].gather(1, columns.clamp(0, self.width - 1))
            seen &= ~hidden | (columns >= self.width)
        return seen.long()

    def _inputs(self, batch: Batch, tokens: torch.Tensor, emitted: torch.Tensor) -> dict[str, Any]:
        count, given = tokens.shape[1], dict(self.kwargs)
        positions = self._positions(batch, emitted)
        if positions is not None:
            given[self.position_name] = positions
        elif self._counts_slots:
            # `generate` gives none, so that models count columns; only Whisper's own preparation leaves out pads
            config, absent = self.model.config, torch.zeros_like(self.pads)
            if config.is_encoder_decoder and config.model_type == "whisper":
                absent = self.pads if self.holes is None else self.pads + self.holes.sum(-1)
            first = self.width - absent[batch.index, None]
            given[self.position_name] = first + emitted.clamp(max=self.last_column - self.width)
        given |= self._token_types(count)
        mask = given.get("attention_mask")
        if mask is not None and mask.ndim == 4:
            given["attention_mask"] = mask.expand(-1, -1, count, -1)
        if "cross_attention_mask" in given:
            given["cross_attention_mask"] = given["cross_attention_mask"][:, -1:].expand(-1, count, -1, -1)
        return given

    def shared_keys(self, batch: Batch, layers: dict[str, int]) -> SharedKeys:
        """As there; candidates that were rejected are taken back before, where else the next forward does it."""
        held = [max(0, batch.counts[row] - 1) for row in batch.rows]
        self._rewind(batch, held)
        for row, number in zip(batch.rows, held, strict=True):
            self.held[row] = number
        emitted = self._newest(batch)
        seen = self._mask(batch, -1 if any(batch.counts) else 0, self.length).bool()[:, None, None].to(self.device)
        masks, keys, windows = {}, {}, Masks(self.model).windows
        for kind, number in layers.items():
            layer: Any = self_attention(self.cache).layers[number]
            # a tail may still end with what was taken back
            end = layer.keys.shape[2] + self.length - layer.held if isinstance(layer, TailLayer) else self.length
            first = -windows.get(kind, 0)
            keys[kind] = layer.keys[:, :, :end][:, :, first:], layer.values[:, :, :end][:, :, first:]
            masks[kind] = seen[..., -keys[kind][0].shape[2] :]
        positions = self._positions(batch, emitted)
        assert positions is not None
        return SharedKeys(positions, masks, keys)

    @cached_property
    def tables(self) -> dict[nn.Module, ColumnTable]:
        return column_tables(self.model, self.position_name in self.parameters, self.even)

    @cached_property
    def preparing(self) -> Any:
        """The model, as it prepares its inputs."""
        return keeping_cache(self.model)

    @cached_property
    def stepping(self) -> PreTrainedModel:
        """The model, fed at once what `generate` feeds it one by one."""
        return altered(self.model, self.tables | without_limits(self.model))

    @cached_property
    def _counts_slots(self) -> bool:
        """Whether the model numbers tokens by the slots before them unless it is told their positions."""
        if self.position_name in self.parameters:
            return True
        decoder = self.model.get_decoder()
        taken = {} if decoder is None else inspect.signature(decoder.forward).parameters
        return not self.tables and "position_ids" in taken and "kwargs" in self.parameters


def takes_whole_masks(model: PreTrainedModel) -> bool:
    """Whether a decoder takes the mask of a text's encoder for each query, as transformers would make it of a 2D one.

    There it asks in each forward whether the mask can be left out, and waits for the device: here once for each call.
    """
    decoder = model.get_decoder() if model.config.is_encoder_decoder else None
    if decoder is None or decoder.config._attn_implementation != "sdpa":
        return False
    makes = hasattr(sys.modules[type(decoder).__module__], "create_bidirectional_mask")
    return makes and model.main_input_name == "input_ids"


@contextlib.contextmanager
def with_pads(cache: Cache) -> Iterator[None]:
    """A forward under a mask that has zeros: transformers need not wait for a device to ask whether it has any.

    It looks for a mask that can be left out in each step of one token, except where the cache may be compiled.
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


class PaddedRunner(HostCacheRunner):
    """Rows shift right into their left padding when they accepted different numbers."""

    def __init__(self, prompt: Prompt, known_ids: int | None = None):
        super().__init__(prompt, known_ids)
        windows = [getattr(layer, "sliding_window", 0) for layer in self_attention(self.cache).layers] or [0]
        self.window, kinds = max(windows), [TailLayer if window else SlotLayer for window in windows]
        limit = prompt.input_ids.shape[1] + prompt.max_new_tokens + MARGIN
        self.cache = with_slots(self.cache, SlotCache(limit, self.window + MARGIN, kinds))
        self.text: Any = self_attention(self.cache)

    def _rewind(self, batch: Batch, wanted: list[int]) -> None:
        gone = [self.held[row] - number for row, number in zip(batch.rows, wanted, strict=True)]
        if len(set(gone)) == 1:
            self.length -= gone[0]
            return
        # row r ends at slot length - gone[r]; it moves to the end of the longest row
        cut = max([self.width - self.padding[row] + n for row, n in zip(batch.rows, wanted, strict=True)])
        shift = sent([self.length - number - cut for number in gone], self.device)[:, None]
        self.text.roll((torch.arange(cut, device=self.device) + shift).clamp(min=0))
        self.length = cut

    def _fed(self, batch: Batch, tokens: torch.Tensor, held: list[int], ahead: int, keep: int) -> torch.Tensor:
        slots = self.text.slots
        slots.ring = max(slots.ring, self.window + ahead + MARGIN)  # a window behind all that is fed again
        slots.aim(None, self.length, self.length + tokens.shape[1])
        return super()._fed(batch, tokens, held, ahead, keep)

    def _at_once(self, batch: Batch) -> int:
        """Nor more than windows have kept: rows that lack fewer tokens are fed theirs again."""
        return min(super()._at_once(batch), MARGIN) if self.window else super()._at_once(batch)

    def shared_slots(self, length: int) -> slice | None:
        first = self.length - self.width - self.held[0]
        return slice(first, first + length) if first >= 0 and len(set(self.held)) == 1 else None

    def columns(self, index: int, row: int) -> Iterator[KeysValues]:
        columns = self.width + self.held[row]
        slots = torch.arange(self.length - columns, self.length, device=self.device)
        slots[: self.padding[row]] = -1
        return self.text.row(index, slots)
