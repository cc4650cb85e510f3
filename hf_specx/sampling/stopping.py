"""Where rows end: where `generate` would end them, even mid-round; or with its error, where there is no next token."""

from bisect import bisect
from collections.abc import Mapping

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_specx.common.batch import Batch
from hf_specx.common.devices import sent
from hf_specx.common.round import Round


PREFIX_CRITERIA = frozenset({StopStringCriteria, MaxTimeCriteria})


class Stopping:
    """When rows end.

    With an end-of-sequence criterion a row that any criterion stops is finished and padded. Without one, `generate`
    keeps emitting tokens into a stopped row until all rows have stopped, and so does this.

    Attributes:
        stateful: names of criteria that may count calls or mix rows; they must be called exactly as `generate` does.
        stopped_at: for each row that has stopped, the number of its emitted tokens then.
        dead_ends: where rows have no next token, the first of each: tokens before it, and the error.
        ends: the tokens of all end-of-sequence criteria.
        max_new_tokens: the most tokens that a row emits.
    """

    def __init__(self, criteria: StoppingCriteriaList, width: int, max_length: int):
        """From the criteria as `generate` prepared them, for a prompt of `width` columns.

        One of the user's own whose result for each row depends only on the row's prefix may set `stateless = True`; it
        then gets None for scores. `max_length` holds where no `MaxLengthCriteria` says how long the output is.
        """
        self.all, self.criteria = criteria, StoppingCriteriaList()
        self.stateful: list[str] = []
        self.stopped_at: dict[int, int] = {}
        self.dead_ends: dict[int, tuple[int, Exception]] = {}
        self.pads_finished_rows = False
        self.ends = set[int]()
        self._beyond: list[tuple[int, int, MaxLengthCriteria]] = []
        columns = []
        for criterion in criteria:
            self.pads_finished_rows |= hasattr(criterion, "eos_token_id")
            if type(criterion) is EosTokenCriteria:
                self.ends.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:  # the user's or else transformers'
                columns.append(criterion.max_length)
                if criterion.max_position_embeddings is not None:
                    first = max(criterion.max_position_embeddings, width) + 1  # column beyond the model's positions
                    self._beyond.append((first - width, first, criterion))
            elif type(criterion) in PREFIX_CRITERIA or getattr(criterion, "stateless", False) is True:
                self.criteria.append(criterion)
            else:
                self.stateful.append(type(criterion).__name__)
        # `generate` checks the length after a token, so it always emits one
        self.max_new_tokens = max(min(columns, default=max_length) - width, 1)

    def ahead(self, batch: Batch, tokens: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """[R, n] bool: whether the criteria of the text stop a row with the first 1, 2, ... of its tokens [R, n].

        They are asked before it is known on the host how many of these count, so that the answers need no transfer of
        their own. On a CPU that is known, and what lies beyond [R] `accepted` and one is not asked for.
        """
        rows, most = tokens.shape
        if not self.criteria:
            return tokens.new_zeros(rows, 0)
        new = [most] * rows if tokens.device.type != "cpu" else (accepted + 1).tolist()
        batch.put(tokens)
        return self._stops(batch, [min(pair) for pair in zip(new, map(batch.room, batch.rows), strict=True)], most)

    def _stops(self, batch: Batch, new: list[int], most: int) -> torch.Tensor:
        """[R, most]: each criterion is called on the whole batch, at every length that a row has with `new` [R]."""
        before = [batch.counts[row] for row in batch.rows]
        counts = sorted({count + n for count, number in zip(before, new, strict=True) for n in range(1, number + 1)})
        stops = torch.stack([self.criteria(batch.prefix(emitted), None) for emitted in counts], 1)  # [B, lengths]
        where = [[min(bisect(counts, count + n), len(counts) - 1) for n in range(most)] for count in before]
        return stops[batch.index[:, None], sent(where, stops.device)]

    def cut(self, batch: Batch, tokens: list[list[int]], gained: list[int], stops: list[list[bool]]) -> list[int]:
        """How many of its new tokens [R, n] each row emits, [R]; notes which rows stop there.

        The batch is without the new tokens, of which the first `gained` [R] of each row count; `stops` are of `ahead`.
        """
        kept = []
        for row, new, number, stopped in zip(batch.rows, tokens, gained, stops, strict=True):
            room = batch.room(row)
            number = min(number, room)
            last = room if number == room else 0
            for position in range(number):
                if new[position] in self.ends or (stopped and stopped[position]):
                    last = position + 1
                    break
            if last:
                self.stopped_at.setdefault(row, batch.counts[row] + last)
            kept.append(last if last and self.pads_finished_rows else number)
            self.remind(row, batch.counts[row] + kept[-1])
        return kept

    def remind(self, row: int, emitted: int) -> None:
        """Have transformers warn, as it does once, where plain `generate` asks about a text beyond its positions."""
        for reminder in [each for each in self._beyond if each[0] <= emitted]:
            reminder[2](torch.empty(1, reminder[1], dtype=torch.int64, device="meta"), None)
            self._beyond.remove(reminder)

    def leaving(self, batch: Batch) -> list[int]:
        """The rows that leave the batch, cut to where they end; the batch has the new tokens."""
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

    def by_limit(self, text: torch.Tensor, tokens: list[int]) -> bool:
        """Whether the one row of text [1, L] that has emitted these tokens ended at its limit alone."""
        if len(tokens) < self.max_new_tokens or tokens[-1] in self.ends:
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

    @property
    def columns(self) -> int:
        """How many columns `generate` has emitted when the last row stops."""
        return max(self.stopped_at.values())

    def dead(self, done: Round, barred: Mapping[tuple[int, int], Exception]) -> dict[int, Exception]:
        """The errors that `generate` would raise for rows: without a token to choose, as soon as that is in the text.

        A candidate that is rejected may follow such a position, and without an end token a row may run ahead of the
        text; neither is an error. `barred` has those of `prefix_allowed_tokens_fn`, see `Processors`.
        """
        for row, first, number, position in zip(done.rows, done.before, done.emitted, done.undefined, strict=True):
            for count in range(first, first + number) if barred else ():
                if (row, count) in barred:
                    self.dead_ends.setdefault(row, (count, barred[row, count]))
            count = first + position
            if position < number and count < self.dead_ends.get(row, (count + 1,))[0]:
                told = f"row {row} has no next token after {count} new ones: the target's logits are not finite "
                told += "(check its dtype and weights), or the logits processors exclude every token (leave one out)."
                self.dead_ends[row] = (count, RuntimeError(told))
        if not self.dead_ends:
            return {}
        settled = self.settled(done.batch)
        return {row: error for row, (count, error) in self.dead_ends.items() if count < settled[row]}
