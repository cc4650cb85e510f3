"""Stopping criteria, evaluated at every emitted token: a row ends inside an accepted run where stock would end it."""

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_specx.common.batch import Batch


PREFIX_CRITERIA = frozenset({StopStringCriteria, MaxTimeCriteria})


class Stopping:
    """When rows end.

    Under an end-of-sequence criterion a row that any criterion stops is finished and padded. Without one, stock goes
    on writing into a stopped row until all rows are stopped, and so does this.

    Attributes:
        stateful: names of criteria that count calls or mix rows, or may; they must be called as stock calls them.
        pads_finished_rows: whether there is an end-of-sequence criterion.
        stopped_at: row -> emitted tokens at its first stop.
    """

    def __init__(self, criteria: StoppingCriteriaList, width: int, max_length: int):
        """
        Args:
            criteria: as `generate` prepared them; one of the user's whose result for each row depends on nothing but
                the row's prefix may set `stateless = True`, and is then shown no scores.
            width: columns of the prompt.
            max_length: columns of the whole output, unless a criterion says so.
        """
        self.all, self.criteria = criteria, StoppingCriteriaList()
        self.stateful: list[str] = []
        ends = []
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]  # the user's replaces stock's
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                ends.append(criterion.eos_token_id)
            elif type(criterion) is MaxLengthCriteria:
                continue
            elif type(criterion) in PREFIX_CRITERIA or getattr(criterion, "stateless", False) is True:
                self.criteria.append(criterion)
            else:
                self.stateful.append(type(criterion).__name__)
        self.eos_token_id = torch.cat([e.flatten() for e in ends]) if ends else None
        self.pads_finished_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        # stock looks at the length after a token, so one there always is
        self.max_new_tokens = max(min(lengths, default=max_length), width + 1) - width
        self.stopped_at: dict[int, int] = {}

    def cut(self, batch: Batch, tokens: torch.Tensor, num_new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the length or an end token ends a row among its new tokens.

        Args:
            tokens: [R, n], of which the first num_new [R] are real.

        Returns:
            kept [R], how many of them the row emits, and ended [R] bool, whether the last of these ends it.
        """
        room = self.max_new_tokens + batch.width - batch.ends
        kept = torch.minimum(num_new, room)
        if self.eos_token_id is None:
            return kept, kept == room
        hit = torch.isin(tokens, self.eos_token_id.to(tokens.device))
        first = torch.where(hit.any(-1), hit.int().argmax(-1) + 1, tokens.shape[1] + 1)
        return torch.minimum(kept, first), (first <= kept) | (kept == room)

    def update(self, batch: Batch, new: list[int], ended: list[int]) -> list[int]:
        """Note which rows stopped within their last `new` tokens; returns the rows that leave the batch."""
        for row, end in zip(batch.rows, ended, strict=True):
            if end:
                self.stopped_at.setdefault(row, batch.counts[row])
        if self.criteria:
            self._update_prefix_criteria(batch, new)
        if self.pads_finished_rows:
            ends = self.stopped_at
        elif len(self.stopped_at) == len(batch.counts):
            ends = dict.fromkeys(batch.rows, self.columns)
        else:
            ends = dict.fromkeys(batch.rows, self.max_new_tokens)
        leaving = [row for row in batch.rows if batch.counts[row] >= ends.get(row, batch.counts[row] + 1)]
        for row in leaving:
            batch.truncate(row, ends[row])
        return leaving

    def update_in_order(self, batch: Batch, scores: tuple[torch.Tensor, ...] | None) -> bool:
        """Call every criterion once, as stock does after each column; returns whether all rows have stopped.

        Args:
            batch: all B rows, with equally many tokens.
            scores: [B, V] of each column so far, where they are kept.
        """
        emitted = batch.counts[0]
        stops = self.all(batch.prefix(emitted), scores).tolist()
        for row, stop in enumerate(stops):
            if stop:
                self.stopped_at.setdefault(row, emitted)
        if self.pads_finished_rows and self.stopped_at:
            over = [row in self.stopped_at for row in batch.rows]
            batch.over = torch.tensor(over, device=batch.ids.device)
        return len(self.stopped_at) == len(stops)

    def settled(self, batch: Batch) -> list[int]:
        """How many tokens of each row are in the text for sure; without an end token a row may run ahead of it."""
        if self.pads_finished_rows:
            return [self.stopped_at.get(row, count) for row, count in enumerate(batch.counts)]
        going = [count + 1 for row, count in enumerate(batch.counts) if row not in self.stopped_at]
        columns = max([*going, *self.stopped_at.values()])
        return [min(count, columns) for count in batch.counts]

    def _update_prefix_criteria(self, batch: Batch, new: list[int]) -> None:
        """Call each criterion with the whole batch at every length that some row has just passed."""
        passed = {}
        for row, number in zip(batch.rows, new, strict=True):
            passed[row] = range(batch.counts[row] - number + 1, batch.counts[row] + 1)
        for emitted in sorted({n for lengths in passed.values() for n in lengths}):
            prefix = batch.prefix(emitted)
            stops = self.criteria(prefix, None).tolist()
            for row, lengths in passed.items():
                if emitted in lengths and stops[row]:
                    self.stopped_at[row] = min(emitted, self.stopped_at.get(row, emitted))

    @property
    def columns(self) -> int:
        """Columns that stock has emitted when the last row stops."""
        return max(self.stopped_at.values())
