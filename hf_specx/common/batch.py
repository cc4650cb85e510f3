"""The text of a batch while it grows, laid out as `generate` does, since processors and criteria must see just that.

Ends and lengths are numbers, never read from token ids: the pad id may be the end id, and a model may emit either.
"""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .devices import to_device_async
from .round import Draft, Round, Verdict


@dataclass(eq=False)
class Row:
    """All that a call knows of one row. Where the next request has the place of a row, one `Row` replaces another.

    How many tokens of a row have been computed only the models know.

    Attributes:
        limit: the most tokens that it may emit.
        greedy: whether its processors leave one token alone, so that no random number counts.
        seed: of its own random numbers; None if they are drawn with those of the other rows.
        noise: where its own random numbers come from; a `Verifier` makes it of the seed when it is first needed.
        drafts_alone: whether it must have the numbers of candidates that it would have in a batch of one.
        is_refill: whether its prompt has the place of a row that has ended.
        processors: its own `Processors`; None where those of the call take all rows at once.
        stopping: its own `Stopping`; None where that of the call holds for all rows.
        request: what a queue was asked for; None in a call of its own.
        prompt_length: tokens of its prompt, without pads.
        emitted: the ids of its tokens after the prompt.
        stopped_at: how many of these there are up to its stop; None as long as it goes on.
        dead_end: how many tokens it had where there was no next one, and the error; None if there always was.
        num_streamed: how many of its tokens a streamer was given.
        logprobs: of each token after all processors, and of the model, where a queue is asked for them.
    """

    limit: int = sys.maxsize
    greedy: bool = False
    seed: int | None = None
    noise: Any = None
    drafts_alone: bool = False
    is_refill: bool = False
    processors: Any = None
    stopping: Any = None
    request: Any = None
    prompt_length: int = 0
    emitted: list[int] = field(default_factory=list)
    stopped_at: int | None = None
    dead_end: tuple[int, Exception] | None = None
    num_streamed: int = 0
    logprobs: list[tuple[float, float]] = field(default_factory=list)


class Batch:
    """B rows of tokens, of which R are still decoding.

    Attributes:
        table: [B], the `Row` of each row.
        ids: [B, W] int64; columns `width` and up hold emitted tokens, then what nobody reads: pads in rows that left.
        starts: [B] int64, the first column of each row that holds a token; prompts are left-padded to `width`.
        counts: [B], how many of its emitted tokens each row has in this text; fewer than all of them in `view_at`.
        rows: [R], the numbers of the rows that still decode, ascending; `index` is the same as a tensor.
        ends: [R] int64, the column of each decoding row's next token.
        lockstep: whether all rows advance by as many tokens as the row that accepted fewest.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        pad_token_id: int,
        lockstep: bool = False,
        table: list[Row] | None = None,
    ):
        """From input_ids [B, L], left-padded, and attention_mask [B, L], 0 at the pads; None where there are none."""
        self.ids = input_ids.to(torch.int64, copy=True)
        self.width = input_ids.shape[1]
        self.pad_token_id = pad_token_id
        self.lockstep = lockstep
        rows, device = input_ids.shape[0], input_ids.device
        self.table = [Row() for _ in range(rows)] if table is None else table
        if attention_mask is None:
            self.starts = torch.zeros(rows, dtype=torch.int64, device=device)
        else:
            self.starts = attention_mask.bool().int().argmax(-1)
        for row, start in zip(self.table, self.starts.tolist(), strict=True):
            row.prompt_length = self.width - start
        self.counts = [0] * rows
        self.parent: tuple[Batch, int] | None = None  # of a `row_view`: where it is from, and its row index
        self._select(list(range(rows)))

    def _select(self, rows: list[int]) -> None:
        self.rows = rows
        self.read_candidates = list[list[int]]()  # candidates whose ids are known here, [n][R]
        self.index = to_device_async(rows, self.ids.device, torch.int64)
        self.ends = to_device_async([self.width + self.counts[row] for row in rows], self.ids.device, torch.int64)

    def reserve(self, columns: int) -> None:
        """Make room for `columns` columns after the end of the longest row."""
        needed, present = self.width + max(self.counts) + columns, self.ids.shape[1]
        if needed > present:
            longer = self.ids.new_full((len(self.ids), max(needed, 2 * present)), self.pad_token_id)
            longer[:, :present] = self.ids
            self.ids = longer

    def write(self, tokens: torch.Tensor, ahead: int = 0, known_ids: Sequence[list[int]] = ()) -> None:
        """Write tokens [R, n] from `ahead` columns after each row's end on, without counting them as emitted.

        `known_ids` [up to n][R] are the ids of the first of these columns, as far as they were read back.
        """
        self.reserve(ahead + tokens.shape[1])
        del self.read_candidates[ahead:]
        if len(self.read_candidates) == ahead:
            self.read_candidates += known_ids
        if len(self.counts) == 1:
            first = self.width + self.counts[0] + ahead
            self.ids[:, first : first + tokens.shape[1]] = tokens
            return
        self.ids[self.index[:, None], self.columns(ahead, tokens.shape[1])] = tokens

    def write_draft(self, draft: Draft) -> Draft:
        """The same draft, whose candidates are written after each row's end, where the target reads them."""
        fits = draft.tokens.shape[0] == len(draft.lengths) == len(self.rows)
        if not fits or max(draft.lengths) > draft.tokens.shape[1] or min(draft.lengths) < 0:
            shape = list(draft.tokens.shape)
            message = f"a draft by {draft.source!r} has tokens of shape {shape} for lengths {draft.lengths}"
            raise ValueError(f"{message}; propose [{len(self.rows)}, the largest length] tokens.")
        if draft.tokens.shape[1]:
            self.write(draft.tokens, known_ids=draft.known)
        return draft

    def candidates(self, count: int) -> list[list[int]]:
        """The ids of the first `count` candidates of each decoding row; each is read back from the device once."""
        if self.parent is not None:
            batch, index = self.parent
            return [batch.candidates(count)[index]]
        columns = self.read_candidates
        if count > len(columns):
            columns += self.last(count - len(columns), count).T.tolist()
        return [[column[index] for column in columns[:count]] for index in range(len(self.rows))]

    def prefix(self, emitted: int) -> torch.Tensor:
        """Prompts and the first `emitted` columns after them, as processors see them: [B, L + emitted]."""
        self.reserve(emitted - max(self.counts))
        return self.ids[:, : self.width + emitted]

    def last(self, count: int, ahead: int = 0) -> torch.Tensor:
        """The `count` tokens of each decoding row that end `ahead` candidates after its end: [R, count].

        A row that has fewer is preceded by its first token.
        """
        if len(self.counts) == 1 and (end := self.width + self.counts[0] + ahead) >= count:
            # a plain clone of one row keeps the stride of the whole text, for which torch would compile again
            return self.ids[:, end - count : end].clone(memory_format=torch.contiguous_format)
        columns = self.columns(ahead - count, count)
        num_emitted = count - ahead
        if num_emitted > 1 and num_emitted > self.shortest():  # a row has one token or more
            columns = columns.maximum(self.starts[self.index, None])
        return self.ids[self.index[:, None], columns]

    def shortest(self) -> int:
        """Tokens of the shortest decoding row, its prompt among them."""
        return min([self.table[row].prompt_length + self.counts[row] for row in self.rows])

    def columns(self, first: int, count: int) -> torch.Tensor:
        """[R, count], the columns from `first` after each decoding row's end on."""
        return self.ends[:, None] + torch.arange(first, first + count, device=self.ids.device)

    def append(
        self,
        draft: Draft,
        verdict: Verdict,
        stopping: Any,
        forward: Any = None,
        scores: torch.Tensor | None = None,
    ) -> Round:
        """Emit the accepted candidates and the token after them, up to a stop; `forward`, `scores` are for the record.

        This is the rollback as well: what was not accepted lies after the row's new end, where nothing looks, and both
        models are fed by the ends of the rows. `stopping` is a `Stopping`.
        """
        rows, lengths = self.rows, draft.lengths
        before = [self.counts[row] for row in rows]
        accepted, next_token, *figures = verdict
        tokens = next_token[:, None]
        if draft.tokens.shape[1]:
            tokens = torch.nn.functional.pad(draft.tokens, (0, 1)).scatter(1, accepted[:, None], tokens)
        stops = stopping.stop_flags(self, tokens, accepted)
        new_ids, accepted_columns, acceptance, overlap, undefined, stops_of_rows = _as_lists(
            tokens, accepted[:, None], *figures, stops
        )
        num_accepted = [number for (number,) in accepted_columns]
        gained = [number + 1 for number in num_accepted]
        if self.lockstep:
            gained = [min(gained)] * len(gained)
        self.emit(tokens, stopping.num_to_emit(self, new_ids, gained, stops_of_rows), new_ids)
        ended = stopping.remove_ended(self)
        emitted = [self.table[row].emitted[count:] for row, count in zip(rows, before, strict=True)]
        return Round(
            batch=self,
            rows=rows,
            draft=draft,
            before=before,
            emitted=list(map(len, emitted)),
            tokens=emitted,
            accepted=num_accepted,
            judged=[min(number + 1, length) for number, length in zip(num_accepted, lengths, strict=True)],
            gained=gained,
            acceptance=[chances[:length] for chances, length in zip(acceptance, lengths, strict=True)],
            overlap=[shares[:length] for shares, length in zip(overlap, lengths, strict=True)],
            undefined=[flags.index(True) if True in flags else len(flags) for flags in undefined],
            ended=ended,
            forward=forward,
            scores=scores,
        )

    def emit(self, tokens: torch.Tensor, numbers: list[int], ids: list[list[int]] | None = None) -> None:
        """Emit the first `numbers` [R] of tokens [R, n]; `ids` are the same as lists, if they were read back."""
        self.write(tokens)
        self.ends = self.ends + (numbers[0] if len(set(numbers)) == 1 else to_device_async(numbers, tokens.device))
        ids = tokens.tolist() if ids is None else ids
        for row, number, row_ids in zip(self.rows, numbers, ids, strict=True):
            self.counts[row] += number
            self.table[row].emitted += row_ids[:number]

    def rewind(self, counts: list[int]) -> None:
        """Take back what rows have emitted after their first `counts` [B] tokens."""
        self.counts = counts
        for row, count in zip(self.table, counts, strict=True):
            del row.emitted[count:]
        self._select(self.rows)

    def view_at(self, counts: list[int], rows: list[int] | None = None) -> "Batch":
        """The same text, to be read only, of `counts` [B] tokens a row; `rows` decode there, by default the same."""
        earlier = copy.copy(self)
        earlier.counts = counts
        earlier._select(self.rows if rows is None else rows)
        return earlier

    def remaining_tokens(self, row: int) -> int:
        """How many tokens a row may still emit."""
        return self.table[row].limit - self.counts[row]

    def row(self, row: int) -> torch.Tensor:
        """The tokens of one row, without pads: [length]."""
        return self.ids[row, self.width - self.table[row].prompt_length : self.width + self.counts[row]]

    def row_view(self, row: int) -> "Batch":
        """A decoding row as a batch of one without pads, to be read only."""
        view, width = copy.copy(self), self.table[row].prompt_length
        view.parent = self, self.rows.index(row)
        view.table, view.counts = [self.table[row]], [self.counts[row]]
        view.ids, view.width = self.ids[row : row + 1, self.width - width :], width
        # made on the device: numbers that are sent there wait for what it has to do
        view.rows, view.index = [0], torch.zeros(1, dtype=torch.int64, device=self.ids.device)
        view.starts = view.index
        view.ends = view.index + width + self.counts[row]
        return view

    def truncate(self, row: int, count: int) -> None:
        """Keep the first `count` emitted tokens of a row that is about to leave, and then pads, as `generate` does."""
        self.ids[row, self.width + count :] = self.pad_token_id
        self.counts[row] = count
        del self.table[row].emitted[count:]

    def admit(self, number: int, row: Row, prompt: torch.Tensor) -> None:
        """Put another `Row` with its prompt [l] in the place of one that has ended."""
        length = len(prompt)
        self.widen(max(0, length - self.width))
        self.ids[number] = self.pad_token_id
        self.ids[number, self.width - length : self.width] = prompt
        self.starts[number] = self.width - length
        self.counts[number] = 0
        row.prompt_length = length
        self.table[number] = row
        self._select(self.rows)

    def widen(self, columns: int) -> None:
        """Put columns of pads before the prompts of all rows."""
        if not columns:
            return
        self.ids = torch.nn.functional.pad(self.ids, (columns, 0), value=self.pad_token_id)
        self.width += columns
        self.starts = self.starts + columns
        self.ends = self.ends + columns

    def drop_rows(self, rows: list[int]) -> torch.Tensor | None:
        """Take rows out of the batch; returns the row indices [R'] of those that stay, None if all do."""
        leaving = set(rows)
        if not leaving:
            return None
        staying = [index for index, row in enumerate(self.rows) if row not in leaving]
        self._select([self.rows[index] for index in staying])
        return to_device_async(staying, self.ids.device, torch.int64)

    def seat_rows(self, rows: list[int]) -> torch.Tensor:
        """Have these rows decode, of which some had left or are new; prompts of such are to be admitted.

        Returns [R'] int64: the row indices that they had before; 0 for those that had none.
        """
        before = {row: index for index, row in enumerate(self.rows)}
        more = max(0, rows[-1] + 1 - len(self.table))
        self.table += [Row() for _ in range(more)]
        self.counts += [0] * more
        self.ids = torch.nn.functional.pad(self.ids, (0, 0, 0, more), value=self.pad_token_id)
        self.starts = torch.nn.functional.pad(self.starts, (0, more), value=self.width)
        self._select(rows)
        return to_device_async([before.get(row, 0) for row in rows], self.ids.device, torch.int64)

    def output(self, columns: int) -> torch.Tensor:
        """Prompts and the first `columns` emitted columns, padded after each row's end: [B, L + columns]."""
        text = self.prefix(columns)
        # candidates that were drafted and not judged may stand after the end of a row
        ends = self.width + torch.tensor(self.counts, device=text.device)
        return text.masked_fill(torch.arange(text.shape[1], device=text.device) >= ends[:, None], self.pad_token_id)


def _as_lists(*parts: torch.Tensor) -> list[list[list[Any]]]:
    """Tensors [R, ...] as lists; the round waits for the device only here, since all go in one transfer.

    Ids are exact also as float32, which has 24 bits; scores may have half precision.
    """
    numbers = torch.cat([part if part.dtype == torch.float64 else part.float() for part in parts], 1).tolist()
    lists, first = [], 0
    for part in parts:
        kind = float if part.is_floating_point() else int
        end = first + part.shape[1]
        lists.append([list(map(kind, row[first:end])) for row in numbers])
        first = end
    return lists
