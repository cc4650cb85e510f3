"""The lockstep layout: all rows advance alike, so transformers' own cache is cropped, or put back if it cannot be."""

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_specx.common.batch import Batch

from .export import Columns, columns_of
from .hosted import HostedDecoder
from .prompts import Prompt
from .recurrent_state import states_of
from .slots import has_columns, own_copy, self_attention


class LockstepDecoder(HostedDecoder):
    """All rows have emitted equally many tokens, so a rollback crops the cache, and puts back states from before."""

    even = True

    def __init__(self, prompt: Prompt, known_ids: int | None = None):
        super().__init__(prompt, known_ids)
        self.cache = own_copy(self.cache)

    def _note_width(self, width: int) -> None:
        super()._note_width(width)
        self.length, self.states = width, states_of(self.cache)
        config = self.model.config.get_text_config(decoder=True)
        self.of_images = getattr(config, "cross_attention_layers", None) or ()  # layers that attend to no text

    def _rewind(self, batch: Batch, wanted: list[int]) -> None:
        held, target = self.held[batch.rows[0]], wanted[0]
        reached = self.states.restore(target, held)
        self.states.crop(held - reached, self.of_images)
        self.length -= held - reached
        if reached < target:  # the states are of an earlier moment: feed again what was accepted since
            ahead = target - batch.counts[batch.rows[0]]
            missing = self._known(batch.last(target - reached, ahead))
            self._fed(batch, missing, [reached] * len(wanted), ahead, 1)
        for row in batch.rows:
            self.held[row] = target

    def _fed(self, batch: Batch, tokens: torch.Tensor, held: list[int], ahead: int, keep: int) -> torch.Tensor:
        self.states.save(held[0])
        return super()._fed(batch, tokens, held, ahead, keep)

    def leave(self, rows: list[int], stay: torch.Tensor) -> None:
        together = not len(stay) and len(rows) == len(self.held)  # then the cache itself may be returned
        if self.prompt.keeps_past and not together:
            self._keep_columns(rows, stay)
        if len(stay):
            self.select(stay)

    def _keep_columns(self, rows: list[int], stay: torch.Tensor) -> None:
        """If the cache is keys and values of the whole text, and nothing else."""
        text = self_attention(self.cache)
        plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in text.layers)
        if type(text) is DynamicCache and plain and has_columns(text):
            super()._keep_columns(rows, stay)

    def columns(self, index: int, row: int) -> Columns:
        end = self.width + self.held[row]
        every = columns_of(self_attention(self.cache))
        return [(keys[index, :, :end].clone(), values[index, :, :end].clone()) for keys, values in every]

    def past(self, batch: Batch, emitted: int) -> Cache | None:
        """The cache itself if all rows ended together; else it is put together from keys, if there are all."""
        rows = len(batch.counts)
        if self.rows == rows and len(set(batch.counts)) > 1:
            self._keep_columns(list(range(rows)), batch.index[:0])
        if self.left:
            return super().past(batch, emitted) if len(self.left) == rows else None
        if self.rows < rows or len(set(batch.counts)) > 1:
            return None
        batch.revive()
        self._rewind(batch, [emitted - 1] * self.rows)
        return self.cache

    def select(self, stay: torch.Tensor) -> None:
        super().select(stay)
        self.states.select(stay)
