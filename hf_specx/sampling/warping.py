"""Warpers that keep only the likeliest tokens, computed on those tokens alone.

Top-p sorts the scores of the whole vocabulary, which on a CPU can take longer than a draft step. The tokens that it
keeps are nearly always among the likeliest few hundred; where they are not, all scores are sorted, as in transformers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor


HEAD = 256  # the likeliest tokens that are looked at, where top-k does not say how many
FIRST = frozenset({logits_process.TopKLogitsWarper, logits_process.TopPLogitsWarper})
AFTER = FIRST | {  # for these a token with a score of -inf does not exist
    logits_process.TemperatureLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.LogitNormalization,
}
RAISING = frozenset({logits_process.TopHLogitsWarper, logits_process.EtaLogitsWarper})  # without a distribution


class HeadWarper:
    """Consecutive warpers of which the first keeps few tokens, applied to the likeliest tokens only.

    Args:
        warpers: top-k or top-p, then any of `AFTER`.
    """

    def __init__(self, warpers: Sequence[LogitsProcessor]):
        self.warpers = warpers
        first = warpers[0]
        # twice as many as top-k keeps, since it also keeps all that tie with the last of these
        self.size = 2 * first.top_k if isinstance(first, logits_process.TopKLogitsWarper) else HEAD

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [N, V] after all warpers: those of transformers, except for the rounding of sums.

        Where tokens tie at the edge of top-p, which happens in half precision, others of them may be kept: there the
        choice of transformers depends on an unstable sort.
        """
        # on other devices sorting is quick, and reading `enough` back would wait for the device
        if scores.device.type != "cpu" or scores.shape[-1] <= 2 * self.size:
            return warp(self.warpers, scores)
        values, ids = scores.topk(self.size)
        first, enough = self._first(scores, values, ids)
        output = torch.full_like(scores, -torch.inf).scatter_(-1, ids, warp(self.warpers[1:], first))
        if not enough.all():
            output[~enough] = warp(self.warpers, scores[~enough])
        return output

    def _first(
        self, scores: torch.Tensor, values: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [N, head] after the first warper, and [N] bool, whether it drops every token outside of the head."""
        first = self.warpers[0]
        if isinstance(first, logits_process.TopKLogitsWarper):
            least = values[:, -1]  # -inf where a grammar has left few tokens, and then all others are dropped already
            return warp([first], values), (least < values[:, first.top_k - 1]) | (least == -torch.inf)
        assert isinstance(first, logits_process.TopPLogitsWarper)
        probs = scores.softmax(-1)
        total, head = probs.sum(-1, dtype=torch.float64), probs.gather(-1, ids).double()
        ascending = total[:, None] - head.cumsum(-1) + head  # sums from the least likely token up to and with each
        dropped = ascending.to(scores.dtype) <= 1 - first.top_p
        dropped[:, : first.min_tokens_to_keep] = False
        return values.masked_fill(dropped, -torch.inf), dropped[:, -1]


def in_runs(processors: Sequence[Any]) -> list[Any]:
    """The same processors in order, each run of warpers that starts with top-k or top-p as one `HeadWarper`."""
    found: list[Any] = []
    start = 0
    while start < len(processors):
        end = start + 1
        if _starts(processors[start]):
            while end < len(processors) and type(processors[end]) in AFTER and _drops(processors[end]):
                end += 1
            found.append(HeadWarper(processors[start:end]))
        else:
            found.append(processors[start])
        start = end
    return found


def _starts(processor: object) -> bool:
    """Whether a `HeadWarper` can start with this processor."""
    few = getattr(processor, "min_tokens_to_keep", 1) < HEAD
    return type(processor) in FIRST and _drops(processor) and few


def _drops(processor: object) -> bool:
    """Whether the tokens that a warper removes get a score of -inf, so that later warpers ignore them."""
    return getattr(processor, "filter_value", -torch.inf) == -torch.inf


def warp(warpers: Sequence[LogitsProcessor], scores: torch.Tensor) -> torch.Tensor:
    """Scores [N, V] after warpers; rows without a distribution, which no text may get to, are no error of theirs."""
    unread = torch.zeros(len(scores), 1, dtype=torch.int64, device=scores.device)
    for warper in warpers:
        if type(warper) in RAISING:
            nowhere = scores.logsumexp(-1, keepdim=True).isfinite().logical_not()
            scores = warper(unread, scores.masked_fill(nowhere, 0)).where(~nowhere, scores)
        else:
            scores = warper(unread, scores)
    return scores
