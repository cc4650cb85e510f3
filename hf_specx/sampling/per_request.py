"""Processors and stopping criteria of a batch whose rows are requests of their own, each as in a batch of one.

`generate` is asked to prepare each request alone, so that whatever counts tokens, leaves pads out or reads lengths
finds what it would find there. Rows with equal processors are computed together, where columns of each row are counted
as in its own text; any other processor is shown the text of its row alone, without pads.
"""

from collections import ChainMap
from collections.abc import Hashable, Sequence, Set
from functools import cached_property
from typing import Any, NamedTuple

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor

from hf_specx.common.batch import Batch, Row
from hf_specx.common.devices import to_device_async
from hf_specx.common.round import Draft

from .processors import NO_LIMIT, OF_TEXT, SYNTHID, WARPERS, Positions, Processor, Processors, TopTokensWarper, warp
from .stopping import Stopping
from .vectorized import Prefixes


# of processors that ask only how long a text is: the settings of which the sum is a length
LENGTHS: dict[type[LogitsProcessor], tuple[str, ...]] = {
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
TOGETHER = (OF_WHOLE_TEXT | LENGTHS.keys() | {SYNTHID}) & OF_TEXT.keys()


class RowProcessors(Processors):
    """The processors of one row, for a batch of one.

    Attributes:
        settings: of each in `applied`, equal for those that do the same; None for one that is not compared.
        num_of_text: how many of them come before the warpers at the end.
    """

    def __init__(self, processors: Sequence[Processor], eos_token_ids: Set[int] = frozenset()):
        super().__init__(processors, eos_token_ids)
        self.settings = [settings_of(processor) for processor in self.applied]
        of_text = [not _is_warper(processor) for processor in self.applied]
        self.num_of_text = max((number for number, flag in enumerate(of_text, 1) if flag), default=0)


class Group(NamedTuple):
    """Some of the decoding rows, with processors that do the same.

    Attributes:
        indices: their row indices; `selection` is the same as a tensor, None if these are all rows.
        processors: one of each row; empty if none follows there.
        shifts: of each row, the column of the batch from which its processor counts columns; None if it counts none.
    """

    indices: list[int]
    selection: torch.Tensor | None
    processors: list[Any]
    shifts: tuple[int, ...] | None


class Step(NamedTuple):
    """One processor of each row: groups that together are all rows; `order` [R] brings their rows into place."""

    groups: list[Group]
    order: torch.Tensor | None


class Plan(NamedTuple):
    """What is computed together, for these decoding rows with prompts of `width` columns.

    `cache` is what processors have computed once, as long as these are the rows.
    """

    rows: list[Row]
    width: int
    steps: list[Step]
    cache: dict[Hashable, Any]


class GroupPrefixes(Prefixes):
    """The prefixes of the rows of a group; columns are counted from those of `group.shifts` on."""

    def __init__(self, batch: Batch, group: Group, ahead: int, positions: int, cache: dict[Hashable, Any]):
        assert group.shifts is not None
        self.batch, self.ahead, self.positions, self.cache = batch, ahead, positions, cache
        self.group = group
        self.num_rows = len(batch.table)
        self.row_numbers = batch.index if group.selection is None else batch.index[group.selection]
        lengths = []
        for index, shift in zip(group.indices, group.shifts, strict=True):
            lengths.append(batch.width + batch.counts[batch.rows[index]] - shift)
        self.shortest = min(lengths) + ahead
        self.longest = max(lengths) + ahead + positions - 1
        self.read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what `tokens` gave, by its start

    @cached_property
    def shift(self) -> int | torch.Tensor:
        """The shift of all rows, or of each as [R, 1]."""
        shifts = self.group.shifts
        assert shifts is not None
        if len(set(shifts)) == 1:
            return shifts[0]
        key = "shifts", shifts
        return self.cached(key, lambda: to_device_async(shifts, self.row_numbers.device, torch.int64)[:, None])

    def _columns(self, first: int, count: int) -> torch.Tensor:
        """[R, count], the columns of the batch from `first` after the end of each row on."""
        columns = self.batch.columns(first, count)
        return columns if self.group.selection is None else columns[self.group.selection]

    @cached_property
    def lengths(self) -> torch.Tensor:
        return self._columns(self.ahead, self.positions) - self.shift

    def last(self, count: int) -> torch.Tensor:
        self.batch.reserve(self.ahead + self.positions)
        columns = self._columns(self.ahead - count, count + self.positions - 1)
        return self.batch.ids[self.row_numbers[:, None], columns.clamp_(min=0)].unfold(1, count, 1)

    def tokens(self, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        if start not in self.read:
            self.batch.reserve(self.ahead + self.positions - 1)
            columns = torch.arange(start, self.longest, device=self.row_numbers.device)
            # what lies behind the end of a row is not counted by anyone
            places = (columns[None] + self.shift).clamp_(max=self.batch.ids.shape[1] - 1)
            self.read[start] = self.batch.ids[self.row_numbers[:, None], places], columns
        return self.read[start]


class RequestProcessors(Processors):
    """The processors of requests, each applied to the logits of its own row.

    Of each row they are applied in their order; the n-th ones of all rows are one step, in which those with equal
    settings are called together, once for all of their rows. Warpers at the end are steps of their own.
    """

    def __init__(self, table: Sequence[Row], eos_token_ids: Set[int], limit: tuple[int, str] = NO_LIMIT):
        """`table` has the rows of the batch, with their `RowProcessors`; `limit` as in `Processors`."""
        self.table, self.eos_token_ids, self.limit = table, eos_token_ids, limit
        self.applied: list[Any] = []
        self.prefix_errors = ChainMap[tuple[int, int], Exception]()
        self.plan: Plan | None = None

    @property
    def max_rollback(self) -> int:  # type: ignore[override]
        """Of the rows that are in the batch now."""
        return min(self.limit[0], *(row.processors.max_rollback for row in self.table))

    @property
    def limited_by(self) -> str:  # type: ignore[override]
        """What `max_rollback` is of."""
        limits = [(row.processors.max_rollback, row.processors.limited_by) for row in self.table]
        return min(self.limit, *limits)[1]

    @property
    def mask_size(self) -> int:  # type: ignore[override]
        """Of the rows that are in the batch now."""
        return max(row.processors.mask_size for row in self.table)

    def __call__(self, batch: Batch, draft: Draft | None, logits: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        self.prefix_errors.clear()
        batch.reserve(ahead + logits.shape[1])
        rows = [batch.table[row] for row in batch.rows]
        if self.plan is None or self.plan.width != batch.width or self.plan.rows != rows:
            self.plan = make_plan(batch)
        scores = logits.float()
        prefixes: dict[Hashable, GroupPrefixes] = {}
        for step in self.plan.steps:
            parts = [self._apply(group, batch, draft, scores, ahead, prefixes) for group in step.groups]
            scores = parts[0] if step.order is None else torch.cat(parts)[step.order]
        return scores

    def _apply(
        self,
        group: Group,
        batch: Batch,
        draft: Draft | None,
        scores: torch.Tensor,
        ahead: int,
        prefixes: dict[Hashable, GroupPrefixes],
    ) -> torch.Tensor:
        """Scores of the rows of a group after its processors, from those of all rows [R, P, V]."""
        assert self.plan is not None
        if group.selection is not None:
            scores = scores[group.selection]
        if not group.processors:
            return scores
        processor, result = group.processors[0], None
        if group.shifts is not None:
            key = tuple(group.indices), group.shifts
            if key not in prefixes:
                prefixes[key] = GroupPrefixes(batch, group, ahead, scores.shape[1], self.plan.cache)
            result = OF_TEXT[type(processor)](processor, prefixes[key], scores)
        elif _is_warper(processor):
            result = warp([processor], scores.flatten(0, 1)).view_as(scores)
        if result is not None:
            return result
        alone = []
        for index, processor, row_scores in zip(group.indices, group.processors, scores.split(1), strict=True):
            alone.append(self._alone(processor, batch, index, draft, row_scores, ahead))
        return torch.cat(alone)

    def _alone(
        self, processor: Any, batch: Batch, index: int, draft: Draft | None, scores: torch.Tensor, ahead: int
    ) -> torch.Tensor:
        """Scores [1, P, V] of one row after a processor that is shown no other row."""
        row = batch.rows[index]
        processors = batch.table[row].processors
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
            of_row = batch.table[row].processors.allowed(batch.row_view(row), ahead, [is_wanted])
            if of_row is None:  # a request without masks goes on as it does where no other has any
                masks.append(torch.ones(mask_size, dtype=torch.bool, device="cpu") if is_wanted else None)
            else:
                masks.append(of_row[0])
        return masks


def make_plan(batch: Batch) -> Plan:
    """What is computed together for the decoding rows of a batch."""
    rows = [batch.table[row] for row in batch.rows]
    of_text = [row.processors.num_of_text for row in rows]
    warpers = [len(row.processors.applied) - number for row, number in zip(rows, of_text, strict=True)]
    # which processor of each row a step has; None in rows where none is left
    steps: list[list[int | None]] = []
    for number in range(max(of_text)):
        steps.append([number if number < count else None for count in of_text])
    for number in range(max(warpers)):
        places = zip(of_text, warpers, strict=True)
        steps.append([first + number if number < count else None for first, count in places])
    return Plan(rows, batch.width, [_step(batch, rows, places) for places in steps], {})


def _step(batch: Batch, rows: list[Row], places: list[int | None]) -> Step:
    """The step that has of each row the processor at one of the `places` [R] in its list."""
    members: dict[Hashable, list[int]] = {}
    for index, (row, place) in enumerate(zip(rows, places, strict=True)):
        if place is None:
            settings: Hashable = "no processor"
        else:
            settings = row.processors.settings[place] or "not compared"
        members.setdefault(settings, []).append(index)
    groups, device = [], batch.index.device
    for indices in members.values():
        selection = None if len(indices) == len(rows) else to_device_async(indices, device, torch.int64)
        processors = []
        for index in indices:
            place = places[index]
            if place is not None:
                processors.append(rows[index].processors.applied[place])
        pads = [_pads(batch, rows[index]) for index in indices]
        groups.append(Group(indices, selection, processors, _shifts(processors, pads)))
    if len(groups) == 1:
        return Step(groups, None)
    joined = [index for group in groups for index in group.indices]
    return Step(groups, to_device_async([joined.index(index) for index in range(len(rows))], device, torch.int64))


def _pads(batch: Batch, row: Row) -> int:
    """How many columns of a batch there are before a row's first token."""
    return batch.width - row.prompt_length


def _shifts(processors: list[Any], pads: list[int]) -> tuple[int, ...] | None:
    """From which columns rows with so many `pads` count, so that equal processors give each row what its own would."""
    kind = type(processors[0]) if processors else None
    if kind in OF_WHOLE_TEXT:
        return tuple(pads)
    if kind in LENGTHS:
        # all go by the length of the first one, so that the columns of a row are moved by what its own differs
        lengths = [sum(getattr(processor, name) for name in LENGTHS[kind]) for processor in processors]
        return tuple(number + length - lengths[0] for number, length in zip(pads, lengths, strict=True))
    return (0,) * len(pads) if kind is SYNTHID else None  # which reads emitted tokens alone, behind all prompts


def settings_of(processor: Any) -> Hashable | None:
    """What is equal for processors that give the same, but for their lengths; None for types that are not compared.

    A setting that cannot be compared is equal to itself alone.
    """
    kind = type(processor)
    if kind is TopTokensWarper:
        return kind, tuple(map(settings_of, processor.warpers))
    if kind not in TOGETHER and kind not in WARPERS:
        return None
    lengths = LENGTHS.get(kind, ())
    return kind, tuple((name, _value(value)) for name, value in vars(processor).items() if name not in lengths)


def _value(value: Any) -> Hashable:
    """Something that is equal for equal values."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()
        return value.dtype, tuple(value.shape), data
    if isinstance(value, dict):
        return "dict", tuple((_value(key), _value(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(_value, value))
    if value is None or isinstance(value, int | float | str | torch.device | torch.dtype):
        return type(value).__name__, value
    return "object", id(value)


def _is_warper(processor: Any) -> bool:
    return type(processor) in WARPERS or isinstance(processor, TopTokensWarper)


class RequestStopping(Stopping):
    """When rows end that are requests of their own: each at its own limit, by its own criteria, or at an end token."""

    pads_finished_rows = True

    def __init__(self, eos_token_ids: set[int], max_new_tokens: int):
        self.eos_token_ids, self.max_new_tokens = eos_token_ids, max_new_tokens

    def eos_token_ids_of(self, row: Row) -> set[int]:
        ids: set[int] = row.stopping.eos_token_ids
        return ids

    def warn_beyond_positions(self, row: Row, emitted: int) -> None:
        row.stopping.warn_beyond_positions(row, emitted)

    def _reads_text(self, batch: Batch) -> bool:
        return any(batch.table[row].stopping.criteria for row in batch.rows)

    def _stops(self, batch: Batch, numbers: list[int], most: int) -> torch.Tensor:
        stops = torch.zeros(len(numbers), most, dtype=torch.bool, device=batch.ids.device)
        for index, (row, number) in enumerate(zip(batch.rows, numbers, strict=True)):
            criteria = batch.table[row].stopping.criteria
            if criteria:
                text, count = batch.row_view(row), batch.counts[row]
                for n in range(number):
                    stops[index, n] = criteria(text.prefix(count + n + 1), None)[0]
        return stops
