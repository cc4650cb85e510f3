"""Processors and stopping criteria of a batch whose rows are requests of their own, each as in a batch of one.

`generate` is asked to prepare each request alone, so that whatever counts tokens, leaves pads out or reads lengths
finds what it would find there. Here each row is shown its own text without pads.
"""

from collections.abc import Sequence

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor

from hf_specx.common.batch import Batch
from hf_specx.common.errors import require
from hf_specx.common.round import Draft

from .processors import Processors, warped
from .stopping import Stopping


class RequestProcessors(Processors):
    """The processors of requests, each applied to [P, V] logits of its own row.

    Warpers, which read scores only, are taken from one of the requests for all rows: all are prepared from the same
    arguments.

    Args:
        own: those of each row, as `generate` prepared them for its request.
        eos_token_id: [E]; positions after a candidate that ends its row are skipped. None skips none.
        limits: [B], the most tokens that each row emits.
    """

    def __init__(self, own: Sequence[Sequence[LogitsProcessor]], eos_token_id: torch.Tensor | None, limits: list[int]):
        super().__init__(own[0], eos_token_id, max(limits))
        self.limits = limits
        self.own = [Processors(processors, eos_token_id).at_once for processors in own]

    def admit(self, row: int, processors: Sequence[LogitsProcessor], limit: int) -> None:
        """A new request has the place of a row."""
        self.own[row], self.limits[row] = Processors(processors).at_once, limit
        self.max_new_tokens = max(self.limits)

    def room(self, batch: Batch, row: int) -> int:
        return self.limits[row] - batch.counts[row]

    def __call__(self, batch: Batch, draft: Draft | None, logits: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        scores = logits.float()
        self.barred.clear()
        cells: list[tuple[int, int, torch.Tensor]] | None = None
        for number, processor in enumerate(self.own[batch.rows[0]]):
            if (of_scores := warped(processor, scores)) is not None:
                scores = of_scores
            else:
                if cells is None:
                    cells = self._texts(batch, draft, scores.shape[1], ahead)
                scores = self._by_text(number, batch, scores, cells)
        return scores

    def _texts(
        self, batch: Batch, draft: Draft | None, positions: int, ahead: int
    ) -> list[tuple[int, int, torch.Tensor]]:
        """The row index, position and text [1, n] of each cell that `generate` could reach."""
        batch.reserve(ahead + positions)
        found = []
        for emitted, members in self._cells(batch, draft, positions, ahead).items():
            for index, position in members:
                row = batch.rows[index]
                if emitted < self.limits[row]:
                    text = batch.ids[row, batch.width - batch.prompt_lengths[row] : batch.width + emitted]
                    found.append((index, position, text[None]))
        return found

    def _by_text(
        self, number: int, batch: Batch, scores: torch.Tensor, cells: list[tuple[int, int, torch.Tensor]]
    ) -> torch.Tensor:
        """Call the processor with this number of each row at each of its cells of scores [R, P, V]."""
        result = scores.clone()
        for index, position, text in cells:
            row = batch.rows[index]
            processor = self.own[row][number]
            if type(processor) is logits_process.PrefixConstrainedLogitsProcessor and processor._num_beams == 1:
                emitted = text.shape[1] - batch.prompt_lengths[row]
                found = self._constrained(processor, text, scores[index, position][None], [0], emitted)
                if (0, emitted) in self.barred:
                    self.barred[row, emitted] = self.barred.pop((0, emitted))
            else:
                found = processor(text, scores[index, position][None])
            result = result.to(found.dtype)  # later processors get the precision that they get in `generate`
            result[index, position] = found[0]
        return result


class RequestStopping(Stopping):
    """When rows end that are requests of their own: each at its own limit, by its own criteria, or at an end token.

    Args:
        own: of each row, as `generate` prepared its criteria for a batch of one.

    Attributes:
        limits: [B], the most tokens that each row emits.
    """

    def __init__(self, own: Sequence[Stopping]):
        first = own[0]
        self.own, self.limits = list(own), [stopping.max_new_tokens for stopping in own]
        self.criteria, self.stateful, self.eos_token_id = first.criteria, first.stateful, first.eos_token_id
        self.pads_finished_rows, self.stopped_at = True, {}

    @property
    def max_new_tokens(self) -> int:  # type: ignore[override]
        return max(self.limits)

    def admit(self, row: int, stopping: Stopping) -> None:
        """A new request has the place of a row."""
        self.own[row], self.limits[row] = stopping, stopping.max_new_tokens
        self.stopped_at.pop(row, None)

    def _room(self, batch: Batch) -> torch.Tensor:
        left = [self.limits[row] - batch.counts[row] for row in batch.rows]
        return torch.tensor(left, device=batch.ends.device)

    def _update_prefix_criteria(self, batch: Batch, new: list[int]) -> None:
        for row, number in zip(batch.rows, new, strict=True):
            text = batch.row(row)[None]
            for emitted in range(batch.counts[row] - number + 1, batch.counts[row] + 1):
                prefix = text[:, : batch.prompt_lengths[row] + emitted]
                if emitted <= self.stopped_at.get(row, emitted) and self.own[row].criteria(prefix, None).item():
                    self.stopped_at[row] = emitted

    def by_limit(self, batch: Batch, row: int) -> bool:
        """Whether a row that has stopped did so at its limit alone."""
        if batch.counts[row] < self.limits[row]:
            return False
        text = batch.row(row)[None]
        if self.eos_token_id is not None and torch.isin(text[:, -1], self.eos_token_id.to(text.device)).any():
            return False
        criteria = self.own[row].criteria
        return not (criteria and criteria(text, None).item())


def check_alike(own: Sequence[Sequence[LogitsProcessor]]) -> None:
    """Raise a ValueError if requests have different kinds of processors."""
    kinds = {tuple(type(processor) for processor in processors) for processors in own}
    require(len(kinds) == 1, "requests of one call need the same kinds of logits processors; make several calls.")
