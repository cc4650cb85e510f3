"""Where rows end: where `generate` would end them, also in the middle of a round, or with the error that it raises."""

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

from hf_specx.common.batch import Batch, RowState
from hf_specx.common.devices import to_device_async
from hf_specx.common.round import Round


PREFIX_CRITERIA = frozenset({StopStringCriteria, MaxTimeCriteria})  # their result for a row depends on its text alone


class Stopping:
    """Decides where rows end; `RowState.stopped_at` has the result.

    With an end-of-sequence criterion a row that any criterion stops is finished and padded. Without one, `generate`
    keeps emitting tokens into a stopped row until all rows have stopped, and so does this.

    A round calls, in `Batch.append`: `stop_flags` (what the criteria say of each new token), `cut_at_stops` (how many
    of them are emitted) and, once they are, `cut_ended_rows`.

    Attributes:
        all: the criteria as `generate` prepared them.
        criteria: those that are called on the text; end tokens and lengths are compared here instead.
        stateful: names of criteria that may count calls or mix rows; they must be called exactly as `generate` does.
        has_eos_stopping_criteria: whether there is an end-of-sequence criterion, so that finished rows are padded;
            `generate` has it by this name.
        eos_token_ids: the tokens of all end-of-sequence criteria.
        max_new_tokens: how many tokens a row may emit.
    """

    def __init__(self, criteria: StoppingCriteriaList, width: int, max_length: int):
        """From the criteria as `generate` prepared them, for a prompt of `width` columns.

        One of the user's own whose result for each row depends only on the row's prefix may set `stateless = True`; it
        then gets None for scores. `max_length` holds where no `MaxLengthCriteria` says how long the output is.
        """
        self.all, self.criteria = criteria, StoppingCriteriaList()
        self.stateful: list[str] = []
        self.has_eos_stopping_criteria = False
        self.eos_token_ids = set[int]()
        # (emitted tokens, columns, criterion), from where on each criterion warns
        self._position_warnings: list[tuple[int, int, MaxLengthCriteria]] = []
        lengths = []
        for criterion in criteria:
            self.has_eos_stopping_criteria |= hasattr(criterion, "eos_token_id")
            if type(criterion) is EosTokenCriteria:
                self.eos_token_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:  # the user's or else transformers'
                lengths.append(criterion.max_length)
                if criterion.max_position_embeddings is not None:
                    first = max(criterion.max_position_embeddings, width) + 1  # column beyond the model's positions
                    self._position_warnings.append((first - width, first, criterion))
            elif type(criterion) in PREFIX_CRITERIA or getattr(criterion, "stateless", False) is True:
                self.criteria.append(criterion)
            else:
                self.stateful.append(type(criterion).__name__)
        # `generate` checks the length after a token, so it always emits one
        self.max_new_tokens = max(min(lengths, default=max_length) - width, 1)

    def stop_flags(self, batch: Batch, tokens: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """[R, n] bool: whether the criteria in `criteria` stop a row after the first 1, 2, ... of its new tokens.

        [R, 0] if there are none. The criteria are called before the host knows how many of the tokens are accepted, so
        that their results are read back together with these. On a CPU nothing waits, and only the accepted ones and
        the token after them are looked at.

        Args:
            tokens: [R, n], written after the rows' ends, and not yet emitted.
            accepted: [R], as of a `Verdict`.
        """
        rows, num_positions = tokens.shape
        if not self._has_text_criteria(batch):
            return tokens.new_zeros(rows, 0)
        num_new = [num_positions] * rows if tokens.device.type != "cpu" else (accepted + 1).tolist()
        batch.write(tokens)
        num_new = [min(number, batch.remaining_tokens(row)) for number, row in zip(num_new, batch.rows, strict=True)]
        return self._call_criteria(batch, num_new, num_positions)

    def _has_text_criteria(self, batch: Batch) -> bool:
        """Whether some decoding row has criteria that are called on its text."""
        return bool(self.criteria)

    def _call_criteria(self, batch: Batch, num_new: list[int], num_positions: int) -> torch.Tensor:
        """[R, num_positions] bool as in `stop_flags`; what lies behind the first `num_new` [R] has no meaning.

        The criteria are called on the whole batch, once for each length that the text of some row goes through.
        """
        before = [batch.counts[row] for row in batch.rows]
        lengths = {count + n for count, number in zip(before, num_new, strict=True) for n in range(1, number + 1)}
        counts = sorted(lengths)
        stops = torch.stack([self.criteria(batch.prefix(emitted), None) for emitted in counts], 1)  # [B, lengths]
        # [R, num_positions], for each row and position the index of its length among `counts`
        index = [[min(bisect(counts, count + n), len(counts) - 1) for n in range(num_positions)] for count in before]
        return stops[batch.index[:, None], to_device_async(index, stops.device)]

    def cut_at_stops(
        self, batch: Batch, tokens: list[list[int]], num_new_tokens: list[int], stop_flags: list[list[bool]]
    ) -> list[int]:
        """How many of its new tokens each row emits, [R]; sets `stopped_at` of rows that stop.

        Args:
            batch: without the new tokens.
            tokens: [R, n], of which the first `num_new_tokens` [R] of each row are new; the others were rejected.
            stop_flags: what the method of that name gave, as lists.
        """
        num_to_emit = []
        for row, ids, num_new, flags in zip(batch.rows, tokens, num_new_tokens, stop_flags, strict=True):
            row_state, count = batch.row_states[row], batch.counts[row]
            num_new = min(num_new, batch.remaining_tokens(row))
            stop = self._first_stop(ids[:num_new], flags, self.eos_token_ids_of(row_state))
            if stop is None and 0 < num_new == batch.remaining_tokens(row):
                stop = num_new
            if stop is not None and row_state.stopped_at is None:
                row_state.stopped_at = count + stop
            if stop is not None and self.has_eos_stopping_criteria:
                num_new = stop
            num_to_emit.append(num_new)
            self.warn_beyond_positions(row_state, count + num_new)
        return num_to_emit

    def _first_stop(self, ids: list[int], flags: list[bool], eos_token_ids: set[int]) -> int | None:
        """How many of a row's new tokens there are up to the first at which it stops; None if it goes on."""
        for position, token in enumerate(ids):
            if token in eos_token_ids or (flags and flags[position]):
                return position + 1
        return None

    def eos_token_ids_of(self, row_state: RowState) -> set[int]:
        """The end tokens of a row."""
        return self.eos_token_ids

    def warn_beyond_positions(self, row_state: RowState, emitted: int) -> None:
        """Have transformers warn, as it does once, where plain `generate` asks about a text beyond its positions."""
        for reminder in [each for each in self._position_warnings if each[0] <= emitted]:
            _, length, criterion = reminder
            criterion(torch.empty(1, length, dtype=torch.int64, device="meta"), None)
            self._position_warnings.remove(reminder)

    def cut_ended_rows(self, batch: Batch) -> list[int]:
        """Cut the rows that have ended to their ends, and return them; the batch has the new tokens."""
        end_of_all = None  # without an end-of-sequence criterion rows end together
        if not self.has_eos_stopping_criteria:
            all_stopped = all(row_state.stopped_at is not None for row_state in batch.row_states)
            end_of_all = self.num_output_columns(batch) if all_stopped else self.max_new_tokens
        ended = []
        for row in batch.rows:
            end = batch.row_states[row].stopped_at if end_of_all is None else end_of_all
            if end is not None and batch.counts[row] >= end:
                ended.append(row)
                batch.truncate(row, end)
        return ended

    def ended_by_limit(self, input_ids: torch.Tensor, tokens: list[int]) -> bool:
        """Whether a row of input_ids [1, L] and these emitted tokens ended because of its length alone."""
        if len(tokens) < self.max_new_tokens or tokens[-1] in self.eos_token_ids:
            return False
        return not (self.criteria and self.criteria(input_ids, None).item())

    def stops(self, input_ids: torch.Tensor, tokens: list[int]) -> bool:
        """Whether a row of input_ids [1, L] and these emitted tokens is at an end token or another criterion."""
        ends = tokens[-1] in self.eos_token_ids
        return ends or bool(self.criteria and self.criteria(input_ids, None).item())

    def num_final_tokens(self, batch: Batch) -> list[int]:
        """How many of its emitted tokens are certain to be in the output, for each row [B].

        Without an end-of-sequence criterion a fast row may be ahead of the column where all rows have stopped.
        """
        stops = [row_state.stopped_at for row_state in batch.row_states]
        if self.has_eos_stopping_criteria:
            return [count if stop is None else stop for count, stop in zip(batch.counts, stops, strict=True)]
        columns = max(count + 1 if stop is None else stop for count, stop in zip(batch.counts, stops, strict=True))
        return [min(count, columns) for count in batch.counts]

    def num_output_columns(self, batch: Batch) -> int:
        """How many columns `generate` has emitted when the last row has stopped."""
        stops = [row_state.stopped_at for row_state in batch.row_states]
        return max(stop for stop in stops if stop is not None)

    def row_errors(
        self, round_: Round, prefix_errors: Mapping[tuple[int, tuple[int, ...]], Exception]
    ) -> dict[int, Exception]:
        """The errors that `generate` would raise for rows in which no token can come next, by row.

        It is no error yet where that is behind a candidate that was rejected, or in tokens that may not be in the
        output, since a row without an end token may be ahead of the others.

        Args:
            prefix_errors: those of `prefix_allowed_tokens_fn`, see `Processors`.
        """
        batch = round_.batch
        for index, row in enumerate(round_.rows):
            self._note_dead_end(round_, index, batch.row_states[row], prefix_errors)
        dead_ends = {}
        for row, row_state in enumerate(batch.row_states):
            if row_state.dead_end is not None:
                dead_ends[row] = row_state.dead_end
        if not dead_ends:
            return {}
        num_final = self.num_final_tokens(batch)
        return {row: error for row, (count, error) in dead_ends.items() if count < num_final[row]}

    @staticmethod
    def _note_dead_end(
        round_: Round, index: int, row_state: RowState, prefix_errors: Mapping[tuple[int, tuple[int, ...]], Exception]
    ) -> None:
        """Set `dead_end` of a row, by its row index, if no token can follow some that it has emitted in this round."""
        row, before, emitted = round_.rows[index], round_.emitted_before[index], round_.emitted[index]
        for count in range(before, before + emitted) if prefix_errors else ():
            error = prefix_errors.get((row, tuple(row_state.emitted_ids[:count])))
            if row_state.dead_end is None and error is not None:
                row_state.dead_end = count, error
        position = round_.undefined[index]
        count = before + position
        if position < emitted and (row_state.dead_end is None or count < row_state.dead_end[0]):
            message = (
                f"row {row} has no next token after {count} new ones: the target's logits are not finite "
                "(check its dtype and weights), or the logits processors exclude every token (leave one out)."
            )
            row_state.dead_end = count, RuntimeError(message)
