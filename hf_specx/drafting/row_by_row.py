"""A draft with a text of its own whose layers take rows of equally many tokens only: each row is a batch of one."""

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.architectures import vocabulary
from hf_specx.common.batch import Batch
from hf_specx.layouts.choose import make_decoder
from hf_specx.layouts.prompts import UNLIMITED, prepare


ROW_BY_ROW = "row by row"  # what such drafts have in place of a layout


class RowByRowDecoder:
    """Decoders in lockstep, one for each row, so that every row grows and is rolled back by its own number.

    Recurrent states are kept as they were before the forwards of one round only. A rollback therefore goes to
    `settled` and feeds what comes after it again: states from there or before are known, since it never moves back.

    Args:
        model: the draft.
        own: its text: prompts so far, left-padded.

    Attributes:
        settled: [B], how many tokens after its prompt will always be each row's text.
        emitted: [B], tokens of each row where its round began; None before. Those after them are candidates.
    """

    def __init__(self, model: PreTrainedModel, own: Batch):
        self.model = model
        make = partial(make_decoder, "lockstep", known_ids=vocabulary(model))
        self.decoders = {row: make(prepare(model, UNLIMITED, _given(own, row))) for row in own.rows}
        self.settled = [0] * len(self.decoders)
        self.emitted: list[int | None] = [None] * len(self.decoders)

    def read(self) -> None:
        """Read the prompts of all rows."""
        for decoder in self.decoders.values():
            decoder.read()

    def step(self, own: Batch, ahead: int) -> torch.Tensor:
        """Logits [R, 1, V] after the rows and `ahead` tokens that were put after them; feeds what is missing."""
        return torch.cat([self._step(own, row, own.counts[row] + ahead) for row in own.rows])

    def _step(self, own: Batch, row: int, total: int) -> torch.Tensor:
        decoder, one, emitted = self.decoders[row], own.alone(row), self.emitted[row]
        if not total:
            return decoder.after_prompt
        if emitted is None:
            emitted = self.emitted[row] = total
        one.rewind([emitted])
        return decoder.feed(one, total - min(decoder.valid[0], total - 1), total - emitted, keep=1)

    def settle(self, row: int, count: int) -> None:
        """A round has ended, and the first `count` tokens of a row after its prompt will not change."""
        self.settled[row], self.emitted[row] = count, None
        self.decoders[row].keep(0, count)

    def keep(self, row: int, count: int) -> None:
        """Of what a row was fed, only the first `count` tokens after its prompt are its text."""
        if count < self.decoders[row].valid[0]:
            self.settle(row, min(count, self.settled[row]))

    def leave(self, rows: list[int], stay: torch.Tensor) -> None:
        """Keep only those of the decoding rows [R] that are at indices `stay` [R']."""
        staying = set(stay.tolist())
        for index, row in enumerate(rows):
            if index not in staying:
                del self.decoders[row]

    def rehearse(self, own: Batch, count: int) -> None:
        """Feed `count` arbitrary tokens after the prompts; the next forward rolls them back."""
        for row in own.rows:
            self.decoders[row].rehearse(own.alone(row), count)


def _given(own: Batch, row: int) -> dict[str, Any]:
    ids = own.row(row)[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
