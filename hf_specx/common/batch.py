"""The text of a batch while it grows, laid out as `generate` does, since processors and criteria must see just that.

Ends and lengths are numbers, never read from token ids: the pad id may be the end id, and a model may emit either.
"""

import copy
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from .devices import sent
from .round import Draft, Round, Verdict


class Batch:
    """B rows of tokens, of which R are still decoding.

    Attributes:
        ids: [B, W] int64; columns `width` and up hold emitted tokens, then what nobody reads: pads in rows that left.
        starts: [B] int64, the first column of each row that holds a token; prompts are left-padded to `width`.
        counts: [B], tokens emitted so far, and `emitted`, their ids by row; `limits`: [B], the most of each row.
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
        limits: list[int] | None = None,
    ):
        """Take input_ids [B, L], left-padded, and attention_mask [B, L], 0 at the pads; None where there are none."""
        self.ids = input_ids.to(torch.int64, copy=True)
        self.width, self.pad_token_id, self.lockstep = input_ids.shape[1], pad_token_id, lockstep
        rows, device = input_ids.shape[0], input_ids.device
        if attention_mask is None:
            self.starts = torch.zeros(rows, dtype=torch.int64, device=device)
        else:
            self.starts = attention_mask.bool().int().argmax(-1)
        self.prompt_lengths = (self.width - self.starts).tolist()
        self.counts, self.emitted = [0] * rows, defaultdict[int, list[int]](list)
        self.limits = [sys.maxsize] * rows if limits is None else limits
        self.whole: tuple[Batch, int] | None = None  # of a row that is `alone`: where it is from, and its row index
        self._select(list(range(rows)))

    def _select(self, rows: list[int]) -> None:
        self.rows, self.read = rows, list[list[int]]()  # `read` has candidates that are known here, [n][R]
        self.index = sent(rows, self.ids.device, torch.int64)
        self.ends = sent([self.width + self.counts[row] for row in rows], self.ids.device, torch.int64)

    def reserve(self, columns: int) -> None:
        """Make room for `columns` columns after the end of the longest row."""
        wanted = self.width + max(self.counts) + columns
        if wanted > self.ids.shape[1]:
            grown = self.ids.new_full((len(self.ids), max(wanted, 2 * self.ids.shape[1])), self.pad_token_id)
            grown[:, : self.ids.shape[1]] = self.ids
            self.ids = grown

    def put(self, tokens: torch.Tensor, ahead: int = 0, known: Sequence[list[int]] = ()) -> None:
        """Write tokens [R, n] from `ahead` columns after each row's end on, without counting them as emitted.

        The ids of the first of these columns may be `known`, [up to n][R].
        """
        self.reserve(ahead + tokens.shape[1])
        del self.read[ahead:]
        if len(self.read) == ahead:
            self.read += known
        if len(self.counts) == 1:
            first = self.width + self.counts[0] + ahead
            self.ids[:, first : first + tokens.shape[1]] = tokens
            return
        self.ids[self.index[:, None], self.columns(ahead, tokens.shape[1])] = tokens

    def take(self, draft: Draft) -> Draft:
        """Write candidates after each row's end, where the target reads them."""
        fits = draft.tokens.shape[0] == len(draft.lengths) == len(self.rows)
        if not fits or max(draft.lengths) > draft.tokens.shape[1] or min(draft.lengths) < 0:
            shape = list(draft.tokens.shape)
            told = f"a draft by {draft.source!r} has tokens of shape {shape} for lengths {draft.lengths}"
            raise ValueError(f"{told}; propose [{len(self.rows)}, the largest length] tokens.")
        if draft.tokens.shape[1]:
            self.put(draft.tokens, known=draft.known)
        return draft

    def candidates(self, count: int) -> list[list[int]]:
        """The ids of the first `count` candidates of each decoding row; each is read back from the device once."""
        if self.whole is not None:
            batch, index = self.whole
            return [batch.candidates(count)[index]]
        if count > len(self.read):
            self.read += self.last(count - len(self.read), count).T.tolist()
        return [[column[index] for column in self.read[:count]] for index in range(len(self.rows))]

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
        if 1 < count - ahead > self.shortest():  # a row has one token or more
            columns = columns.maximum(self.starts[self.index, None])
        return self.ids[self.index[:, None], columns]

    def shortest(self) -> int:
        """Tokens of the shortest decoding row, its prompt among them."""
        return min([self.prompt_lengths[row] + self.counts[row] for row in self.rows])

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
        rows, lengths, before = self.rows, draft.lengths, [self.counts[row] for row in self.rows]
        accepted, next_token, *figures = verdict
        tokens = next_token[:, None]
        if draft.tokens.shape[1]:
            tokens = torch.nn.functional.pad(draft.tokens, (0, 1)).scatter(1, accepted[:, None], tokens)
        stops = stopping.ahead(self, tokens, accepted)
        new, kept, acceptance, overlap, undefined, over = _as_lists(tokens, accepted[:, None], *figures, stops)
        accepts = [number for (number,) in kept]
        gained = [number + 1 for number in accepts]
        if self.lockstep:
            gained = [min(gained)] * len(gained)
        self.emit(tokens, stopping.cut(self, new, gained, over), new)
        ended = stopping.leaving(self)
        emitted = [self.emitted[row][count:] for row, count in zip(rows, before, strict=True)]
        return Round(
            batch=self,
            rows=rows,
            draft=draft,
            before=before,
            emitted=list(map(len, emitted)),
            tokens=emitted,
            accepted=accepts,
            judged=[min(number + 1, length) for number, length in zip(accepts, lengths, strict=True)],
            gained=gained,
            acceptance=[chances[:length] for chances, length in zip(acceptance, lengths, strict=True)],
            overlap=[shares[:length] for shares, length in zip(overlap, lengths, strict=True)],
            undefined=[flags.index(True) if True in flags else len(flags) for flags in undefined],
            ended=ended,
            forward=forward,
            scores=scores,
        )

    def emit(self, tokens: torch.Tensor, kept: list[int], known: list[list[int]] | None = None) -> None:
        """Emit the first `kept` [R] of tokens [R, n], whose ids may be `known`."""
        self.put(tokens)
        self.ends = self.ends + (kept[0] if len(set(kept)) == 1 else sent(kept, tokens.device))
        for row, number, ids in zip(self.rows, kept, tokens.tolist() if known is None else known, strict=True):
            self.counts[row] += number
            self.emitted[row] += ids[:number]

    def rewind(self, counts: list[int]) -> None:
        """Take back what rows have emitted after their first `counts` [B] tokens."""
        self.counts = counts
        for row, ids in self.emitted.items():
            del ids[counts[row] :]
        self._select(self.rows)

    def until(self, counts: list[int], rows: list[int] | None = None) -> "Batch":
        """The same text, to be read only, of `counts` [B] tokens a row; `rows` decode there, by default the same."""
        earlier = copy.copy(self)
        earlier.counts = counts
        earlier._select(self.rows if rows is None else rows)
        return earlier

    def room(self, row: int) -> int:
        """How many tokens a row may still emit."""
        return self.limits[row] - self.counts[row]

    def row(self, row: int) -> torch.Tensor:
        """The tokens of one row, without pads: [length]."""
        return self.ids[row, self.width - self.prompt_lengths[row] : self.width + self.counts[row]]

    def alone(self, row: int) -> "Batch":
        """A decoding row as a batch of one without pads, to be read only."""
        one = copy.copy(self)
        one.whole = self, self.rows.index(row)
        one.width, one.counts, one.limits = self.prompt_lengths[row], [self.counts[row]], [self.limits[row]]
        one.emitted = defaultdict(list, {0: self.emitted[row]})
        one.ids, one.prompt_lengths = self.ids[row : row + 1, self.width - one.width :], [one.width]
        # made on the device: numbers that are sent there wait for what it has to do
        one.rows, one.index = [0], torch.zeros(1, dtype=torch.int64, device=self.ids.device)
        one.starts = one.index
        one.ends = one.index + one.width + self.counts[row]
        return one

    def truncate(self, row: int, count: int) -> None:
        """Keep the first `count` emitted tokens of a row that is about to leave, and then pads, as `generate` does."""
        self.ids[row, self.width + count :] = self.pad_token_id
        self.counts[row] = count
        del self.emitted[row][count:]

    def replace(self, row: int, prompt: torch.Tensor, limit: int = sys.maxsize) -> None:
        """Put a prompt [l] with a limit of its own in the place of a row that has ended; `width` has room for it."""
        self.limits[row] = limit
        self.ids[row] = self.pad_token_id
        self.ids[row, self.width - len(prompt) : self.width] = prompt
        self.starts[row], self.prompt_lengths[row], self.counts[row] = self.width - len(prompt), len(prompt), 0
        self.emitted[row] = []
        self._select(self.rows)

    def widen(self, columns: int) -> None:
        """Put columns of pads before the prompts of all rows."""
        self.ids = torch.nn.functional.pad(self.ids, (columns, 0), value=self.pad_token_id)
        self.width += columns
        self.starts = self.starts + columns
        self.ends = self.ends + columns

    def retire(self, rows: list[int]) -> torch.Tensor | None:
        """Take rows out of the batch; returns the row indices [R'] of those that stay, None if all do."""
        gone = set(rows)
        if not gone:
            return None
        stay = [index for index, row in enumerate(self.rows) if row not in gone]
        self._select([self.rows[index] for index in stay])
        return sent(stay, self.ids.device, torch.int64)

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
    every = torch.cat([part if part.dtype == torch.float64 else part.float() for part in parts], 1).tolist()
    found, first = [], 0
    for part in parts:
        kind = float if part.is_floating_point() else int
        found.append([list(map(kind, row[first : first + part.shape[1]])) for row in every])
        first += part.shape[1]
    return found
