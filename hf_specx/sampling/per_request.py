"""Processors and stopping criteria of a batch whose rows are requests of their own, each as in a batch of one.

`generate` is asked to prepare each request alone, so that whatever counts tokens, leaves pads out or reads lengths
finds what it would find there. Here each row is shown its own text without pads.
"""

from collections.abc import Sequence, Set
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft

from .processors import NO_LIMIT, WARPERS, Processor, Processors, in_runs, warp
from .stopping import Stopping


class RequestProcessors(Processors):
    """The processors of requests, each applied to the logits of its own row.

    Warpers that follow all others read scores only; where all rows are `alike`, with the settings of the call and none
    of their own, they are called once for all rows.
    """

    def __init__(
        self,
        own: Sequence[Sequence[Processor]],
        ends: Set[int],
        alike: Sequence[bool],
        limit: tuple[int, str] = NO_LIMIT,
    ):
        super().__init__([], ends)
        self.limit = limit
        self.own = [Processors([]) for _ in own]
        self.warpers: list[list[Any]] = [[] for _ in own]  # of each row, those after its `own`
        self.alike = list(alike)
        for row, (processors, is_alike) in enumerate(zip(own, alike, strict=True)):
            self.admit(row, processors, is_alike)

    def admit(self, row: int, processors: Sequence[Processor], alike: bool) -> None:
        """A new request has the place of a row."""
        last = max((n for n, processor in enumerate(processors, 1) if type(processor) not in WARPERS), default=0)
        self.own[row] = Processors(processors[:last], self.ends)
        self.warpers[row], self.alike[row] = in_runs(processors[last:]), alike
        self.max_rollback, self.limited_by = min(self.limit, *((one.max_rollback, one.limited_by) for one in self.own))
        self.mask_size = max(one.mask_size for one in self.own)

    def __call__(self, batch: Batch, draft: Draft | None, logits: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        self.barred.clear()
        scores: torch.Tensor | list[torch.Tensor] = logits.float()
        if any(self.own[row].applied for row in batch.rows):
            batch.reserve(ahead + logits.shape[1])
            scores = [self._alone(batch, index, draft, logits, ahead) for index in range(len(batch.rows))]
        if all(self.alike[row] for row in batch.rows):
            together = scores if isinstance(scores, torch.Tensor) else torch.stack(scores)
            return warp(self.warpers[batch.rows[0]], together.flatten(0, 1)).view_as(together)
        return torch.stack([warp(self.warpers[row], one) for row, one in zip(batch.rows, scores, strict=True)])

    def _alone(self, batch: Batch, index: int, draft: Draft | None, logits: torch.Tensor, ahead: int) -> torch.Tensor:
        """Scores [P, V] of one row after the processors that do not serve all rows at once."""
        row = batch.rows[index]
        if draft is not None:
            draft = draft._replace(lengths=[draft.lengths[index]])
        scores = self.own[row](batch.alone(row), draft, logits[index : index + 1], ahead)
        self.barred.update({(row, emitted): error for (_, emitted), error in self.own[row].barred.items()})
        return scores[0]

    def allowed(self, batch: Batch, ahead: int, wanted: Sequence[bool]) -> list[torch.Tensor | None] | None:
        if not self.mask_size:
            return None
        found = []
        for row, is_wanted in zip(batch.rows, wanted, strict=True):
            masks = self.own[row].allowed(batch.alone(row), ahead, [is_wanted])
            if masks is None:  # a request without masks goes on as it does where no other has any
                masks = [torch.ones(self.mask_size, dtype=torch.bool, device="cpu") if is_wanted else None]
            found.append(masks[0])
        return found


class RequestStopping(Stopping):
    """When rows end that are requests of their own: each at its own limit, by its own criteria, or at an end token."""

    def __init__(self, own: Sequence[Stopping]):
        self.own, self.ends = list(own), own[0].ends
        self.pads_finished_rows, self.stopped_at, self.dead_ends = True, {}, {}

    @property
    def criteria(self) -> StoppingCriteriaList:  # type: ignore[override]
        """Those of all rows."""
        return StoppingCriteriaList(criterion for one in self.own for criterion in one.criteria)

    @property
    def max_new_tokens(self) -> int:  # type: ignore[override]
        return max(one.max_new_tokens for one in self.own)

    def admit(self, row: int, stopping: Stopping) -> None:
        """A new request has the place of a row."""
        self.own[row] = stopping
        self.stopped_at.pop(row, None)

    def remind(self, row: int, emitted: int) -> None:
        self.own[row].remind(row, emitted)

    def _stops(self, batch: Batch, new: list[int], most: int) -> torch.Tensor:
        stops = torch.zeros(len(new), most, dtype=torch.bool, device=batch.ids.device)
        for index, (row, number) in enumerate(zip(batch.rows, new, strict=True)):
            if criteria := self.own[row].criteria:
                text, count = batch.alone(row), batch.counts[row]
                for n in range(number):
                    stops[index, n] = criteria(text.prefix(count + n + 1), None)[0]
        return stops
