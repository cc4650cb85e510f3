"""Logits processors, applied exactly as `generate` would, but at several positions of several rows at once.

A warper reads only the scores, so one call serves all positions. Those of transformers that read the text are computed
for all positions at once by `vectorized` and `synthid`. Any other stateless one is called as `generate` would, on
the whole batch with the exact prefix, once for each prefix length. One whose state can be taken back follows the
candidates: see `rewindable`. A call with any other is decoded by transformers' own sampler: see `engine/plain.py`.
"""

import sys
from collections import ChainMap
from collections.abc import Hashable, Sequence, Set
from functools import cached_property, reduce
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor

from hf_specx.common.batch import Batch
from hf_specx.common.devices import to_device_async
from hf_specx.common.round import Draft

from .synthid import is_usual_synthid, synthid
from .vectorized import VECTORIZED, Prefixes


class LikeliestToken(LogitsProcessor):
    """Leaves the likeliest token alone, the first of equal ones: greedy decoding beside rows that sample."""

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).scatter_(-1, scores.argmax(-1, keepdim=True), 0.0)


FIRST = frozenset({logits_process.TopKLogitsWarper, logits_process.TopPLogitsWarper})
AFTER = FIRST | {  # for these a token with a score of -inf does not exist
    logits_process.TemperatureLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.LogitNormalization,
}
WARPERS = AFTER | {
    logits_process.TopHLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    LikeliestToken,
}
RAISING = frozenset({logits_process.TopHLogitsWarper, logits_process.EtaLogitsWarper})  # without a distribution
SYNTHID = logits_process.SynthIDTextWatermarkLogitsProcessor
OF_TEXT = VECTORIZED | {SYNTHID: synthid}
STATELESS = (OF_TEXT.keys() - WARPERS - {SYNTHID}) | {logits_process.WhisperTimeStampLogitsProcessor}
NO_LIMIT = (sys.maxsize, "")  # of the candidates that a target takes
HEAD = 256  # the likeliest tokens that a `TopTokensWarper` looks at, where top-k does not say how many


class RoundProcessor:
    """A processor of this package: it follows the rows of a call, and takes all positions of a round at once.

    It has the `name` that the user knows; `vocab_size` is that of its masks, 0 if it has none; the rest is as in
    `Processors`.
    """

    name: str = ""
    max_rollback: int = sys.maxsize
    vocab_size: int = 0
    prefix_errors: dict[tuple[int, int], Exception] | None = None

    def __call__(self, batch: Batch, draft: Draft | None, scores: torch.Tensor, ahead: int) -> torch.Tensor:
        """New scores [R, P, V] for `scores` [R, P, V], whose first position is `ahead` tokens after each row's end."""
        raise NotImplementedError

    def allowed(self, batch: Batch, ahead: int, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """[V] bool on the CPU, the tokens that may come after `ahead` candidates in each of the R rows, by its masks.

        None for rows that are not `wanted` [R], and where a candidate before is excluded or ends its row.
        """
        raise NotImplementedError


Processor = LogitsProcessor | RoundProcessor


class Processors:
    """The processors of a call, applied to [R, P, V] logits in their order.

    A processor of the user's own may set `stateless = True` if its result for a row depends only on the row's number
    in the batch, its text and its scores, and not on random numbers. It is called with all B rows, also at positions
    that are rejected later; rows that have no such position then hold meaningless text and scores.

    Attributes:
        max_rollback: candidates of a row that can be taken back, at most; `limited_by` says what takes no more.
        mask_size: V of their masks; 0 if none of them has any.
        prefix_errors: those of `prefix_allowed_tokens_fn`, by row and by tokens emitted before: it allowed no token,
            or raised. Where that text has a rejected candidate in it, the error does not count.
    """

    def __init__(
        self, processors: Sequence[Processor], eos_token_ids: Set[int] = frozenset(), limit: tuple[int, str] = NO_LIMIT
    ):
        """Positions after a candidate that is one of the `eos_token_ids` are skipped.

        `limit` is the most candidates that the target takes, and why.
        """
        self.eos_token_ids = eos_token_ids
        self.cache: dict[Hashable, Any] = {}  # what is computed once for a call
        self.applied = fuse_warpers(processors)
        self.max_rollback, self.limited_by = limit
        self.mask_size = 0
        self.prefix_errors: ChainMap[tuple[int, int], Exception] = ChainMap()
        for processor in self.applied:
            if isinstance(processor, RoundProcessor):
                if processor.max_rollback < self.max_rollback:
                    taken_back = f"{processor.name} takes back {processor.max_rollback} tokens at most"
                    self.max_rollback, self.limited_by = processor.max_rollback, taken_back
                self.mask_size = max(self.mask_size, processor.vocab_size)
                if processor.prefix_errors is not None:
                    self.prefix_errors.maps.append(processor.prefix_errors)

    def __call__(self, batch: Batch, draft: Draft | None, logits: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        """[R, P, V] float32 scores as `generate` has them at each of P consecutive prefixes, from the logits there.

        Candidates are written after each row's end, `ahead` of them before the first position; `draft` says how many
        each row has, and is None while they are being drafted.
        """
        scores = logits.float()
        positions = Positions(self, batch, draft, ahead, scores.shape[1])
        for processor in self.applied:
            scores = positions.apply(processor, scores)
        return scores

    def allowed(self, batch: Batch, ahead: int, wanted: Sequence[bool]) -> list[torch.Tensor | None] | None:
        """As `RoundProcessor.allowed`, of all of them together."""
        masked = [each for each in self.applied if isinstance(each, RoundProcessor) and each.vocab_size]
        if not masked:
            return None
        rows = zip(*[each.allowed(batch, ahead, wanted) for each in masked], strict=True)
        return [None if any(mask is None for mask in masks) else reduce(torch.logical_and, masks) for masks in rows]


class Positions:
    """P consecutive positions of the R decoding rows, at which processors are called; see `Processors`."""

    def __init__(self, processors: Processors, batch: Batch, draft: Draft | None, ahead: int, number: int):
        self.processors, self.batch, self.draft, self.ahead, self.number = processors, batch, draft, ahead, number

    @cached_property
    def prefixes(self) -> Prefixes:
        return Prefixes(self.batch, self.ahead, self.number, self.processors.cache)

    @cached_property
    def cells(self) -> dict[int, list[tuple[int, int]]]:
        """The (row index, position) pairs that `generate` could reach, by the number of tokens emitted before them."""
        batch, cells = self.batch, dict[int, list[tuple[int, int]]]()
        for index, candidates in enumerate(batch.candidates(self.ahead + self.number - 1)):
            row = batch.rows[index]
            last = self.number - 1 if self.draft is None else self.draft.lengths[index]
            for position in range(last + 1):
                before = self.ahead + position
                emitted = batch.counts[row] + before
                goes_on = self.processors.eos_token_ids.isdisjoint(candidates[:before])
                if goes_on and emitted < batch.table[row].limit:
                    cells.setdefault(emitted, []).append((index, position))
        return cells

    def apply(self, processor: Any, scores: torch.Tensor) -> torch.Tensor:
        """Scores [R, P, V] after a processor."""
        if isinstance(processor, RoundProcessor):
            return processor(self.batch, self.draft, scores, self.ahead)
        result = None
        if type(processor) in OF_TEXT:
            result = OF_TEXT[type(processor)](processor, self.prefixes, scores)
        elif type(processor) in WARPERS or isinstance(processor, TopTokensWarper):
            result = warp([processor], scores.flatten(0, 1)).view_as(scores)
        return self._by_length(processor, scores) if result is None else result

    def _by_length(self, processor: Any, scores: torch.Tensor) -> torch.Tensor:
        """One call of a stateless processor for each prefix length among the cells of scores [R, P, V]."""
        batch, result = self.batch, scores.clone()
        for emitted, members in self.cells.items():
            index, position = to_device_async(members, scores.device).unbind(-1)
            row, prefix = batch.index[index], batch.prefix(emitted)
            every = scores.new_zeros(len(batch.ids), scores.shape[2])  # [B, V], 0 in rows without such a prefix
            every[row] = scores[index, position]
            processed = processor(prefix, every)[row]
            result = result.to(processed.dtype)  # later processors get the precision that they get in `generate`
            result[index, position] = processed
        return result


def can_look_ahead(processor: Processor) -> bool:
    """Whether the result of a processor depends only on the text and scores that it is called with."""
    if isinstance(processor, RoundProcessor) or type(processor) in WARPERS | STATELESS:
        return True
    if type(processor) is SYNTHID and is_usual_synthid(processor):
        return True  # what it keeps is a function of the text
    return getattr(processor, "stateless", False) is True


class TopTokensWarper:
    """Consecutive warpers, top-k or top-p and then any of `AFTER`, applied to the likeliest tokens only.

    Top-p sorts the scores of the whole vocabulary, which on a CPU can take longer than a draft step. The tokens that
    it keeps are nearly always among the likeliest few hundred; where they are not, all scores are sorted.
    """

    def __init__(self, warpers: list[Any]):
        self.warpers, first = warpers, warpers[0]
        # twice as many as top-k keeps, since it also keeps all that tie with the last of these
        self.size = 2 * first.top_k if isinstance(first, logits_process.TopKLogitsWarper) else HEAD

    def __call__(self, input_ids: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
        """Scores [N, V] after all warpers: those of transformers, except for the rounding of sums.

        Where tokens tie at the edge of top-p, which happens in half precision, others of them may be kept: there the
        choice of transformers depends on an unstable sort.
        """
        # on other devices sorting is quick, and reading `enough` back would wait for the device
        if scores.device.type != "cpu" or scores.shape[-1] <= 2 * self.size:
            return warp(self.warpers, scores)
        first, (values, ids) = self.warpers[0], scores.topk(self.size)
        # `enough` [N]: the first warper drops every token outside of the head
        if isinstance(first, logits_process.TopKLogitsWarper):
            least = values[:, -1]  # -inf where a grammar has left few tokens, and then all others are dropped already
            enough = (least < values[:, first.top_k - 1]) | (least == -torch.inf)
            values = warp([first], values)
        else:
            probs = scores.softmax(-1)
            total, head = probs.sum(-1, dtype=torch.float64), probs.gather(-1, ids).double()
            ascending = total[:, None] - head.cumsum(-1) + head  # sums from the least likely token up to and with each
            dropped = ascending.to(scores.dtype) <= 1 - first.top_p
            dropped[:, : first.min_tokens_to_keep] = False
            values, enough = values.masked_fill(dropped, -torch.inf), dropped[:, -1]
        output = torch.full_like(scores, -torch.inf).scatter_(-1, ids, warp(self.warpers[1:], values))
        if not enough.all():
            output[~enough] = warp(self.warpers, scores[~enough])
        return output


def fuse_warpers(processors: Sequence[Any]) -> list[Any]:
    """The same processors in order, each run of warpers that starts with top-k or top-p as one `TopTokensWarper`."""
    applied: list[Any] = []
    for processor in processors:
        drops = getattr(processor, "filter_value", -torch.inf) == -torch.inf  # so that later warpers ignore them
        if drops and type(processor) in AFTER and applied and isinstance(applied[-1], TopTokensWarper):
            applied[-1].warpers.append(processor)
        elif drops and type(processor) in FIRST and processor.min_tokens_to_keep < HEAD:
            applied.append(TopTokensWarper([processor]))
        else:
            applied.append(processor)
    return applied


def warp(warpers: Sequence[Any], scores: torch.Tensor) -> torch.Tensor:
    """Scores [N, V] after warpers; rows without a distribution, which no text may get to, are no error of theirs."""
    for warper in warpers:
        if type(warper) in RAISING:
            nowhere = scores.logsumexp(-1, keepdim=True).isfinite().logical_not()
            scores = warper(None, scores.masked_fill(nowhere, 0)).where(~nowhere, scores)
        else:
            scores = warper(None, scores)
    return scores
