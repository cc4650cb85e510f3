"""The text of a batch while it grows, in the columns of `generate`, since processors and criteria must see just that.

Ends and lengths are numbers, never read from token ids: the pad id may be the end id, and a model may emit either.
"""

import copy
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .devices import to_device_async
from .round import Draft, Round, Verdict
from .tree import Tree, at_nodes, tree_of


@dataclass(eq=False)
class RowState:
    """All that a call knows of one row; in a queue the state of the next request replaces it once the row has ended.

    Only the models know how many tokens of a row they have computed.

    Attributes:
        limit: how many tokens it may emit.
        greedy: whether its processors leave one token alone, so that no random number counts.
        seed: of its own random numbers; None if they are drawn with those of the other rows.
        noise: its own random generators, which a `Verifier` makes from the seed when they are first needed.
        independent_lengths: whether the numbers of candidates drafted for it must not depend on other rows.
        is_refill: whether it has replaced a row that had ended.
        processors: its own `Processors`; None where those of the call take all rows at once.
        stopping: its own `Stopping`; None where that of the call holds for all rows.
        request: the request of a queue that it answers; None outside of a queue.
        prompt_length: tokens of its prompt, without pads.
        emitted_ids: its tokens after the prompt.
        stopped_at: how many of these there are up to its stop; None as long as it goes on.
        dead_end: (n, error) if no token can follow its first n emitted ones, as where processors exclude all; the
            error is the one to raise. None otherwise.
        num_streamed: how many of its tokens a streamer was given.
        logprobs: of each token after all processors, and of the model, where a queue is asked for them.
    """

    limit: int = sys.maxsize
    greedy: bool = False
    seed: int | None = None
    noise: Any = None
    independent_lengths: bool = False
    is_refill: bool = False
    processors: Any = None
    stopping: Any = None
    request: Any = None
    prompt_length: int = 0
    emitted_ids: list[int] = field(default_factory=list)
    stopped_at: int | None = None
    dead_end: tuple[int, Exception] | None = None
    num_streamed: int = 0
    logprobs: list[tuple[float, float]] = field(default_factory=list)


class Batch:
    """The tokens of B rows, of which R are still decoding.

    A row is named by its number, 0 to B - 1, in all arguments called `row` or `rows`; `row_states` has what belongs to
    it. In all methods `ahead` counts columns after a row's end, where candidates of the round are.

    Attributes:
        row_states: [B], the `RowState` of each row.
        width: columns of the prompts, which are padded on the left.
        ids: [B, W] int64; columns `width` and up hold emitted tokens, then what nobody reads: pads in rows that left.
        starts: [B] int64, the first column of each row that holds a token.
        counts: [B], how many tokens each row has emitted; fewer in a view of an earlier text, see `view_at`.
        rows: [R], the numbers of the rows that still decode, ascending; `index` is the same as a tensor.
        ends: [R] int64, the column of each decoding row's next token.
        lockstep: whether all rows advance by as many tokens as the row that accepted fewest.
        max_nodes: how many candidates a row has at most where they may branch, forced ones aside; 0 where they may
            not, and those of first choice are taken.
        tree: how the candidates that stand behind the ends branch; None if each follows the one before.
        host_candidates: [n][R], ids of candidates after the ends of the rows, as far as they were read back from the
            device in this round.
        parent: of a `row_view` the batch that it shows, and the row index there; None otherwise.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        pad_token_id: int,
        lockstep: bool = False,
        row_states: list[RowState] | None = None,
        max_nodes: int = 0,
    ):
        """From input_ids [B, L], left-padded, and attention_mask [B, L], 0 at the pads; None where there are none."""
        self.ids = input_ids.to(torch.int64, copy=True)
        self.width = input_ids.shape[1]
        self.pad_token_id = pad_token_id
        self.lockstep, self.max_nodes = lockstep, max_nodes
        rows, device = input_ids.shape[0], input_ids.device
        self.row_states = [RowState() for _ in range(rows)] if row_states is None else row_states
        if attention_mask is None:
            self.starts = torch.zeros(rows, dtype=torch.int64, device=device)
        else:
            self.starts = attention_mask.bool().int().argmax(-1)
        for row_state, start in zip(self.row_states, self.starts.tolist(), strict=True):
            row_state.prompt_length = self.width - start
        self.counts = [0] * rows
        self.parent: tuple[Batch, int] | None = None
        self._set_rows(list(range(rows)))

    def _set_rows(self, rows: list[int]) -> None:
        """Let these rows be the decoding ones."""
        self.rows = rows
        self.tree: Tree | None = None
        self.host_candidates = list[list[int]]()
        self.index = to_device_async(rows, self.ids.device, torch.int64)
        self.ends = to_device_async([self.width + self.counts[row] for row in rows], self.ids.device, torch.int64)

    def reserve(self, columns: int) -> None:
        """Make room for `columns` columns after the end of the longest row."""
        needed, present = self.width + max(self.counts) + columns, self.ids.shape[1]
        if needed > present:
            longer = self.ids.new_full((len(self.ids), max(needed, 2 * present)), self.pad_token_id)
            longer[:, :present] = self.ids
            self.ids = longer

    def write(self, tokens: torch.Tensor, ahead: int = 0, host_tokens: Sequence[list[int]] = ()) -> None:
        """Write tokens [R, n] from `ahead` columns after each row's end on, without counting them as emitted.

        `host_tokens` [up to n][R] are the first of these columns as lists, if they were read back from the device.
        """
        self.tree = None
        self.reserve(ahead + tokens.shape[1])
        del self.host_candidates[ahead:]
        if len(self.host_candidates) == ahead:
            self.host_candidates += host_tokens
        if len(self.counts) == 1:
            first = self.width + self.counts[0] + ahead
            self.ids[:, first : first + tokens.shape[1]] = tokens
            return
        self.ids[self.index[:, None], self.columns(ahead, tokens.shape[1])] = tokens

    def write_draft(self, draft: Draft) -> Draft:
        """Write the candidates of a draft after each row's end, where the target reads them; returns the draft.

        Of a tree, candidate i stands i columns behind the end. It is cut to `max_nodes`; where trees are not taken it
        is the chain of first choices.

        Raises:
            ValueError: if its shapes or parents do not fit.
        """
        self.tree = None
        if draft.parents is not None:
            draft = draft._replace(parents=[tuple(map(int, of_row)) for of_row in draft.parents])
        draft = draft.cut(self.max_nodes) if self.max_nodes else draft.first_choices()
        fits = draft.tokens.shape[0] == len(draft.lengths) == len(self.rows)
        if not fits or max(draft.lengths) > draft.tokens.shape[1] or min(draft.lengths) < 0:
            shape = list(draft.tokens.shape)
            message = (
                f"a draft by {draft.source!r} has tokens of shape {shape} for lengths {draft.lengths}; propose "
                f"[{len(self.rows)}, the largest length] tokens."
            )
            raise ValueError(message)
        if draft.tokens.shape[1]:
            self.write(draft.tokens, host_tokens=draft.host_tokens)
            if draft.parents is not None:
                self.tree = self._tree_of(draft)
        return draft

    def _tree_of(self, draft: Draft) -> Tree | None:
        """How the candidates of a draft branch, None if none does; raises ValueError if its parents are no such."""
        parents = tuple(draft.parents or ())
        numbers = list(map(len, parents))
        if numbers != draft.lengths:
            message = (
                f"a draft by {draft.source!r} has the parents of {numbers} candidates for lengths {draft.lengths}; "
                "give each row one parent a candidate."
            )
            raise ValueError(message)
        if all(of_row == tuple(range(-1, len(of_row) - 1)) for of_row in parents):
            return None
        return tree_of(parents, draft.tokens.shape[1], self.ids.device)

    def candidates_before(self, index: int, node: int) -> Sequence[int]:
        """The numbers of the candidates of row index `index` on the way to a node, itself the last."""
        return range(node) if self.tree is None else self.tree.rows[index].node_prefixes[node]

    def candidates(self, count: int) -> list[list[int]]:
        """The ids of the first `count` candidates of each decoding row; each is read back from the device once."""
        if self.parent is not None:
            batch, index = self.parent
            return [batch.candidates(count)[index]]
        columns = self.host_candidates
        if count > len(columns):
            columns += self.last(count - len(columns), count).T.tolist()
        return [[column[index] for column in columns[:count]] for index in range(len(self.rows))]

    def prefix(self, num_columns: int) -> torch.Tensor:
        """[B, L + num_columns]: prompts and so many emitted columns after them, as `generate` gives to processors."""
        self.reserve(num_columns - max(self.counts))
        return self.ids[:, : self.width + num_columns]

    def last(self, count: int, ahead: int = 0) -> torch.Tensor:
        """[R, count] consecutive tokens of each decoding row, up to its candidate number `ahead` (1 for the first).

        By default the last emitted ones. Where a row has fewer tokens, its first one is repeated before it.
        """
        if len(self.counts) == 1 and (end := self.width + self.counts[0] + ahead) >= count:
            # a plain clone of one row keeps the stride of the whole text, for which torch would compile again
            return self.ids[:, end - count : end].clone(memory_format=torch.contiguous_format)
        columns = self.columns(ahead - count, count)
        num_before_end = count - ahead
        if num_before_end > 1 and num_before_end > self.shortest_length():  # a row has one token or more
            columns = columns.maximum(self.starts[self.index, None])
        return self.ids[self.index[:, None], columns]

    def shortest_length(self) -> int:
        """Tokens of the shortest decoding row, its prompt among them."""
        return min([self.row_states[row].prompt_length + self.counts[row] for row in self.rows])

    def columns(self, first: int, count: int) -> torch.Tensor:
        """[R, count], consecutive columns of each decoding row, from its end + `first` on; `first` may be negative."""
        return self.ends[:, None] + torch.arange(first, first + count, device=self.ids.device)

    def append(
        self,
        draft: Draft,
        verdict: Verdict,
        stopping: Any,
        forward: Any = None,
        scores: torch.Tensor | None = None,
    ) -> Round:
        """Emit the accepted candidates and the token after them, up to a stop; returns the record of the round.

        This is the rollback as well: what was not accepted lies after the row's new end, where nothing looks, and both
        models are fed by the ends of the rows.

        Args:
            stopping: a `Stopping`, which cuts tokens behind a stop and says which rows have ended.
            forward, scores: the target's, for the record.
        """
        rows, tree = self.rows, self.tree
        emitted_before = [self.counts[row] for row in rows]
        tokens = _with_next_token(draft, verdict)  # [R, K + 1]
        stop_flags = stopping.stop_flags(self, tokens, verdict.accepted)
        host = _read_back(tokens, verdict, stop_flags)
        num_new_tokens = [number + 1 for number in host.accepted]
        if self.lockstep:
            num_new_tokens = [min(num_new_tokens)] * len(rows)
        num_to_emit = stopping.cut_at_stops(self, host.tokens, num_new_tokens, host.stop_flags)
        self.emit(tokens, num_to_emit, host.tokens)
        ended = stopping.cut_ended_rows(self)
        emitted_ids = []
        for row, before in zip(rows, emitted_before, strict=True):
            emitted_ids.append(self.row_states[row].emitted_ids[before:])
        if verdict.path_nodes is not None:  # of a tree the record has the branch that was taken
            forward = forward.at_nodes(verdict.path_nodes)
            scores = None if scores is None else at_nodes(scores, verdict.path_nodes)
        chain = draft.first_choices()
        return Round(
            batch=self,
            rows=rows,
            draft=chain,
            emitted_before=emitted_before,
            emitted=list(map(len, emitted_ids)),
            tokens=emitted_ids,
            accepted=host.accepted,
            num_new_tokens=num_new_tokens,
            prefix_acceptance=_of_candidates(host.prefix_acceptance, chain),
            overlap=_of_candidates(host.overlap, chain),
            undefined=[flags.index(True) if True in flags else len(flags) for flags in host.undefined],
            ended=ended,
            forward=forward,
            scores=scores,
            tree=tree,
            accepted_candidates=host.accepted_candidates,
        )

    def emit(self, tokens: torch.Tensor, num_to_emit: list[int], ids: list[list[int]] | None = None) -> None:
        """Emit the first `num_to_emit` [R] of tokens [R, n]; `ids` are the same as lists, if they were read back."""
        self.write(tokens)
        is_uniform = len(set(num_to_emit)) == 1
        self.ends = self.ends + (num_to_emit[0] if is_uniform else to_device_async(num_to_emit, tokens.device))
        ids = tokens.tolist() if ids is None else ids
        for row, number, row_ids in zip(self.rows, num_to_emit, ids, strict=True):
            self.counts[row] += number
            self.row_states[row].emitted_ids += row_ids[:number]

    def rewind(self, counts: list[int]) -> None:
        """Take back all that rows have emitted but their first `counts` [B] tokens."""
        self.counts = counts
        for row_state, count in zip(self.row_states, counts, strict=True):
            del row_state.emitted_ids[count:]
        self._set_rows(self.rows)

    def view_at(self, counts: list[int], rows: list[int] | None = None) -> "Batch":
        """A read-only view of the text when rows had emitted `counts` [B] tokens, and `rows` were decoding.

        By default these are the rows that decode now.
        """
        earlier = copy.copy(self)
        earlier.counts = counts
        earlier._set_rows(self.rows if rows is None else rows)
        return earlier

    def remaining_tokens(self, row: int) -> int:
        """How many tokens a row may still emit."""
        return self.row_states[row].limit - self.counts[row]

    def row(self, row: int) -> torch.Tensor:
        """The prompt and emitted tokens of one row, without pads: [length]."""
        return self.ids[row, self.width - self.row_states[row].prompt_length : self.width + self.counts[row]]

    def row_view(self, row: int) -> "Batch":
        """A read-only view of one decoding row as a batch of one without pads."""
        view, width = copy.copy(self), self.row_states[row].prompt_length
        view.parent = self, self.rows.index(row)
        view.row_states, view.counts = [self.row_states[row]], [self.counts[row]]
        view.ids, view.width = self.ids[row : row + 1, self.width - width :], width
        # made on the device: numbers that are sent there wait for what it has to do
        view.rows, view.index = [0], torch.zeros(1, dtype=torch.int64, device=self.ids.device)
        view.starts = view.index
        view.ends = view.index + width + self.counts[row]
        view.tree = None if self.tree is None else self.tree.row(view.parent[1])
        return view

    def truncate(self, row: int, count: int) -> None:
        """Cut a row that is about to leave to its first `count` emitted tokens, and pad it, as `generate` does."""
        self.ids[row, self.width + count :] = self.pad_token_id
        self.counts[row] = count
        del self.row_states[row].emitted_ids[count:]

    def admit(self, row: int, row_state: RowState, prompt: torch.Tensor) -> None:
        """Replace a row that has ended by another, with its `RowState` and prompt [l]."""
        length = len(prompt)
        self.widen(max(0, length - self.width))
        self.ids[row] = self.pad_token_id
        self.ids[row, self.width - length : self.width] = prompt
        self.starts[row] = self.width - length
        self.counts[row] = 0
        row_state.prompt_length = length
        self.row_states[row] = row_state
        self._set_rows(self.rows)

    def widen(self, columns: int) -> None:
        """Put columns of pads before the prompts of all rows."""
        if not columns:
            return
        self.ids = torch.nn.functional.pad(self.ids, (columns, 0), value=self.pad_token_id)
        self.width += columns
        self.starts = self.starts + columns
        self.ends = self.ends + columns

    def drop_rows(self, rows: list[int]) -> torch.Tensor | None:
        """Let rows decode no longer; returns the row indices [R'] of those that go on, None if all do."""
        leaving = set(rows)
        if not leaving:
            return None
        keep_indices = [index for index, row in enumerate(self.rows) if row not in leaving]
        self._set_rows([self.rows[index] for index in keep_indices])
        return to_device_async(keep_indices, self.ids.device, torch.int64)

    def add_rows(self, new_rows: Iterable[int]) -> torch.Tensor:
        """Have more rows decode, which had left or are new; `admit` then gives them prompts.

        Returns:
            [R'] int64: the row indices that all decoding rows had before; 0 for those that had none.
        """
        previous_indices = {row: index for index, row in enumerate(self.rows)}
        rows = sorted({*self.rows, *new_rows})
        more = max(0, rows[-1] + 1 - len(self.row_states))
        self.row_states += [RowState() for _ in range(more)]
        self.counts += [0] * more
        self.ids = torch.nn.functional.pad(self.ids, (0, 0, 0, more), value=self.pad_token_id)
        self.starts = torch.nn.functional.pad(self.starts, (0, more), value=self.width)
        self._set_rows(rows)
        return to_device_async([previous_indices.get(row, 0) for row in rows], self.ids.device, torch.int64)

    def output(self, columns: int) -> torch.Tensor:
        """Prompts and the first `columns` emitted columns, padded after each row's end: [B, L + columns]."""
        sequences = self.prefix(columns)
        # candidates that were drafted and not judged may stand after the end of a row
        ends = self.width + torch.tensor(self.counts, device=sequences.device)
        index = torch.arange(sequences.shape[1], device=sequences.device)
        return sequences.masked_fill(index >= ends[:, None], self.pad_token_id)


def _with_next_token(draft: Draft, verdict: Verdict) -> torch.Tensor:
    """[R, K + 1], the candidates of each row, and in place of the first that was not accepted the token after them."""
    next_token, candidates = verdict.next_token[:, None], draft.tokens
    if not candidates.shape[1]:
        return next_token
    if verdict.path_nodes is not None:
        candidates = at_nodes(torch.nn.functional.pad(candidates, (1, 0)), verdict.path_nodes)[:, 1:]
    return torch.nn.functional.pad(candidates, (0, 1)).scatter(1, verdict.accepted[:, None], next_token)


def _of_candidates(values: list[list[float]], chain: Draft) -> list[list[float]]:
    """The values of each row at its own candidates, without those of fillers."""
    return [of_row[:length] for of_row, length in zip(values, chain.lengths, strict=True)]


class HostVerdict(NamedTuple):
    """What a round reads back from the device, with an entry for each of the R rows.

    Attributes:
        tokens: ids [K + 1], of which the accepted ones and the next are new.
        accepted, prefix_acceptance, overlap, undefined: as in `Verdict`.
        stop_flags: as `Stopping.stop_flags` gives them.
        accepted_candidates: the numbers of these in the draft.
    """

    tokens: list[list[int]]
    accepted: list[int]
    prefix_acceptance: list[list[float]]
    overlap: list[list[float]]
    undefined: list[list[bool]]
    stop_flags: list[list[bool]]
    accepted_candidates: list[list[int]]


def _read_back(tokens: torch.Tensor, verdict: Verdict, stop_flags: torch.Tensor) -> HostVerdict:
    """A verdict as lists. A round waits for the device here alone, so that all goes in one transfer.

    Args:
        tokens: [R, K + 1], as in `HostVerdict`.
        stop_flags: [R, n] bool.
    """
    path_nodes = tokens[:, :0] if verdict.path_nodes is None else verdict.path_nodes
    ids, numbers_accepted, acceptance, overlap, undefined, flags, paths = _as_lists(
        tokens,
        verdict.accepted[:, None],
        verdict.prefix_acceptance,
        verdict.overlap,
        verdict.undefined,
        stop_flags,
        path_nodes,
    )
    accepted = [number for (number,) in numbers_accepted]
    accepted_candidates = [list(range(number)) for number in accepted]
    if verdict.path_nodes is not None:
        pairs = zip(paths, accepted, strict=True)
        accepted_candidates = [[node - 1 for node in path[1 : 1 + number]] for path, number in pairs]
    return HostVerdict(ids, accepted, acceptance, overlap, undefined, flags, accepted_candidates)


def _as_lists(*parts: torch.Tensor) -> list[list[list[Any]]]:
    """Tensors [R, n] of several widths as lists, by one transfer from the device.

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
