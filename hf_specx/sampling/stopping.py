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

from hf_specx.common.batch import Batch, Row
from hf_specx.common.devices import to_device_async
from hf_specx.common.round import Round


PREFIX_CRITERIA = frozenset({StopStringCriteria, MaxTimeCriteria})


class Stopping:
    """When rows end; where each has ended its `Row` says.

    With an end-of-sequence criterion a row that any criterion stops is finished and padded. Without one, `generate`
    keeps emitting tokens into a stopped row until all rows have stopped, and so does this.

    Attributes:
        stateful: names of criteria that may count calls or mix rows; they must be called exactly as `generate` does.
        pads_finished_rows: whether there is an end-of-sequence criterion.
        eos_token_ids: the tokens of all end-of-sequence criteria.
        max_new_tokens: the most tokens that a row emits.
    """

    def __init__(self, criteria: StoppingCriteriaList, width: int, max_length: int):
        """From the criteria as `generate` prepared them, for a prompt of `width` columns.

        One of the user's own whose result for each row depends only on the row's prefix may set `stateless = True`; it
        then gets None for scores. `max_length` holds where no `MaxLengthCriteria` says how long the output is.
        """
        self.all, self.criteria = criteria, StoppingCriteriaList()
        self.stateful: list[str] = []
        self.pads_finished_rows = False
        self.eos_token_ids = set[int]()
        self._reminders: list[tuple[int, int, MaxLengthCriteria]] = []  # see `remind`
        lengths = []
        for criterion in criteria:
            self.pads_finished_rows |= hasattr(criterion, "eos_token_id")
            if type(criterion) is EosTokenCriteria:
                self.eos_token_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:  # the user's or else transformers'
                lengths.append(criterion.max_length)
                if criterion.max_position_embeddings is not None:
                    first = max(criterion.max_position_embeddings, width) + 1  # column beyond the model's positions
                    self._reminders.append((first - width, first, criterion))
            elif type(criterion) in PREFIX_CRITERIA or getattr(criterion, "stateless", False) is True:
                self.criteria.append(criterion)
            else:
                self.stateful.append(type(criterion).__name__)
        # `generate` checks the length after a token, so it always emits one
        self.max_new_tokens = max(min(lengths, default=max_length) - width, 1)

    def stop_flags(self, batch: Batch, tokens: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """[R, n] bool: whether the criteria of the text stop a row with the first 1, 2, ... of its tokens [R, n].

        They are asked before it is known on the host how many of these count, so that the answers need no transfer of
        their own. On a CPU that is known, and what lies beyond [R] `accepted` and one is not asked for.
        """
        rows, most = tokens.shape
        if not self._reads_text(batch):
            return tokens.new_zeros(rows, 0)
        new = [most] * rows if tokens.device.type != "cpu" else (accepted + 1).tolist()
        batch.write(tokens)
        numbers = [min(number, batch.remaining_tokens(row)) for number, row in zip(new, batch.rows, strict=True)]
        return self._stops(batch, numbers, most)

    def _reads_text(self, batch: Batch) -> bool:
        """Whether there are criteria of the text."""
        return bool(self.criteria)

    def _stops(self, batch: Batch, numbers: list[int], most: int) -> torch.Tensor:
        """[R, most]: the criteria are called on the whole batch, at every length of a row with 1 to `numbers` [R] more
        tokens.
        """
        before = [batch.counts[row] for row in batch.rows]
        asked = {count + n for count, number in zip(before, numbers, strict=True) for n in range(1, number + 1)}
        counts = sorted(asked)
        stops = torch.stack([self.criteria(batch.prefix(emitted), None) for emitted in counts], 1)  # [B, lengths]
        where = [[min(bisect(counts, count + n), len(counts) - 1) for n in range(most)] for count in before]
        return stops[batch.index[:, None], to_device_async(where, stops.device)]

    def num_to_emit(
        self, batch: Batch, tokens: list[list[int]], gained: list[int], stops: list[list[bool]]
    ) -> list[int]:
        """How many of its new tokens [R, n] each row emits, [R]; notes which rows stop there.

        The batch is without the new tokens, of which the first `gained` [R] of each row count; `stops` are of `ahead`.
        """
        numbers = []
        for row, ids, number, stopped in zip(batch.rows, tokens, gained, stops, strict=True):
            room, count = batch.remaining_tokens(row), batch.counts[row]
            number = min(number, room)
            last = room if number == room else 0
            eos_token_ids = self.eos_token_ids_of(batch.table[row])
            for position in range(number):
                if ids[position] in eos_token_ids or (stopped and stopped[position]):
                    last = position + 1
                    break
            if last and batch.table[row].stopped_at is None:
                batch.table[row].stopped_at = count + last
            if last and self.pads_finished_rows:
                number = last
            numbers.append(number)
            self.warn_beyond_positions(batch.table[row], count + number)
        return numbers

    def eos_token_ids_of(self, row: Row) -> set[int]:
        """The end tokens of a row."""
        return self.eos_token_ids

    def warn_beyond_positions(self, row: Row, emitted: int) -> None:
        """Have transformers warn, as it does once, where plain `generate` asks about a text beyond its positions."""
        for reminder in [each for each in self._reminders if each[0] <= emitted]:
            _, length, criterion = reminder
            criterion(torch.empty(1, length, dtype=torch.int64, device="meta"), None)
            self._reminders.remove(reminder)

    def remove_ended(self, batch: Batch) -> list[int]:
        """The rows that leave the batch, cut to where they end; the batch has the new tokens."""
        together = None
        if not self.pads_finished_rows:
            going = any(row.stopped_at is None for row in batch.table)
            together = self.max_new_tokens if going else self.columns(batch)
        leaving = []
        for row in batch.rows:
            end = batch.table[row].stopped_at if together is None else together
            if end is not None and batch.counts[row] >= end:
                leaving.append(row)
                batch.truncate(row, end)
        return leaving

    def by_limit(self, text: torch.Tensor, tokens: list[int]) -> bool:
        """Whether the one row of text [1, L] that has emitted these tokens ended at its limit alone."""
        if len(tokens) < self.max_new_tokens or tokens[-1] in self.eos_token_ids:
            return False
        return not (self.criteria and self.criteria(text, None).item())

    def stops(self, text: torch.Tensor, tokens: list[int]) -> bool:
        """Whether the one row of text [1, L] that has emitted these tokens is at an end token or another criterion."""
        ends = tokens[-1] in self.eos_token_ids
        return ends or bool(self.criteria and self.criteria(text, None).item())

    def num_final_tokens(self, batch: Batch) -> list[int]:
        """How many tokens of each row are certain to be in the output.

        Without an end-of-sequence criterion a fast row may be ahead of the column where all rows have stopped.
        """
        stops = [row.stopped_at for row in batch.table]
        if self.pads_finished_rows:
            return [count if stop is None else stop for count, stop in zip(batch.counts, stops, strict=True)]
        columns = max(count + 1 if stop is None else stop for count, stop in zip(batch.counts, stops, strict=True))
        return [min(count, columns) for count in batch.counts]

    def columns(self, batch: Batch) -> int:
        """How many columns `generate` has emitted when the last row has stopped."""
        return max(row.stopped_at for row in batch.table if row.stopped_at is not None)

    def row_errors(self, done: Round, prefix_errors: Mapping[tuple[int, int], Exception]) -> dict[int, Exception]:
        """The errors that `generate` would raise for rows: without a token to choose, as soon as that is in the text.

        A candidate that is rejected may follow such a position, and without an end token a row may run ahead of the
        text; neither is an error. `prefix_errors` has those of `prefix_allowed_tokens_fn`, see `Processors`.
        """
        table = done.batch.table
        for number, first, emitted, position in zip(done.rows, done.before, done.emitted, done.undefined, strict=True):
            row = table[number]
            for count in range(first, first + emitted) if prefix_errors else ():
                if row.dead_end is None and (number, count) in prefix_errors:
                    row.dead_end = count, prefix_errors[number, count]
            count = first + position
            if position < emitted and (row.dead_end is None or count < row.dead_end[0]):
                message = (
                    f"row {number} has no next token after {count} new ones: the target's logits are not finite "
                    "(check its dtype and weights), or the logits processors exclude every token (leave one out)."
                )
                row.dead_end = count, RuntimeError(message)
        dead_ends = {number: row.dead_end for number, row in enumerate(table) if row.dead_end is not None}
        if not dead_ends:
            return {}
        settled = self.num_final_tokens(done.batch)
        return {number: error for number, (count, error) in dead_ends.items() if count < settled[number]}
