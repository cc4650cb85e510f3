"""Logits processors, applied exactly as `generate` would, but at several positions of several rows at once.

- A warper (temperature, top-p) reads only the scores, so one call serves all positions.
- Those of transformers that read the text are computed for all positions at once by `vectorized` and `synthid`.
- Any other stateless one is called as `generate` would, on the whole batch with the exact prefixes, once for each
  length of these.
- One whose state can be taken back follows the candidates: see `rewindable`.
- Some that few use are left to transformers' own sampler (`engine/reasons.py` names them), exact as they are there.
- A call with any other is decoded by transformers' own sampler: see `engine/plain.py`.
"""

import sys
from collections import ChainMap, Counter
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


IMPOSSIBLE = 1000.0  # how far below the likeliest a score is whose probability is 0 in float64 too


class LikeliestToken(LogitsProcessor):
    """Leaves the likeliest token alone, the first of equal ones: greedy decoding beside rows that sample.

    The others have a probability of 0 as well, and keep their order, by which a draft has its next best choices.
    """

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        likeliest = scores.argmax(-1, keepdim=True)
        others = (scores - scores.gather(-1, likeliest) - IMPOSSIBLE).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return others.scatter_(-1, likeliest, 0.0)


TOP_TOKENS = frozenset({logits_process.TopKLogitsWarper, logits_process.TopPLogitsWarper})  # begin a `TopTokensWarper`
AFTER_TOP_TOKENS = TOP_TOKENS | {  # may follow in it: for them a token with a score of -inf does not exist
    logits_process.TemperatureLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.LogitNormalization,
}
WARPERS = AFTER_TOP_TOKENS | {
    logits_process.TopHLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    LikeliestToken,
}
# raise an error at positions without a distribution
RAISING = frozenset({logits_process.TopHLogitsWarper, logits_process.EtaLogitsWarper})
SYNTHID = logits_process.SynthIDTextWatermarkLogitsProcessor
ALL_VECTORIZED = VECTORIZED | {SYNTHID: synthid}
STATELESS = (ALL_VECTORIZED.keys() - WARPERS - {SYNTHID}) | {logits_process.WhisperTimeStampLogitsProcessor}
NO_LIMIT = (sys.maxsize, "")  # as `limit` of `Processors`
NUM_TOP_TOKENS = 256  # that a `TopTokensWarper` looks at, where top-k does not say how many


class RoundProcessor:
    """A processor of this package, which takes all positions of a round at once.

    Attributes:
        name: of the user's processor that it replaces, for messages.
        vocab_size: of its masks; 0 if it has none.
        max_rollback, prefix_errors: as in `Processors`.
    """

    name: str = ""
    max_rollback: int = sys.maxsize
    vocab_size: int = 0
    prefix_errors: dict[tuple[int, tuple[int, ...]], Exception] | None = None

    def __call__(self, batch: Batch, draft: Draft | None, scores: torch.Tensor, ahead: int) -> torch.Tensor:
        """The processed scores [R, P, V] of P positions, the first after `ahead` candidates; see `Processors`."""
        raise NotImplementedError

    def allowed(self, batch: Batch, ahead: int, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """The mask after `ahead` candidates of each of the R rows: [V] bool on the CPU, True for allowed tokens.

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
        applied: the processors in their order, with runs of warpers as one `TopTokensWarper`.
        max_rollback: how many candidates of a row can be taken back; `limited_by` says in words why no more can be.
        mask_size: V of their masks; 0 if none of them has any.
        prefix_errors: by (row, tokens emitted before), the error where `prefix_allowed_tokens_fn` has raised
            or allowed no token. It is no error if that text has a rejected candidate in it.
        cache: what is computed once for a call.
    """

    def __init__(
        self, processors: Sequence[Processor], eos_token_ids: Set[int] = frozenset(), limit: tuple[int, str] = NO_LIMIT
    ):
        """
        Args:
            eos_token_ids: the end tokens; positions behind a candidate that is one of them are left out.
            limit: how many candidates the target itself takes, and why no more.
        """
        self.eos_token_ids = eos_token_ids
        self.cache: dict[Hashable, Any] = {}
        self.applied = fuse_warpers(processors)
        self.max_rollback, self.limited_by = limit
        self.mask_size = 0
        self.prefix_errors: ChainMap[tuple[int, tuple[int, ...]], Exception] = ChainMap()
        for processor in self.applied:
            if isinstance(processor, RoundProcessor):
                if processor.max_rollback < self.max_rollback:
                    taken_back = f"{processor.name} takes back {processor.max_rollback} tokens at most"
                    self.max_rollback, self.limited_by = processor.max_rollback, taken_back
                self.mask_size = max(self.mask_size, processor.vocab_size)
                if processor.prefix_errors is not None:
                    self.prefix_errors.maps.append(processor.prefix_errors)

    def max_rollback_of(self, row: int) -> int:
        """How many candidates of a row can be taken back, by its number."""
        return self.max_rollback

    def __call__(self, batch: Batch, draft: Draft | None, logits: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        """The processed scores [R, P, V], float32, of logits [R, P, V] at P consecutive positions.

        Candidates are written after each row's end in the batch.

        Args:
            draft: how many candidates each row has; None while they are being drafted.
            ahead: how many candidates are before the first position.
        """
        scores = logits.float()
        positions = Positions(self, batch, draft, ahead, scores.shape[1])
        for processor in self.applied:
            scores = positions.apply(processor, scores)
        return scores

    def allowed(self, batch: Batch, ahead: int, wanted: Sequence[bool]) -> list[torch.Tensor | None] | None:
        """As `RoundProcessor.allowed`, by the masks of all of them; None if none of them has masks."""
        with_masks = [each for each in self.applied if isinstance(each, RoundProcessor) and each.vocab_size]
        if not with_masks:
            return None
        rows = zip(*[each.allowed(batch, ahead, wanted) for each in with_masks], strict=True)
        return [None if any(mask is None for mask in masks) else reduce(torch.logical_and, masks) for masks in rows]


class Positions:
    """P consecutive positions of the R decoding rows, at which processors are called; see `Processors`."""

    def __init__(self, processors: Processors, batch: Batch, draft: Draft | None, ahead: int, num_positions: int):
        self.processors, self.batch, self.draft = processors, batch, draft
        self.ahead, self.num_positions = ahead, num_positions

    @cached_property
    def prefixes(self) -> Prefixes:
        return Prefixes(self.batch, self.ahead, self.num_positions, self.processors.cache)

    @cached_property
    def prefix_groups(self) -> dict[tuple[int, int], list[tuple[int, int, tuple[int, ...]]]]:
        """(row index, position, candidates before it) of each prefix that `generate` could come to.

        A group has prefixes with equally many emitted tokens, and one of a row: in a tree, where a row has several of
        one length, each is in another group.
        """
        batch, prefix_groups = self.batch, dict[tuple[int, int], list[tuple[int, int, tuple[int, ...]]]]()
        for index, candidates in enumerate(batch.candidates(self.ahead + self.num_positions - 1)):
            row, num_of_length = batch.rows[index], Counter[int]()
            last = self.num_positions - 1 if self.draft is None else self.draft.lengths[index]
            for position in range(last + 1):
                before = tuple(candidates[number] for number in batch.candidates_before(index, self.ahead + position))
                count = batch.counts[row] + len(before)
                has_not_ended = self.processors.eos_token_ids.isdisjoint(before)
                if has_not_ended and count < batch.row_states[row].limit:
                    prefix_groups.setdefault((count, num_of_length[count]), []).append((index, position, before))
                    num_of_length[count] += 1
        return prefix_groups

    def apply(self, processor: Any, scores: torch.Tensor) -> torch.Tensor:
        """The scores [R, P, V] that one processor makes of these."""
        if isinstance(processor, RoundProcessor):
            return processor(self.batch, self.draft, scores, self.ahead)
        result = None
        if type(processor) in ALL_VECTORIZED:
            result = ALL_VECTORIZED[type(processor)](processor, self.prefixes, scores)
        elif type(processor) in WARPERS or isinstance(processor, TopTokensWarper):
            result = warp([processor], scores.flatten(0, 1)).view_as(scores)
        return self._by_length(processor, scores) if result is None else result

    def _by_length(self, processor: Any, scores: torch.Tensor) -> torch.Tensor:
        """One call of a stateless processor for each of the `prefix_groups` of scores [R, P, V]."""
        batch, result = self.batch, scores.clone()
        for (emitted, _), members in self.prefix_groups.items():
            numbers = [(index, position) for index, position, _ in members]
            index, position = to_device_async(numbers, scores.device).unbind(-1)
            row, prefix = batch.index[index], batch.prefix(emitted)
            if batch.tree is not None:
                prefix = self._on_branches(prefix, members)
            batch_scores = scores.new_zeros(len(batch.ids), scores.shape[2])  # [B, V], 0 in rows without such a prefix
            batch_scores[row] = scores[index, position]
            processed = processor(prefix, batch_scores)[row]
            result = result.to(processed.dtype)  # later processors get the precision that they get in `generate`
            result[index, position] = processed
        return result

    def _on_branches(self, prefix: torch.Tensor, members: list[tuple[int, int, tuple[int, ...]]]) -> torch.Tensor:
        """Prefixes [B, n] that end with the candidates before each member, of which each is in a row of its own."""
        batch, width, places = self.batch, prefix.shape[1], []
        for index, _, before in members:
            row, first = batch.rows[index], width - len(before)
            places += [(row, first + number, token) for number, token in enumerate(before)]
        if not places:
            return prefix
        rows, columns, tokens = to_device_async(places, prefix.device).unbind(-1)
        return prefix.index_put((rows, columns), tokens)


def can_look_ahead(processor: Processor) -> bool:
    """Whether the result of a processor depends only on the text and scores that it is called with."""
    if isinstance(processor, RoundProcessor) or type(processor) in WARPERS | STATELESS:
        return True
    if type(processor) is SYNTHID and is_usual_synthid(processor):
        return True  # what it keeps is a function of the text
    return getattr(processor, "stateless", False) is True


class TopTokensWarper:
    """Consecutive warpers, top-k or top-p and then any of `AFTER_TOP_TOKENS`, applied to the likeliest tokens only.

    Top-p sorts the scores of the whole vocabulary, which on a CPU can take longer than a draft step. The tokens that
    it keeps are nearly always among the likeliest few hundred; where they are not, all scores are sorted.
    """

    def __init__(self, warpers: list[Any]):
        self.warpers, first = warpers, warpers[0]
        # twice as many as top-k keeps, since it also keeps all that tie with the last of these
        self.size = 2 * first.top_k if isinstance(first, logits_process.TopKLogitsWarper) else NUM_TOP_TOKENS

    def __call__(self, input_ids: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
        """Scores [N, V] after all warpers: those of transformers, except for the rounding of sums.

        Where tokens tie at the edge of top-p, which happens in half precision, others of them may be kept: there the
        choice of transformers depends on an unstable sort.
        """
        # on other devices sorting is quick, and reading `enough` back would wait for the device
        if scores.device.type != "cpu" or scores.shape[-1] <= 2 * self.size:
            return warp(self.warpers, scores)
        first, (values, ids) = self.warpers[0], scores.topk(self.size)
        # `enough` [N]: the first warper drops all tokens but the likeliest ones, so that these are enough
        if isinstance(first, logits_process.TopKLogitsWarper):
            least = values[:, -1]  # -inf where a grammar has left few tokens, and then all others are dropped already
            enough = (least < values[:, first.top_k - 1]) | (least == -torch.inf)
            values = warp([first], values)
        else:
            probs = scores.softmax(-1)
            total, top_probs = probs.sum(-1, dtype=torch.float64), probs.gather(-1, ids).double()
            ascending = total[:, None] - top_probs.cumsum(-1) + top_probs  # sums from the least likely token on
            dropped = ascending.to(scores.dtype) <= 1 - first.top_p
            dropped[:, : first.min_tokens_to_keep] = False
            values, enough = values.masked_fill(dropped, -torch.inf), dropped[:, -1]
        output = torch.full_like(scores, -torch.inf).scatter_(-1, ids, warp(self.warpers[1:], values))
        if not enough.all():
            output[~enough] = warp(self.warpers, scores[~enough])
        return output


def fuse_warpers(processors: Sequence[Any]) -> list[Any]:
    """The same processors in their order, but each run of warpers from top-k or top-p on as one `TopTokensWarper`."""
    applied: list[Any] = []
    for processor in processors:
        drops = getattr(processor, "filter_value", -torch.inf) == -torch.inf  # so that later warpers ignore them
        if drops and type(processor) in AFTER_TOP_TOKENS and applied and isinstance(applied[-1], TopTokensWarper):
            applied[-1].warpers.append(processor)
        elif drops and type(processor) in TOP_TOKENS and processor.min_tokens_to_keep < NUM_TOP_TOKENS:
            applied.append(TopTokensWarper([processor]))
        else:
            applied.append(processor)
    return applied


def warp(warpers: Sequence[Any], scores: torch.Tensor) -> torch.Tensor:
    """Scores [N, V] after warpers; rows without a distribution, at which some would raise, stay as they are."""
    for warper in warpers:
        if type(warper) in RAISING:
            is_undefined = scores.logsumexp(-1, keepdim=True).isfinite().logical_not()
            scores = warper(None, scores.masked_fill(is_undefined, 0)).where(~is_undefined, scores)
        else:
            scores = warper(None, scores)
    return scores
