"""What the padded and the lockstep layout share: the model is fed as `generate` feeds it, under a 2D mask."""

import contextlib
import inspect
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_specx.common.batch import Batch

from .altered import altered, without_limits
from .attention import grouped_queries
from .decoder import Decoder
from .position_tables import ColumnTable, column_tables
from .slots import self_attention


class HostedDecoder(Decoder):
    """Fed through the model's own `prepare_inputs_for_generation`.

    Attributes:
        length: slots that hold something, pads among them.
    """

    length = 0

    def _forward(self, batch: Batch, tokens: torch.Tensor, ahead: int, keep: int) -> torch.Tensor:
        count = tokens.shape[1]
        wanted = [batch.counts[row] + ahead - count for row in batch.rows]
        if ahead < count or wanted != [self.held[row] for row in batch.rows]:
            self._rewind(batch, wanted)
        return self._fed(batch, tokens, wanted, ahead, keep)

    def _fed(self, batch: Batch, tokens: torch.Tensor, held: list[int], ahead: int, keep: int) -> torch.Tensor:
        """Logits [R, keep, V] of tokens [R, q], fed after the first `held` [R] emitted tokens of the rows.

        The last of them lie `ahead` tokens after the ends of their rows, or before these if it is negative.
        """
        count = tokens.shape[1]
        ends = batch.ends - batch.width + ahead  # [R], held + count on the device
        emitted = ends[:, None] + torch.arange(-count, 0, device=tokens.device)  # [R, q]
        given = self._inputs(batch, tokens, emitted)
        total = self.length + count
        reals = [self.width - self.padding[row] + n + count for row, n in zip(batch.rows, held, strict=True)]
        if min(reals) < total or self.holes is not None:
            given[self.mask_name] = self._mask(batch, ends, total)
        # only the last `count` columns are read
        columns = torch.nn.functional.pad(tokens, (self.length, 0))
        inputs = self.model.prepare_inputs_for_generation(  # type: ignore[operator]
            columns, next_sequence_length=count, is_first_iteration=False, **given, **{self.cache_name: self.cache}
        )
        if "logits_to_keep" in self.parameters:
            inputs["logits_to_keep"] = keep
        for table in self.tables.values():  # candidates after the last column are looked up there: it may be the last
            table.columns = (self.width + emitted).clamp(max=self.last_column)
            table.numbers = {min(self.width + n + i, self.last_column) for n in held for i in range(count)}
        masked = with_pads(self.cache) if self.mask_name in given else contextlib.nullcontext()
        with grouped_queries(), masked:
            output = self.stepping(**inputs, return_dict=True)
        self.length = total
        return output.logits[:, -keep:]

    def _mask(self, batch: Batch, ends: torch.Tensor, total: int) -> torch.Tensor:
        """[R, total] int64, 1 at slots whose token is visible; rows have `ends` [R] emitted tokens and candidates."""
        columns = torch.arange(-total, 0, device=ends.device) + (self.width + ends)[:, None]  # of each slot
        seen = columns >= self.pads[batch.index, None]
        if self.holes is not None:
            hidden = self.holes[batch.index].gather(1, columns.clamp(0, self.width - 1))
            seen &= ~hidden | (columns >= self.width)
        return seen.long()

    def _inputs(self, batch: Batch, tokens: torch.Tensor, emitted: torch.Tensor) -> dict[str, Any]:
        given = dict(self.kwargs)
        positions = self._positions(batch, emitted)
        if positions is not None:
            given[self.position_name] = positions
        elif self._counts_slots:
            # `generate` gives none, so that models count columns; only Whisper's own preparation leaves out pads
            config = self.model.config
            real = config.is_encoder_decoder and config.model_type == "whisper"
            first = self.width - self.absent[batch.index, None] * real
            given[self.position_name] = first + emitted.clamp(max=self.last_column - self.width)
        given |= self._token_types(tokens.shape[1])
        if "cross_attention_mask" in given:
            given["cross_attention_mask"] = given["cross_attention_mask"][:, -1:].expand(-1, tokens.shape[1], -1, -1)
        return given

    def _rewind(self, batch: Batch, wanted: list[int]) -> None:
        """Make the cache hold the first `wanted` [R] emitted tokens of the decoding rows."""
        raise NotImplementedError

    @cached_property
    def tables(self) -> dict[nn.Module, ColumnTable]:
        return column_tables(self.model, self.position_name in self.parameters, self.even)

    @cached_property
    def stepping(self) -> PreTrainedModel:
        """The model as it is fed after the prompts, when tokens that `generate` feeds one by one come together."""
        return altered(self.model, self.tables | without_limits(self.model))

    @cached_property
    def _counts_slots(self) -> bool:
        """Whether the model numbers tokens by the slots before them unless it is told their positions."""
        if self.position_name in self.parameters:
            return True
        decoder = self.model.get_decoder()
        taken = {} if decoder is None else inspect.signature(decoder.forward).parameters
        return not self.tables and "position_ids" in taken and "kwargs" in self.parameters


@contextlib.contextmanager
def with_pads(cache: Cache) -> Iterator[None]:
    """A forward under a mask that has zeros: transformers need not wait for a device to ask whether it has any.

    It looks for a mask that can be left out in each step of one token, except where the cache may be compiled.
    """
    layers = getattr(self_attention(cache), "layers", [])
    for layer in layers:
        layer.is_compileable = True
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("is_compileable", None)
