"""Logits processors, applied exactly as `generate` would, but at several positions of several rows at once.

There are five kinds. A warper reads only the scores, so one call serves all positions. Those of transformers that read
the text are computed for all positions at once where `one_pass` knows how. Any other stateless one is called as
`generate` would, on the whole batch with the exact prefix, once for each prefix length. One whose state can be taken
back follows the candidates: see `rewindable`. A call with any other that keeps state between calls, or may, is decoded
by transformers' own sampler: see `engine/plain.py`.
"""

import sys
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    LogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Round

from .one_pass import ONE_PASS
from .prefixes import Prefixes
from .warping import HeadWarper, in_runs, warp


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
# stateless, whatever the number of the row: they are called with the rows alone that have a prefix of the length
ROW_FREE = frozenset({logits_process.WatermarkLogitsProcessor, logits_process.WhisperTimeStampLogitsProcessor})


class RoundProcessor:
    """A processor of this package: it follows the rows of a call, and takes all positions of a round at once.

    Attributes:
        barred: as in `Processors`; what it says of a candidate that was rejected since is taken out of it.
        max_rollback: how many candidates of a row it can take back.
        vocab_size: V of its masks; 0 if it has none.
    """

    barred: Mapping[tuple[int, int], Exception] = MappingProxyType({})
    max_rollback: int = sys.maxsize
    vocab_size: int = 0

    @property
    def name(self) -> str:
        """As the user knows it."""
        return type(self).__name__

    def __call__(self, batch: Batch, draft: Draft | None, scores: torch.Tensor, ahead: int) -> torch.Tensor:
        """New scores [R, P, V] for `scores` [R, P, V], whose first position is `ahead` tokens after each row's end."""
        raise NotImplementedError

    def allowed(self, batch: Batch, ahead: int, wanted: Sequence[bool]) -> list[torch.Tensor | None] | None:
        """[V] bool on the CPU, the tokens that may come after `ahead` candidates in each of the R rows.

        Args:
            wanted: [R], for which rows.

        Returns:
            None if the processor is no mask; in it None for rows that are not wanted, and where a candidate before is
            excluded or ends its row.
        """
        return None

    def leave(self, rows: list[int], stay: torch.Tensor) -> None:
        """Rows leave the batch; `stay` has the row indices [R'] of those that stay."""


Processor = LogitsProcessor | RoundProcessor


class Processors:
    """The processors of a call, applied to [R, P, V] logits in their order.

    A processor of the user's own may set `stateless = True` if its result for a row depends only on the row's number
    in the batch, its text and its scores, and not on random numbers. It is called with all B rows, also at positions
    that are rejected later; rows that have no such position then hold meaningless text and scores.

    Attributes:
        max_rollback: candidates of a row that can be taken back, at most; `limited_by` names the processor.
        barred: errors of `prefix_allowed_tokens_fn` in the last call, by row and by tokens emitted before: it allowed
            no token, or raised. Where that text has a rejected candidate in it, the error does not count.
    """

    def __init__(
        self,
        processors: Sequence[Processor],
        eos_token_id: torch.Tensor | None = None,
        memory: dict[Hashable, Any] | None = None,
    ):
        """
        Args:
            processors: as `generate` prepared them, or a `RoundProcessor` in place of some.
            eos_token_id: [E]; positions after a candidate that ends its row are skipped. None skips none.
            memory: what is computed once for a call, which draft and target may share.
        """
        self.eos_token_id = eos_token_id
        self.at_once = in_runs(processors)
        self.barred: dict[tuple[int, int], Exception] = {}
        limits = [(p.max_rollback, p.name) for p in self.at_once if isinstance(p, RoundProcessor)]
        self.max_rollback, self.limited_by = min(limits, default=(sys.maxsize, ""))
        self.memory: dict[Hashable, Any] = {} if memory is None else memory

    def __call__(self, batch: Batch, draft: Draft | None, logits: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        """
        Args:
            batch: the text so far; candidates are written after each row's end.
            draft: how many of these each row has; None while they are being drafted.
            logits: [R, P, V] of the decoding rows, at P consecutive positions.
            ahead: candidates before the first of these positions, 0 unless given.

        Returns:
            [R, P, V] float32 scores as `generate` has them at each of these prefixes.
        """
        scores, cells = logits.float(), None
        prefixes = Prefixes(batch, ahead, scores.shape[1], self.memory)
        self.barred.clear()
        for processor in self.at_once:
            one_pass = ONE_PASS.get(type(processor))
            if one_pass is not None and (found := one_pass(processor, prefixes, scores)) is not None:
                scores = found
            elif isinstance(processor, RoundProcessor):
                scores = processor(batch, draft, scores, ahead)
                self.barred.update(processor.barred)
            elif (of_scores := warped(processor, scores)) is not None:
                scores = of_scores
            else:
                if cells is None:
                    cells = self._cells(batch, draft, scores.shape[1], ahead)
                scores = self._by_length(processor, batch, scores, cells)
        return scores

    def allowed(self, batch: Batch, ahead: int, wanted: Sequence[bool]) -> list[torch.Tensor | None] | None:
        """As `RoundProcessor.allowed`, of all of them together."""
        together: list[torch.Tensor | None] | None = None
        for processor in self.at_once:
            masks = processor.allowed(batch, ahead, wanted) if isinstance(processor, RoundProcessor) else None
            if together is None or masks is None:
                together = masks if together is None else together
            else:
                pairs = zip(together, masks, strict=True)
                together = [None if one is None or other is None else one & other for one, other in pairs]
        return together

    @property
    def mask_size(self) -> int:
        """V of their masks; 0 if none of them has any."""
        return max((p.vocab_size for p in self.at_once if isinstance(p, RoundProcessor)), default=0)

    def room(self, batch: Batch, row: int) -> int:
        """How many tokens a row may still emit."""
        return batch.room(row)

    def observe(self, done: Round) -> None:
        """Let go of rows that have left."""
        if done.stay is not None:
            for processor in self.at_once:
                if isinstance(processor, RoundProcessor):
                    processor.leave(done.rows, done.stay)

    def _cells(
        self, batch: Batch, draft: Draft | None, positions: int, ahead: int
    ) -> dict[int, list[tuple[int, int]]]:
        """The (row index, position) pairs that `generate` could reach, by the number of tokens emitted before them."""
        drafted = batch.last(ahead + positions - 1, ahead + positions - 1)  # [R, ahead + P - 1]
        ends = torch.zeros_like(drafted)
        if self.eos_token_id is not None:
            ends = torch.isin(drafted, self.eos_token_id.to(drafted.device)).cumsum(-1)
        reached = torch.nn.functional.pad(ends == 0, (1, 0), value=True)[:, ahead:].tolist()
        cells: dict[int, list[tuple[int, int]]] = {}
        for index, row in enumerate(batch.rows):
            last = positions - 1 if draft is None else draft.lengths[index]
            for position in range(last + 1):
                emitted = batch.counts[row] + ahead + position
                if reached[index][position] and emitted < batch.limits[row]:
                    cells.setdefault(emitted, []).append((index, position))
        return cells

    def _by_length(
        self,
        processor: LogitsProcessor,
        batch: Batch,
        scores: torch.Tensor,
        cells: dict[int, list[tuple[int, int]]],
    ) -> torch.Tensor:
        """One call of a stateless processor for each prefix length among the cells of scores [R, P, V]."""
        result = scores.clone()
        for emitted, members in cells.items():
            index, position = torch.tensor(members, device=scores.device).unbind(-1)
            row, prefix = batch.index[index], batch.prefix(emitted)
            if type(processor) in ROW_FREE:
                result[index, position] = processor(prefix[row], scores[index, position])
                continue
            every = scores.new_zeros(len(batch.ids), scores.shape[2])  # [B, V], 0 in rows without such a prefix
            every[row] = scores[index, position]
            found = processor(prefix, every)[row]
            result = result.to(found.dtype)  # later processors get the precision that they get in `generate`
            result[index, position] = found
        return result


def can_look_ahead(processor: Processor) -> bool:
    """Whether the result of a processor depends only on the text and scores that it is called with."""
    known = isinstance(processor, RoundProcessor) or type(processor) in WARPERS | STATELESS
    # what it keeps is a function of the text, unless it was called before
    known = known or (type(processor) is SynthIDTextWatermarkLogitsProcessor and processor.state is None)
    return known or getattr(processor, "stateless", False) is True


def warped(processor: Processor, scores: torch.Tensor) -> torch.Tensor | None:
    """Scores [R, P, V] after a processor that reads nothing else; None if it reads the text."""
    flat = scores.flatten(0, 1)  # [R * P, V]
    if isinstance(processor, HeadWarper):
        return processor(flat).view_as(scores)
    if type(processor) in WARPERS and not isinstance(processor, RoundProcessor):
        return warp([processor], flat).view_as(scores)
    return None
