"""How tokens are chosen and judged: greedily, by rejection with independent noise, or coupled with the noise of stock.

A rule draws the candidates from the draft's scores and judges them by the target's; `verify` has the arithmetic.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

from hf_specx.common.batch import Sequences

from .noise import NoiseStream, SeededNoise, StockNoise, independent_streams
from .verify import Verdict, pick, race, verify_block, verify_match, verify_token


Choice = tuple[torch.Tensor, torch.Tensor | None]


class Draft(NamedTuple):
    """Candidates and the law they were drawn from.

    Attributes:
        tokens: [R, K] int64.
        probs: [R, K, V] float32, q; None where K is 0 or the candidates are no draw from a law.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None


class Judgement(NamedTuple):
    """What a rule says of a draft.

    Attributes:
        verdict: accepted [R] and next_token [R].
        overlap: [R, K], sum_x min(p, q) at each candidate; under greedy 1 for a match.
        undefined: [R, K + 1] bool, positions that have no law, where stock raises an error if the row gets there.
    """

    verdict: Verdict
    overlap: torch.Tensor
    undefined: torch.Tensor


class Rule(Protocol):
    """The decisions of one call; it keeps the state of its noise."""

    def choose(self, sequences: Sequences, scores: torch.Tensor, ahead: int) -> Choice:
        """The candidate [R] for the position `ahead` behind each row's end, by scores [R, V], and its law [R, V]."""

    def judge(self, sequences: Sequences, draft: Draft, scores: torch.Tensor) -> Judgement:
        """The judgement on a draft by the target's scores [R, K + 1, V]."""

    def alone(self) -> AbstractContextManager[None]:
        """For processors and criteria that are called in order: raises where they take noise that is redrawn here."""

    def finish(self, columns: int) -> None:
        """Leave the global generator where it belongs after `columns` emitted columns."""


class GreedyRule:
    """Both models take their argmax."""

    def choose(self, sequences: Sequences, scores: torch.Tensor, ahead: int) -> Choice:
        return scores.argmax(-1), None

    def judge(self, sequences: Sequences, draft: Draft, scores: torch.Tensor) -> Judgement:
        choices = scores.argmax(-1)
        verdict = verify_match(draft.tokens, choices)
        overlap = (draft.tokens == choices[:, :-1]).float()
        return Judgement(verdict, overlap, torch.zeros_like(choices, dtype=torch.bool))

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, columns: int) -> None:
        pass


class RejectionRule:
    """Token or block verification: drafts, acceptance and residual each have a stream of their own.

    Their seeds are drawn from the default generator, so `torch.manual_seed` fixes all of them.

    Args:
        block: whether by block rather than by token.
        device: of `input_ids`.
        seeds: one a row of the batch, which then has streams of its own; the default generator is not read. A row's
            tokens depend on nothing of its mates' as long as K is the same each round and rows advance alone.
    """

    def __init__(self, block: bool, device: torch.device, seeds: list[int] | None = None):
        self.verify = verify_block if block else verify_token
        self.drafts, self.uniforms, self.residuals = independent_streams(3, device, seeds)

    def choose(self, sequences: Sequences, scores: torch.Tensor, ahead: int) -> Choice:
        probs, _ = law(scores)
        return pick(probs, self._uniforms(self.drafts, sequences)), probs

    def judge(self, sequences: Sequences, draft: Draft, scores: torch.Tensor) -> Judgement:
        probs, undefined = law(scores)
        draft_probs = probs[:, :0] if draft.probs is None else draft.probs
        uniforms = self._uniforms(self.uniforms, sequences, draft.tokens.shape[1])
        verdict = self.verify(draft.tokens, draft_probs, probs, uniforms, self._uniforms(self.residuals, sequences))
        return Judgement(verdict, overlaps(probs, draft), undefined)

    def _uniforms(self, stream: NoiseStream, sequences: Sequences, *shape: int) -> torch.Tensor:
        """Uniforms [R, ...] of the decoding rows."""
        index = sequences.index
        return stream.uniforms(sequences, torch.empty(len(index), *shape, dtype=torch.float64, device=index.device))

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, columns: int) -> None:
        pass


class CoupledRule:
    """Draft and target race with the same noise, and it is the noise that stock sampling would have drawn.

    Args:
        rows: B, the whole batch; stock draws for finished rows too.
        device: of `input_ids`, whose default generator stock draws from.
        window: positions whose noise is held; others are drawn again from their saved generator state.
        seeds: one a row of the batch, which then gets what stock would draw for it alone under that seed.
    """

    def __init__(self, rows: int, device: torch.device, window: int, seeds: list[int] | None = None):
        self.noise = StockNoise(rows, device, window) if seeds is None else SeededNoise(seeds, device)

    def choose(self, sequences: Sequences, scores: torch.Tensor, ahead: int) -> Choice:
        probs, _ = law(scores)
        return race(probs, self.noise.at(sequences, probs[:, None], ahead)[:, 0]), probs

    def judge(self, sequences: Sequences, draft: Draft, scores: torch.Tensor) -> Judgement:
        probs, undefined = law(scores)
        verdict = verify_match(draft.tokens, race(probs, self.noise.at(sequences, probs, 0)))
        return Judgement(verdict, overlaps(probs, draft), undefined)

    def alone(self) -> AbstractContextManager[None]:
        return self.noise.alone()

    def finish(self, columns: int) -> None:
        self.noise.finish(columns)


def law(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [..., V], and where there are none [...]: scores that are NaN, or that exclude every token.

    There the law is taken as uniform. For a draft any law is right as long as it is the one that is drawn from and
    judged by; for a target the row is undefined if it gets there.
    """
    probs = scores.softmax(-1)
    undefined = probs[..., 0].isnan()  # one NaN makes the whole softmax NaN
    if probs.device.type != "cpu" or undefined.any():  # to ask would make other devices wait
        probs.masked_fill_(undefined[..., None], 1 / probs.shape[-1])
    return probs, undefined


def overlaps(probs: torch.Tensor, draft: Draft) -> torch.Tensor:
    """sum_x min(p, q) at each candidate [R, K]; for a candidate that is no draw q is 1 at it, so this is p(x)."""
    if draft.probs is None:
        return probs[:, :-1].gather(-1, draft.tokens[..., None])[..., 0]
    return torch.minimum(probs[:, :-1], draft.probs).sum(-1)
