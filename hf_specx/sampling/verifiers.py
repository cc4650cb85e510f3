"""How tokens are chosen and judged: greedily, by rejection with independent noise, or coupled by that of `generate`.

A verifier draws the candidates from the draft's scores and judges them by the target's; the formulas are in `verify`.
"""

from typing import Any

import torch

from hf_specx.common.batch import Batch, Row
from hf_specx.common.round import Draft, Verdict

from .noise import ReplayedNoise
from .verify import pick, race, verify_block, verify_match, verify_token


Choice = tuple[torch.Tensor, torch.Tensor | None]
PURPOSES = ("drafting", "accepting", "choosing")  # of random numbers under rejection


class Verifier:
    """Draws and judges the candidates of one call.

    Attributes:
        seeded: whether each row has random numbers of its own, by its seed; the default generator is then not read.
        shared_noise: where the numbers of all rows come from, if they are not `seeded`.
    """

    seeded: bool = False
    shared_noise: Any = None

    def start(self) -> None:
        """Take up the noise where `generate` would: after the target has read the prompts."""
        if not self.seeded:
            self.shared_noise = self.make_noise(None)

    def noise_of(self, row: Row) -> Any:
        """Where the numbers of a row with a seed come from."""
        if row.noise is None:
            row.noise = self.make_noise(row.seed)
        return row.noise

    def make_noise(self, seed: int | None) -> Any:
        """Where the numbers of a row with this seed come from; with None, those of all rows."""
        return None

    def choose(self, batch: Batch, scores: torch.Tensor, ahead: int, lengths: list[int]) -> Choice:
        """A candidate for each row [R], from the draft's processed scores [R, V], after `ahead` candidates.

        `lengths` [R] is how many candidates a row is to have; what is chosen beyond that is not used. Also the
        distribution that they were drawn from, [R, V]; None if they were not drawn.
        """
        raise NotImplementedError

    def verify(self, batch: Batch, draft: Draft, scores: torch.Tensor) -> Verdict:
        """The verdict on a draft by the target's scores [R, K + 1, V]."""
        raise NotImplementedError

    def finish(self, columns: int) -> None:
        """If coupled, leave the default generator as `generate` does after `columns` emitted columns."""


class GreedyVerifier(Verifier):
    """Both models take their argmax."""

    def choose(self, batch: Batch, scores: torch.Tensor, ahead: int, lengths: list[int]) -> Choice:
        return scores.argmax(-1), None

    def verify(self, batch: Batch, draft: Draft, scores: torch.Tensor) -> Verdict:
        choices = scores.argmax(-1)
        overlap = (draft.tokens == choices[:, :-1]).float()
        undefined = torch.zeros_like(choices, dtype=torch.bool)
        verdict = verify_match(draft.tokens, choices, draft.proposed)
        return verdict._replace(overlap=overlap, undefined=undefined)


class RejectionVerifier(Verifier):
    """Token or block verification; drafting, acceptance and the next token each have random numbers of their own.

    Their seeds are drawn from the default generator of the device of `input_ids`, so `torch.manual_seed` fixes them.
    If `seeded`, a row's tokens are independent of other rows if its numbers of candidates are, except in lockstep.
    """

    def __init__(self, block: bool, device: torch.device, seeded: bool = False):
        self.algorithm = verify_block if block else verify_token
        self.device, self.seeded = device, seeded

    def make_noise(self, seed: int | None) -> dict[str, torch.Generator]:
        """A generator for each purpose."""
        source = None if seed is None else torch.Generator("cpu").manual_seed(int(seed))
        device = self.device if seed is None else "cpu"
        seeds = torch.randint(2**62, (len(PURPOSES),), generator=source, device=device).tolist()
        return {name: torch.Generator("cpu").manual_seed(each) for name, each in zip(PURPOSES, seeds, strict=True)}

    def choose(self, batch: Batch, scores: torch.Tensor, ahead: int, lengths: list[int]) -> Choice:
        probs, _ = distribution(scores)
        return pick(probs, self.uniforms("drafting", batch, 1, lengths, ahead)[:, 0]), probs

    def verify(self, batch: Batch, draft: Draft, scores: torch.Tensor) -> Verdict:
        probs, undefined = distribution(scores)
        rows, most = draft.tokens.shape
        choice = self.uniforms("choosing", batch, 1, [1] * rows)[:, 0]
        if not most:
            return without_candidates(pick(probs[:, 0], choice), undefined)
        draft_probs = draft.probs
        if draft_probs is None:  # all of q is at the candidate: x is kept with probability p(x)
            draft_probs = torch.zeros_like(probs[:, :-1]).scatter_(-1, draft.tokens[..., None], 1)
        uniforms = self.uniforms("accepting", batch, most, draft.lengths)
        verdict = self.algorithm(draft.tokens, draft_probs, probs, uniforms, choice, draft.proposed)
        return verdict._replace(overlap=overlaps(probs, draft), undefined=undefined)

    def uniforms(self, purpose: str, batch: Batch, most: int, lengths: list[int], first: int = 0) -> torch.Tensor:
        """Numbers from [0, 1) for the decoding rows, [R, most] float64, from the candidate `first` on.

        They are drawn on the CPU, wherever the text is: few are needed, and a device would take a kernel for each row.
        A row with a seed of its own draws none beyond its `lengths` [R], so that what it gets depends on nothing but
        how many it had before; the others are 0.
        """
        noise = torch.zeros(len(batch.rows), most, dtype=torch.float64, device="cpu")
        if not self.seeded:
            noise.uniform_(generator=self.shared_noise[purpose])
        else:
            for row_noise, row, length in zip(noise, batch.rows, lengths, strict=True):
                generators = self.noise_of(batch.table[row])
                row_noise[: max(0, length - first)].uniform_(generator=generators[purpose])
        return noise.to(batch.index.device, non_blocking=True)  # else it would wait for what the device has to do


class CoupledVerifier(Verifier):
    """Draft and target draw by `race` with the same noise, which is that of plain `generate` from its default
    generator.

    It draws for all `rows` of the batch, finished ones too; `window` columns are kept for a row, see `ReplayedNoise`.
    If `seeded`, each row gets the noise of `generate` for it alone under its seed.
    """

    def __init__(self, rows: int, device: torch.device, window: int, seeded: bool = False):
        self.rows, self.device, self.window, self.seeded = rows, device, window, seeded
        self.dtype: torch.dtype | None = None  # of the target's probabilities

    def make_noise(self, seed: int | None) -> ReplayedNoise:
        return ReplayedNoise(self.rows if seed is None else 1, self.device, self.window, seed)

    def noise(self, batch: Batch, probs: torch.Tensor, ahead: int) -> torch.Tensor:
        """The noise of P positions from `ahead` after each decoding row's end on, like probs [R, P, V]."""
        if not self.seeded:
            return self.shared_noise.at(batch.rows, batch.counts, probs, ahead, self.dtype)
        noise = []
        for row, row_probs in zip(batch.rows, probs.split(1), strict=True):
            if batch.table[row].greedy:
                noise.append(torch.ones_like(row_probs))
                continue
            replayed = self.noise_of(batch.table[row])
            noise.append(replayed.at([0], [batch.counts[row]], row_probs, ahead, self.dtype))
        return torch.cat(noise)

    def choose(self, batch: Batch, scores: torch.Tensor, ahead: int, lengths: list[int]) -> Choice:
        probs, _ = distribution(scores)
        return race(probs, self.noise(batch, probs[:, None], ahead)[:, 0]), probs

    def verify(self, batch: Batch, draft: Draft, scores: torch.Tensor) -> Verdict:
        probs, undefined = distribution(scores)
        self.dtype = probs.dtype  # which the draft's need not have; the first round has no candidates
        choices = race(probs, self.noise(batch, probs, 0))
        if not draft.tokens.shape[1]:
            return without_candidates(choices[:, 0], undefined)
        verdict = verify_match(draft.tokens, choices, draft.proposed)
        return verdict._replace(overlap=overlaps(probs, draft), undefined=undefined)

    def finish(self, columns: int) -> None:
        if not self.seeded:
            self.shared_noise.finish(columns)


def make_verifier(verification: str, input_ids: torch.Tensor, window: int, seeded: bool = False) -> Verifier:
    """The verifier of a call with prompts [B, L]; `verification` is "greedy", "token", "block" or "coupled"."""
    if verification == "greedy":
        return GreedyVerifier()
    if verification == "coupled":
        return CoupledVerifier(len(input_ids), input_ids.device, window, seeded)
    return RejectionVerifier(verification == "block", input_ids.device, seeded)


def distribution(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [..., V], and where there are none [...] bool: scores are NaN there, or exclude every token.

    A uniform distribution is put there. For a draft any is right that candidates are both drawn from and judged by;
    for a target the row is undefined if it gets there.
    """
    probs = scores.softmax(-1)
    undefined = probs[..., 0].isnan()  # one NaN makes the whole softmax NaN
    if probs.device.type != "cpu" or undefined.any():  # on other devices the question would wait for them
        probs.masked_fill_(undefined[..., None], 1 / probs.shape[-1])
    return probs, undefined


def without_candidates(tokens: torch.Tensor, undefined: torch.Tensor) -> Verdict:
    """What every verification comes to in a round without candidates, in which rows choose `tokens` [R]."""
    nothing = tokens.new_zeros(len(tokens), 0, dtype=torch.float32)
    return Verdict(tokens.new_zeros(len(tokens)), tokens, nothing, nothing, undefined)


def overlaps(probs: torch.Tensor, draft: Draft) -> torch.Tensor:
    """sum_x min(p, q) at each candidate [R, K]; if candidates were not drawn, q is 1 at each, so this is p(x)."""
    if draft.probs is None:
        return probs[:, :-1].gather(-1, draft.tokens[..., None])[..., 0]
    return torch.minimum(probs[:, :-1], draft.probs).sum(-1)
