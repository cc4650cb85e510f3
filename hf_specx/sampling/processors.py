"""Logits processors with the meaning they have in stock `generate`, at several positions of several rows at once.

Three kinds. A warper reads nothing but the scores, so it is applied once to all of them. A processor that reads the
prefix is called as stock would call it: on the whole batch, with the exact prefix of that step, once a length that
occurs. One that keeps state between its calls, or may, cannot be called ahead: it is left to `in_order`.
"""

from collections.abc import Sequence
from functools import partial

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Round

from .warping import HeadWarper, in_runs


WARPERS = frozenset(
    {
        logits_process.TemperatureLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
        logits_process.TopHLogitsWarper,
        logits_process.MinPLogitsWarper,
        logits_process.TypicalLogitsWarper,
        logits_process.EpsilonLogitsWarper,
        logits_process.EtaLogitsWarper,
        logits_process.LogitNormalization,
        logits_process.InfNanRemoveLogitsProcessor,
        logits_process.SuppressTokensLogitsProcessor,
    }
)
STATELESS = frozenset(
    {
        logits_process.RepetitionPenaltyLogitsProcessor,
        logits_process.EncoderRepetitionPenaltyLogitsProcessor,
        logits_process.NoRepeatNGramLogitsProcessor,
        logits_process.EncoderNoRepeatNGramLogitsProcessor,
        logits_process.SequenceBiasLogitsProcessor,
        logits_process.NoBadWordsLogitsProcessor,
        logits_process.PrefixConstrainedLogitsProcessor,
        logits_process.MinLengthLogitsProcessor,
        logits_process.MinNewTokensLengthLogitsProcessor,
        logits_process.ForcedBOSTokenLogitsProcessor,
        logits_process.ForcedEOSTokenLogitsProcessor,
        logits_process.ExponentialDecayLengthPenalty,
        logits_process.SuppressTokensAtBeginLogitsProcessor,
        logits_process.WatermarkLogitsProcessor,
        logits_process.WhisperTimeStampLogitsProcessor,
    }
)


class RoundProcessor:
    """One of our own, which follows the rows of a call and takes all positions of a round at once."""

    def __call__(self, batch: Batch, scores: torch.Tensor, ahead: int) -> torch.Tensor:
        """Scores [R, P, V] of the decoding rows at the positions from `ahead` tokens behind their ends."""
        raise NotImplementedError

    def leave(self, rows: list[int], stay: torch.Tensor) -> None:
        """Keep only those of the decoding rows whose indices are in stay [R']."""


Processor = LogitsProcessor | RoundProcessor


class Processors:
    """A prepared list of processors, applied to [R, P, V] logits in its own order.

    A processor of the user's own whose result for a row depends on nothing but the row's place, its text and its
    scores may set `stateless = True`; it draws no random numbers then. It is called with full batches, also for
    positions that are rejected later, and the text of rows that are elsewhere at that moment means nothing.

    Attributes:
        stateful: names of those that must see each emitted token once, in order.
        in_order: the first of these and all that follow it, for the loop to call position by position.
        barred: (row, emitted tokens) of texts behind which `prefix_allowed_tokens_fn` allows no token, or raises an
            error, in the last call; it may be one that the row does not get to.
    """

    def __init__(
        self, processors: Sequence[Processor], eos_token_id: torch.Tensor | None = None, max_new_tokens: int = 0
    ):
        """
        Args:
            processors: as `generate` prepared them, or ours in place of some.
            eos_token_id: [E]; what lies behind a candidate that ends its row is not looked at.
            max_new_tokens: nor is what lies behind the last token that can be emitted; 0 is no limit.
        """
        self.eos_token_id, self.max_new_tokens = eos_token_id, max_new_tokens
        self.stateful = [type(p).__name__ for p in processors if not can_look_ahead(p)]
        first = next((i for i, p in enumerate(processors) if not can_look_ahead(p)), len(processors))
        self.at_once = in_runs(processors[:first])
        self.in_order = LogitsProcessorList(processors[first:])
        self.barred: dict[tuple[int, int], Exception] = {}

    def __call__(self, batch: Batch, draft: Draft | None, logits: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        """
        Args:
            batch: the text so far; candidates are written after each row's end.
            draft: which of these are candidates; None if all are.
            logits: [R, P, V] of the decoding rows, at P positions in a row from `ahead` tokens after the end.

        Returns:
            [R, P, V] float32 scores, as stock's at each of these prefixes, up to the first that is called in order.
        """
        scores, cells = logits.float(), None
        self.barred.clear()
        for processor in self.at_once:
            if isinstance(processor, RoundProcessor):
                scores = processor(batch, scores, ahead)
            elif isinstance(processor, HeadWarper):
                scores = processor(scores.flatten(0, 1)).view_as(scores)
            elif type(processor) in WARPERS:
                flat = scores.flatten(0, 1)  # [R * P, V]
                scores = processor(flat.new_zeros(len(flat), 1, dtype=torch.int64), flat).view_as(scores)
            else:
                if cells is None:
                    cells = self._cells(batch, draft, scores.shape[1], ahead)
                scores = self._by_length(processor, batch, scores, cells)
        return scores

    def observe(self, done: Round) -> None:
        """Let go of rows that have left."""
        if done.stay is not None:
            for processor in self.at_once:
                if isinstance(processor, RoundProcessor):
                    processor.leave(done.rows, done.stay)

    def _cells(
        self, batch: Batch, draft: Draft | None, positions: int, ahead: int
    ) -> dict[int, list[tuple[int, int]]]:
        """The (place, position) pairs that stock could reach, by the number of tokens emitted before them."""
        drafted = batch.last(ahead + positions - 1, ahead + positions - 1)  # [R, ahead + P - 1]
        ends = torch.zeros_like(drafted)
        if self.eos_token_id is not None:
            ends = torch.isin(drafted, self.eos_token_id.to(drafted.device)).cumsum(-1)
        if batch.over is not None:
            ends = ends.masked_fill(batch.over[:, None], 0)
        reached = torch.nn.functional.pad(ends == 0, (1, 0), value=True)[:, ahead:].tolist()
        cells: dict[int, list[tuple[int, int]]] = {}
        for place, row in enumerate(batch.rows):
            last = positions - 1 if draft is None else draft.lengths[place]
            for position in range(last + 1):
                emitted = batch.counts[row] + ahead + position
                if reached[place][position] and not 0 < self.max_new_tokens <= emitted:
                    cells.setdefault(emitted, []).append((place, position))
        return cells

    def _by_length(
        self,
        processor: LogitsProcessor,
        batch: Batch,
        scores: torch.Tensor,
        cells: dict[int, list[tuple[int, int]]],
    ) -> torch.Tensor:
        """One call for each prefix length that occurs among the cells of scores [R, P, V]."""
        result = scores.clone()
        for emitted, members in cells.items():
            place, position = torch.tensor(members, device=scores.device).unbind(-1)
            row = batch.index[place]
            every = scores.new_zeros(len(batch.ids), scores.shape[2])  # [B, V], 0 in rows that are elsewhere
            every[row] = scores[place, position]
            prefix = batch.prefix(emitted)
            if type(processor) is logits_process.PrefixConstrainedLogitsProcessor and processor._num_beams == 1:
                result[place, position] = self._constrained(processor, prefix, every, row.tolist(), emitted)
            else:
                found = processor(prefix, every)[row]
                result = result.to(found.dtype)  # what follows is as precise as in stock
                result[place, position] = found
        return result

    def _constrained(
        self,
        processor: logits_process.PrefixConstrainedLogitsProcessor,
        prefix: torch.Tensor,
        every: torch.Tensor,
        rows: list[int],
        emitted: int,
    ) -> torch.Tensor:
        """The scores of `rows` only: the user's function may know no answer for the texts of the others."""
        result = torch.full_like(every[rows], -torch.inf)
        for place, row in enumerate(rows):
            text = prefix[row : row + 1]
            try:
                allowed = processor._prefix_allowed_tokens_fn(row, text[0])
                if not len(allowed):
                    raise ValueError(f"prefix_allowed_tokens_fn allows no token in row {row} after {emitted} new ones")
                alone = logits_process.PrefixConstrainedLogitsProcessor(partial(_answer, allowed), 1)
                result[place] = alone(text, every[row : row + 1])[0]
            except Exception as error:  # stock would not have asked for a candidate that is rejected
                self.barred[row, emitted] = error
        return result


def can_look_ahead(processor: Processor) -> bool:
    """Whether a processor gives the same whenever and however often it is called with the same text and scores."""
    known = isinstance(processor, RoundProcessor) or type(processor) in WARPERS | STATELESS
    return known or getattr(processor, "stateless", False) is True


def _answer(allowed: list[int], batch_id: int, input_ids: torch.Tensor) -> list[int]:
    return allowed
