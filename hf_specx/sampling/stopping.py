"""Stopping criteria, evaluated at every emitted token: a row ends where `generate` would end it, even mid-round."""

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

    With an end-of-sequence criterion a row that any criterion stops is finished and padded. Without one, `generate`
    keeps emitting tokens into a stopped row until all rows have stopped, and so does this.

    Attributes:
        stateful: names of criteria that may count calls or mix rows; they must be called exactly as `generate` does.
        pads_finished_rows: whether there is an end-of-sequence criterion.
        stopped_at: for each row that has stopped, the number of its emitted tokens then.
        eos_token_id: [E], of all end-of-sequence criteria; None without one. `ends` has the same ids.
        max_new_tokens: the most tokens that a row emits.
    """

    def __init__(self, criteria: StoppingCriteriaList, width: int, max_length: int):
        """
        Args:
            criteria: as `generate` prepared them. A criterion of the user's own whose result for each row depends only
                on the row's prefix may set `stateless = True`; it then gets None for scores.
            width: columns of the prompt.
            max_length: columns of the whole output, where no `MaxLengthCriteria` gives them.
        """
        self.all, self.criteria = criteria, StoppingCriteriaList()
        self.stateful: list[str] = []
        self.stopped_at: dict[int, int] = {}
        self.pads_finished_rows = False
        ends, columns = [], []
        for criterion in criteria:
            self.pads_finished_rows |= hasattr(criterion, "eos_token_id")
            if type(criterion) is EosTokenCriteria:
                ends.append(criterion.eos_token_id.flatten())
            elif type(criterion) is MaxLengthCriteria:  # the user's or else transformers'
                columns.append(criterion.max_length)
            elif type(criterion) in PREFIX_CRITERIA or getattr(criterion, "stateless", False) is True:
                self.criteria.append(criterion)
            else:
                self.stateful.append(type(criterion).__name__)
        self.eos_token_id = torch.cat(ends) if ends else None
        self.ends = set() if self.eos_token_id is None else set(self.eos_token_id.tolist())
        # `generate` checks the length after a token, so it always emits one
        self.max_new_tokens = max(min(columns, default=max_length) - width, 1)

    def cut(self, batch: Batch, tokens: list[list[int]], num_new: list[int]) -> tuple[list[int], list[bool]]:
        """How many of its new tokens each row emits, [R], and whether the last of these ends it, [R].

        Args:
            batch: the text so far, without the new tokens.
            tokens: [R, n], of which the first `num_new` [R] of each row are new.
        """
        kept, ended = [], []
        for row, new, number in zip(batch.rows, tokens, num_new, strict=True):
            room = batch.room(row)
            number = min(number, room)
            last = number == room
            for position in range(number):
                if new[position] in self.ends:
                    number, last = position + 1, True
                    break
            kept.append(number)
            ended.append(last)
        return kept, ended

    def update(self, batch: Batch, new: list[int], ended: list[bool]) -> list[int]:
        """Note which rows stopped within their new tokens; returns the rows that leave the batch, which are cut.

        Args:
            batch: the text with the new tokens.
            new: [R], how many tokens each decoding row has just emitted.
            ended: [R], whether `cut` ended it.
        """
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
        leaving = []
        for row in batch.rows:
            if row in ends and batch.counts[row] >= ends[row]:
                leaving.append(row)
                batch.truncate(row, ends[row])
        return leaving

    def by_limit(self, text: torch.Tensor, emitted: int) -> bool:
        """Whether the one row of text [1, L] that has emitted so many tokens ended at its limit alone."""
        if emitted < self.max_new_tokens or int(text[0, -1]) in self.ends:
            return False
        return not (self.criteria and self.criteria(text, None).item())

    def settled(self, batch: Batch) -> list[int]:
        """How many tokens of each row are certain to be in the output.

        Without an end-of-sequence criterion a fast row may be ahead of the column where all rows have stopped.
        """
        if self.pads_finished_rows:
            return [self.stopped_at.get(row, count) for row, count in enumerate(batch.counts)]
        going = [count + 1 for row, count in enumerate(batch.counts) if row not in self.stopped_at]
        columns = max([*going, *self.stopped_at.values()])
        return [min(count, columns) for count in batch.counts]

    def _update_prefix_criteria(self, batch: Batch, new: list[int]) -> None:
        """Call each criterion on the whole batch at every length that some row has just passed."""
        numbers = zip(batch.rows, new, strict=True)
        passed = {row: range(batch.counts[row] - number + 1, batch.counts[row] + 1) for row, number in numbers}
        counts = sorted({n for lengths in passed.values() for n in lengths})
        if not counts:
            return
        # read back together, since each reading waits for the device
        stops = torch.stack([self.criteria(batch.prefix(emitted), None) for emitted in counts]).tolist()
        for emitted, stopped in zip(counts, stops, strict=True):
            for row, lengths in passed.items():
                if emitted in lengths and stopped[row]:
                    self.stopped_at[row] = min(emitted, self.stopped_at.get(row, emitted))

    @property
    def columns(self) -> int:
        """How many columns `generate` has emitted when the last row stops."""
        return max(self.stopped_at.values())
