"""The prefixes of several positions of several rows, as `generate` would show each of them to a processor."""

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

import torch

from hf_specx.common.batch import Batch


class Prefixes:
    """The text before each of P consecutive positions of the R decoding rows, padded on the left in columns.

    Attributes:
        rows: B, of the whole batch.
        index: [R] int64, which of these still decode.
        shortest, longest: columns of the shortest and of the longest prefix.
        lengths: [R, P] int64, columns of each.
    """

    def __init__(self, batch: Batch, ahead: int, positions: int, memory: dict[Hashable, Any]):
        """
        Args:
            batch: the text so far; candidates are written after each row's end.
            ahead: candidates before the first position.
            positions: P.
            memory: what `kept` has made; it lasts for a call.
        """
        self.batch, self.ahead, self.positions, self.memory = batch, ahead, positions, memory
        self.rows, self.index = len(batch.counts), batch.index
        counts = [batch.counts[row] for row in batch.rows]
        self.shortest = batch.width + min(counts) + ahead
        self.longest = batch.width + max(counts) + ahead + positions - 1

    @cached_property
    def lengths(self) -> torch.Tensor:
        last = self.ahead + self.positions
        return self.batch.ends[:, None] + torch.arange(self.ahead, last, device=self.index.device)

    def any_of_length(self, length: int) -> bool:
        """Whether some prefix may have this length: none has where rows of unequal length leave it out."""
        return self.shortest <= length <= self.longest

    def last(self, count: int) -> torch.Tensor:
        """The last tokens of each prefix, also pads: [R, P, count]; without meaning where it has fewer columns."""
        self.batch.reserve(self.ahead + self.positions)
        device, end = self.index.device, self.ahead + self.positions - 1
        columns = self.batch.ends[:, None] + torch.arange(self.ahead - count, end, device=device)
        return self.batch.ids[self.index[:, None], columns.clamp_(min=0)].unfold(1, count, 1)

    def tokens(self, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of columns `start` up to the longest prefix, [R, C], and the numbers of these columns, [C]."""
        self.batch.reserve(self.ahead + self.positions - 1)
        ids = self.batch.ids[:, start : self.longest]
        if len(self.index) < self.rows:
            ids = ids[self.index]
        return ids, torch.arange(start, self.longest, device=ids.device)

    def prompts_inside(self, vocab_size: int) -> bool:
        """Whether all ids of the prompts, and the pad, are in the vocabulary; emitted tokens are."""
        prompts = self.batch.ids[:, : self.batch.width]
        highest = self.kept("highest prompt id", lambda: int(prompts.max()) if prompts.numel() else 0)
        return bool(max(highest, self.batch.pad_token_id) < vocab_size)

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gave when it was first asked for under this key."""
        if key not in self.memory:
            self.memory[key] = make()
        return self.memory[key]
