"""Processors and stopping criteria of a batch whose rows are requests of a queue, each as in a batch of one.

`generate` has prepared each request by itself, so each row has processors and criteria of its own, whose settings of
length are for its own prompt. To call them row by row would be slow. So rows are grouped: where the n-th processor of
several rows is the same but for lengths, it is called once for all of them, and the columns of each row are counted
from where its own text begins. A processor that cannot be compared is called for its row by itself, without pads. Say

    row 0: repetition penalty 1.2, temperature 0.8
    row 1: repetition penalty 1.2, no repeated 3-grams, temperature 0.8
    row 2: repetition penalty 1.5, temperature 0.8

Then stage 1 has the groups {0, 1} and {2}, stage 2 has {1} and, without a processor, {0, 2}; warpers at the end of the
lists have stages of their own, so that stage 3 has one group {0, 1, 2}. These stages are a `GroupingPlan`, which is
made anew only where other rows decode.
"""

from collections import ChainMap
from collections.abc import Hashable, Sequence, Set
from functools import cached_property
from typing import Any, NamedTuple

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor

from hf_specx.common.batch import Batch, RowState
from hf_specx.common.devices import to_device_async
from hf_specx.common.round import Draft

from .processors import (
    ALL_VECTORIZED,
    NO_LIMIT,
    SYNTHID,
    WARPERS,
    Positions,
    Processor,
    Processors,
    TopTokensWarper,
    warp,
)
from .stopping import Stopping
from .vectorized import Prefixes, PrefixNodes


# processors that ask only how long a text is, with the settings whose sum is the length that they compare it with
LENGTH_SETTINGS: dict[type[LogitsProcessor], tuple[str, ...]] = {
    logits_process.MinLengthLogitsProcessor: ("min_length",),
    logits_process.MinNewTokensLengthLogitsProcessor: ("prompt_length_to_skip", "min_new_tokens"),
    logits_process.SuppressTokensAtBeginLogitsProcessor: ("begin_index",),
    logits_process.ForcedEOSTokenLogitsProcessor: ("max_length",),
    logits_process.ExponentialDecayLengthPenalty: ("regulation_start",),
}
# those that read the text from its first token on
OF_WHOLE_TEXT = frozenset(
    {
        logits_process.RepetitionPenaltyLogitsProcessor,
        logits_process.NoRepeatNGramLogitsProcessor,
        logits_process.SequenceBiasLogitsProcessor,
        logits_process.NoBadWordsLogitsProcessor,
        logits_process.SuppressTokensLogitsProcessor,
        logits_process.ForcedBOSTokenLogitsProcessor,
    }
)
GROUPABLE = (OF_WHOLE_TEXT | LENGTH_SETTINGS.keys() | {SYNTHID}) & ALL_VECTORIZED.keys()


class RowProcessors(Processors):
    """The processors of one row, for a batch of one.

    Attributes:
        settings: of each in `applied`, equal for those that do the same; None for one that cannot be compared.
        num_before_warpers: how many of them come before the warpers at the end.
    """

    def __init__(self, processors: Sequence[Processor], eos_token_ids: Set[int] = frozenset()):
        super().__init__(processors, eos_token_ids)
        self.settings = [comparison_key(processor) for processor in self.applied]
        self.num_before_warpers = len(self.applied)
        while self.num_before_warpers and _is_warper(self.applied[self.num_before_warpers - 1]):
            self.num_before_warpers -= 1


class RowGroup(NamedTuple):
    """Rows whose processors of one stage do the same.

    Attributes:
        indices: their row indices; `selection` is the same as a tensor, None if these are all rows.
        processors: one for each of these rows; empty if they have none in this stage.
        first_columns: for each row the column of the batch that its processor counts as column 0; None if
            such processors count no columns.
    """

    indices: list[int]
    selection: torch.Tensor | None
    processors: list[Any]
    first_columns: tuple[int, ...] | None


class Stage(NamedTuple):
    """One processor of each row at most.

    Attributes:
        groups: which together have all decoding rows.
        order: [R], the indices that bring the joined rows of all groups into the order of the batch; None if there is
            one group.
    """

    groups: list[RowGroup]
    order: torch.Tensor | None


class GroupingPlan(NamedTuple):
    """The stages of a batch, as long as the same rows decode.

    Attributes:
        row_states: of the decoding rows.
        width: columns of the prompts.
        stages: in the order in which they are applied.
        cache: what processors have computed once for these rows.
    """

    row_states: list[RowState]
    width: int
    stages: list[Stage]
    cache: dict[Hashable, Any]


class GroupPrefixes(Prefixes):
    """The prefixes of the rows of a group, with columns counted from `group.first_columns` on."""

    def __init__(self, batch: Batch, group: RowGroup, ahead: int, positions: int, cache: dict[Hashable, Any]):
        assert group.first_columns is not None
        self.batch, self.ahead, self.positions, self.cache = batch, ahead, positions, cache
        self.group = group
        self.num_rows = len(batch.row_states)
        self.row_numbers = batch.index if group.selection is None else batch.index[group.selection]
        lengths = []
        for index, first_column in zip(group.indices, group.first_columns, strict=True):
            lengths.append(batch.width + batch.counts[batch.rows[index]] - first_column)
        fewest, most = self.candidates_before
        self.shortest, self.longest = min(lengths) + fewest, max(lengths) + most
        self.tokens_by_start: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what `tokens` has returned

    @cached_property
    def first_column(self) -> int | torch.Tensor:
        """`first_columns` as one number, if it is that of all rows, else as [R, 1]."""
        first_columns = self.group.first_columns
        assert first_columns is not None
        if len(set(first_columns)) == 1:
            return first_columns[0]
        device = self.row_numbers.device
        key = "first columns", first_columns
        return self.cached(key, lambda: to_device_async(first_columns, device, torch.int64)[:, None])

    def _columns(self, first: int, count: int) -> torch.Tensor:
        """`Batch.columns` of the rows of the group."""
        columns = self.batch.columns(first, count)
        return columns if self.group.selection is None else columns[self.group.selection]

    @cached_property
    def nodes(self) -> PrefixNodes | None:
        nodes = super().nodes
        if nodes is None or self.group.selection is None:
            return nodes
        return PrefixNodes(*(x[self.group.selection] for x in nodes))

    @cached_property
    def lengths(self) -> torch.Tensor:
        return super().lengths - self.first_column

    def tokens(self, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        if start not in self.tokens_by_start:
            self.batch.reserve(self.ahead + self.positions - 1)
            columns = torch.arange(start, self.longest, device=self.row_numbers.device)
            # beyond the end of a row any token will do, since no prefix is that long
            batch_columns = (columns[None] + self.first_column)[:, None]
            if self.nodes is not None:
                end = self._end[..., None]
                batch_columns = end + self.nodes.behind_end((batch_columns - end).expand(-1, self.positions, -1))
            batch_columns = batch_columns.clamp(max=self.batch.ids.shape[1] - 1)
            self.tokens_by_start[start] = self.batch.ids[self.row_numbers[:, None, None], batch_columns], columns
        return self.tokens_by_start[start]


class RequestProcessors(Processors):
    """The processors of all rows of a queue's batch, each applied to the logits of its own row, stage by stage."""

    def __init__(self, batch: Batch, eos_token_ids: Set[int], limit: tuple[int, str] = NO_LIMIT):
        """Each `RowState` of the batch has its `RowProcessors`; `limit` is as in `Processors`."""
        self.batch, self.eos_token_ids, self.limit = batch, eos_token_ids, limit
        self.applied: list[Any] = []
        self.prefix_errors = ChainMap[tuple[int, tuple[int, ...]], Exception]()
        self.plan: GroupingPlan | None = None

    @property
    def of_rows(self) -> list[RowProcessors]:
        """The processors of each row that decodes; those of rows that have left limit nobody."""
        return [self.batch.row_states[row].processors for row in self.batch.rows]

    @property
    def max_rollback(self) -> int:  # type: ignore[override]
        """The least of all rows."""
        return min(self.limit[0], *(processors.max_rollback for processors in self.of_rows))

    def max_rollback_of(self, row: int) -> int:
        return min(self.limit[0], self.batch.row_states[row].processors.max_rollback)

    @property
    def limited_by(self) -> str:  # type: ignore[override]
        """What has the least `max_rollback`, as in `Processors`."""
        limits = [(processors.max_rollback, processors.limited_by) for processors in self.of_rows]
        return min(self.limit, *limits)[1]

    @property
    def mask_size(self) -> int:  # type: ignore[override]
        """The largest of all rows."""
        return max(processors.mask_size for processors in self.of_rows)

    def __call__(self, batch: Batch, draft: Draft | None, logits: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        self.prefix_errors.clear()
        batch.reserve(ahead + logits.shape[1])
        row_states = [batch.row_states[row] for row in batch.rows]
        if self.plan is None or self.plan.width != batch.width or self.plan.row_states != row_states:
            self.plan = make_plan(batch)
        scores = logits.float()
        prefixes: dict[Hashable, GroupPrefixes] = {}
        for stage in self.plan.stages:
            parts = [self._apply_to_group(group, batch, draft, scores, ahead, prefixes) for group in stage.groups]
            scores = parts[0] if stage.order is None else torch.cat(parts)[stage.order]
        return scores

    def _apply_to_group(
        self,
        group: RowGroup,
        batch: Batch,
        draft: Draft | None,
        scores: torch.Tensor,
        ahead: int,
        prefixes: dict[Hashable, GroupPrefixes],
    ) -> torch.Tensor:
        """Scores of the rows of a group after its processors, from those of all rows [R, P, V].

        `prefixes` has those of groups that were made for these positions before.
        """
        if group.selection is not None:
            scores = scores[group.selection]
        if not group.processors:
            return scores
        at_once = self._apply_at_once(group, batch, scores, ahead, prefixes)
        if at_once is not None:
            return at_once
        parts = []
        for index, processor, row_scores in zip(group.indices, group.processors, scores.split(1), strict=True):
            parts.append(self._apply_to_row(processor, batch, index, draft, row_scores, ahead))
        return torch.cat(parts)

    def _apply_at_once(
        self,
        group: RowGroup,
        batch: Batch,
        scores: torch.Tensor,
        ahead: int,
        prefixes: dict[Hashable, GroupPrefixes],
    ) -> torch.Tensor | None:
        """Scores [r, P, V] of the rows of a group by its first processor, which stands for all of them.

        None where they cannot be compared, or `vectorized` leaves the call to the processors themselves.
        """
        assert self.plan is not None
        processor = group.processors[0]
        if group.first_columns is not None:
            key = tuple(group.indices), group.first_columns
            if key not in prefixes:
                prefixes[key] = GroupPrefixes(batch, group, ahead, scores.shape[1], self.plan.cache)
            return ALL_VECTORIZED[type(processor)](processor, prefixes[key], scores)
        if _is_warper(processor):
            return warp([processor], scores.flatten(0, 1)).view_as(scores)
        return None

    def _apply_to_row(
        self, processor: Any, batch: Batch, index: int, draft: Draft | None, scores: torch.Tensor, ahead: int
    ) -> torch.Tensor:
        """Scores [1, P, V] of one row, by its row index, after a processor that is called for this row by itself."""
        row = batch.rows[index]
        processors = batch.row_states[row].processors
        if draft is not None:
            draft = draft._replace(lengths=[draft.lengths[index]])
        scores = Positions(processors, batch.row_view(row), draft, ahead, scores.shape[1]).apply(processor, scores)
        self.prefix_errors.update({(row, emitted): error for (_, emitted), error in processors.prefix_errors.items()})
        return scores

    def allowed(self, batch: Batch, ahead: int, wanted: Sequence[bool]) -> list[torch.Tensor | None] | None:
        mask_size = self.mask_size
        if not mask_size:
            return None
        masks: list[torch.Tensor | None] = []
        for row, is_wanted in zip(batch.rows, wanted, strict=True):
            of_row = batch.row_states[row].processors.allowed(batch.row_view(row), ahead, [is_wanted])
            if of_row is None:  # this row has no masks, while others have
                masks.append(torch.ones(mask_size, dtype=torch.bool, device="cpu") if is_wanted else None)
            else:
                masks.append(of_row[0])
        return masks


def make_plan(batch: Batch) -> GroupingPlan:
    """The stages in which the processors of the decoding rows of a batch are called."""
    row_states = [batch.row_states[row] for row in batch.rows]
    before_warpers = [range(row_state.processors.num_before_warpers) for row_state in row_states]
    warpers = []
    for row_state in row_states:
        warpers.append(range(row_state.processors.num_before_warpers, len(row_state.processors.applied)))
    stages = []
    for part in (before_warpers, warpers):
        for number in range(max(map(len, part))):
            numbers = [of_row[number] if number < len(of_row) else None for of_row in part]
            stages.append(_stage(batch, row_states, numbers))
    return GroupingPlan(row_states, batch.width, stages, {})


def _stage(batch: Batch, row_states: list[RowState], numbers: list[int | None]) -> Stage:
    """The stage that has of each row the processor with its number [R] in the row's list; None for no processor."""
    indices_by_settings: dict[Hashable, list[int]] = {}  # row indices
    for index, (row_state, number) in enumerate(zip(row_states, numbers, strict=True)):
        if number is None:
            settings: Hashable = "no processor"
        else:
            settings = row_state.processors.settings[number] or "not compared"
        indices_by_settings.setdefault(settings, []).append(index)
    groups = [_group(batch, row_states, numbers, indices) for indices in indices_by_settings.values()]
    if len(groups) == 1:
        return Stage(groups, None)
    joined = [index for group in groups for index in group.indices]
    order = [joined.index(index) for index in range(len(row_states))]
    return Stage(groups, to_device_async(order, batch.index.device, torch.int64))


def _group(batch: Batch, row_states: list[RowState], numbers: list[int | None], indices: list[int]) -> RowGroup:
    """The rows at these row indices as one group of a stage, which has the processors with these `numbers` [R]."""
    is_all = len(indices) == len(row_states)
    selection = None if is_all else to_device_async(indices, batch.index.device, torch.int64)
    processors = []
    for index in indices:
        number = numbers[index]
        if number is not None:
            processors.append(row_states[index].processors.applied[number])
    pads = [batch.width - row_states[index].prompt_length for index in indices]
    return RowGroup(indices, selection, processors, _first_columns(processors, pads))


def _first_columns(processors: list[Any], pads: list[int]) -> tuple[int, ...] | None:
    """`RowGroup.first_columns` of rows with so many pads: the first processor is then right for all of them."""
    kind = type(processors[0]) if processors else None
    if kind in OF_WHOLE_TEXT:
        return tuple(pads)
    if kind in LENGTH_SETTINGS:
        # the first processor is called for all: a row whose own waits for n columns more starts to count n later
        lengths = [sum(getattr(processor, name) for name in LENGTH_SETTINGS[kind]) for processor in processors]
        return tuple(number + length - lengths[0] for number, length in zip(pads, lengths, strict=True))
    return (0,) * len(pads) if kind is SYNTHID else None  # which reads emitted tokens alone, behind all prompts


def comparison_key(processor: Any) -> Hashable | None:
    """A key that is equal for processors that give the same, but for lengths; None for types that are not compared.

    A setting that cannot be compared is equal to itself alone.
    """
    kind = type(processor)
    if kind is TopTokensWarper:
        return kind, tuple(map(comparison_key, processor.warpers))
    if kind not in GROUPABLE and kind not in WARPERS:
        return None
    ignored = LENGTH_SETTINGS.get(kind, ())
    return kind, tuple((name, _key_of(value)) for name, value in vars(processor).items() if name not in ignored)


def _key_of(value: Any) -> Hashable:
    """A key that is equal for equal values."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()
        return value.dtype, tuple(value.shape), data
    if isinstance(value, dict):
        return "dict", tuple((_key_of(key), _key_of(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(_key_of, value))
    if value is None or isinstance(value, int | float | str | torch.device | torch.dtype):
        return type(value).__name__, value
    return "object", id(value)


def _is_warper(processor: Any) -> bool:
    return type(processor) in WARPERS or isinstance(processor, TopTokensWarper)


class RequestStopping(Stopping):
    """Decides where the rows of a queue end: each at its own limit, by its own criteria, or at an end token.

    What a row has of its own is in `RowState.limit` and `RowState.stopping`; a request always ends by itself.
    """

    has_eos_stopping_criteria = True

    def __init__(self, eos_token_ids: set[int], max_new_tokens: int):
        """`eos_token_ids` are those of all requests; `max_new_tokens` is the largest of their limits."""
        self.eos_token_ids, self.max_new_tokens = eos_token_ids, max_new_tokens

    def eos_token_ids_of(self, row_state: RowState) -> set[int]:
        ids: set[int] = row_state.stopping.eos_token_ids
        return ids

    def warn_beyond_positions(self, row_state: RowState, emitted: int) -> None:
        row_state.stopping.warn_beyond_positions(row_state, emitted)

    def _has_text_criteria(self, batch: Batch) -> bool:
        return any(batch.row_states[row].stopping.criteria for row in batch.rows)

    def _call_criteria(self, batch: Batch, num_new: list[int], num_positions: int) -> torch.Tensor:
        stops = torch.zeros(len(num_new), num_positions, dtype=torch.bool, device=batch.ids.device)
        for index, (row, number) in enumerate(zip(batch.rows, num_new, strict=True)):
            criteria = batch.row_states[row].stopping.criteria
            if criteria:
                row_view, count = batch.row_view(row), batch.counts[row]
                for position in range(number):
                    stops[index, position] = criteria(row_view.prefix(count + position + 1), None)[0]
        return stops
