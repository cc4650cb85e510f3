"""The padded layout: rows are right-aligned, and shift right into their left padding, as in transformers PR #32189."""

import torch

from hf_specx.common.batch import Batch
from hf_specx.common.devices import sent

from .export import Columns
from .hosted import HostedDecoder
from .prompts import Prompt
from .slots import SlotCache, self_attention, with_slots


class PaddedDecoder(HostedDecoder):
    """Rows shift right into their left padding when they accepted different numbers."""

    def __init__(self, prompt: Prompt, known_ids: int | None = None):
        super().__init__(prompt, known_ids)
        self.cache = with_slots(self.cache, prompt.input_ids.shape[1] + prompt.max_new_tokens)

    def columns(self, index: int, row: int) -> Columns:
        columns = self.width + self.held[row]
        slots = torch.arange(self.length - columns, self.length)
        return self.text.row(index, slots.masked_fill(torch.arange(columns) < self.padding[row], -1))

    @property
    def text(self) -> SlotCache:
        """The part of the cache that grows with the text."""
        cache = self_attention(self.cache)
        assert isinstance(cache, SlotCache)
        return cache

    def _note_width(self, width: int) -> None:
        super()._note_width(width)
        self.length = width

    def _rewind(self, batch: Batch, wanted: list[int]) -> None:
        gone = [self.held[row] - number for row, number in zip(batch.rows, wanted, strict=True)]
        kept = [self.width - self.padding[row] + n for row, n in zip(batch.rows, wanted, strict=True)]
        if len(set(gone)) == 1:
            self.length -= gone[0]
        else:
            # row r ends at slot length - gone[r]; it moves to the end of the longest row
            cut = max(kept)
            shift = sent([self.length - number - cut for number in gone], self.device)[:, None]
            source = (torch.arange(cut, device=self.device) + shift).clamp(min=0)  # [R, n]
            self.text.roll(source)
            self.length = cut

    def _fed(self, batch: Batch, tokens: torch.Tensor, held: list[int], ahead: int, keep: int) -> torch.Tensor:
        self.text.slots.aim(None, self.length, self.length + tokens.shape[1])
        return super()._fed(batch, tokens, held, ahead, keep)
