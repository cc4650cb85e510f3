"""The verifiers of a call, which draw candidates from the draft's scores and judge them by the target's.

Greedy, by rejection sampling (token or block), or coupled by the noise of `generate`. The formulas are in `verify`.
"""

from typing import Any

import torch

from hf_specx.common.batch import Batch, RowState
from hf_specx.common.devices import to_device_async
from hf_specx.common.round import Draft, Verdict
from hf_specx.common.tree import at_nodes

from .noise import ReplayedNoise
from .verify import sample_exponential_race, sample_inverse_cdf, verify_block, verify_match, verify_token, verify_tree


Drawn = tuple[torch.Tensor, torch.Tensor | None]  # candidates, and the distribution they were drawn from, if any
PURPOSES = ("drafting", "accepting", "next token")  # of random numbers under rejection


class Verifier:
    """Draws and judges the candidates of one call.

    Attributes:
        seeded: whether each row has random numbers of its own, by its seed; the default generator is then not read.
        shared_noise: what `make_noise` has made for all rows together, if they are not `seeded`.
    """

    seeded: bool = False
    shared_noise: Any = None

    def start(self) -> None:
        """Begin to read the default generator where `generate` would: after the prompts were computed."""
        if not self.seeded:
            self.shared_noise = self.make_noise(None)

    def noise_of(self, row_state: RowState) -> Any:
        """The noise of a row that has a seed, made when it is first asked for."""
        if row_state.noise is None:
            row_state.noise = self.make_noise(row_state.seed)
        return row_state.noise

    def make_noise(self, seed: int | None) -> Any:
        """The source of random numbers for a row with this seed, or with None for all rows; greedy needs none."""
        return None

    def draw_candidates(self, batch: Batch, scores: torch.Tensor, ahead: int, lengths: list[int]) -> Drawn:
        """The next candidate of each row, drawn from the draft's processed scores [R, V].

        Args:
            ahead: how many candidates each row has already.
            lengths: [R], how many candidates each row is to have; what is drawn beyond that is not used.

        Returns:
            The candidates [R], and the distribution [R, V] that they were drawn from; None if they were not drawn.
        """
        raise NotImplementedError

    def top_candidates(self, batch: Batch, scores: torch.Tensor, ahead: int, count: int) -> Drawn:
        """The `count` best candidates of each row [R, count], best first, and q, as in `draw_candidates`.

        Of scores [R, n, V] at n nodes of a tree, all behind `ahead` candidates, it is [R, n, count]. Where there are
        more than one, only a verifier can judge them that goes by the target's own tokens.
        """
        raise NotImplementedError

    def verify(self, batch: Batch, draft: Draft, scores: torch.Tensor) -> Verdict:
        """The verdict on a draft by the target's scores [R, K + 1, V], after each node of a tree."""
        raise NotImplementedError

    def finish(self, columns: int) -> None:
        """Leave the default generator as `generate` does after `columns` emitted columns, if that is defined."""


class GreedyVerifier(Verifier):
    """Both models take their argmax."""

    def draw_candidates(self, batch: Batch, scores: torch.Tensor, ahead: int, lengths: list[int]) -> Drawn:
        return scores.argmax(-1), None

    def top_candidates(self, batch: Batch, scores: torch.Tensor, ahead: int, count: int) -> Drawn:
        return scores.topk(count).indices, None

    def verify(self, batch: Batch, draft: Draft, scores: torch.Tensor) -> Verdict:
        target_tokens = scores.argmax(-1)
        tokens, first = draft.first_choices().tokens, None if batch.tree is None else batch.tree.first_choice_nodes
        overlap = (tokens == at_nodes(target_tokens, first)[:, : tokens.shape[1]]).float()
        undefined = torch.zeros_like(target_tokens, dtype=torch.bool)
        return match_target_tokens(batch, draft, target_tokens, overlap, undefined)


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

    def draw_candidates(self, batch: Batch, scores: torch.Tensor, ahead: int, lengths: list[int]) -> Drawn:
        probs, _ = distribution(scores)
        return sample_inverse_cdf(probs, self.uniforms("drafting", batch, 1, lengths, ahead)[:, 0]), probs

    def verify(self, batch: Batch, draft: Draft, scores: torch.Tensor) -> Verdict:
        probs, undefined = distribution(scores)
        rows, max_length = draft.tokens.shape
        next_uniform = self.uniforms("next token", batch, 1, [1] * rows)[:, 0]
        if not max_length:
            return without_candidates(sample_inverse_cdf(probs[:, 0], next_uniform), undefined)
        draft_probs = draft.probs
        if draft_probs is None:  # all of q is at the candidate: x is kept with probability p(x)
            draft_probs = torch.zeros_like(probs[:, :-1]).scatter_(-1, draft.tokens[..., None], 1)
        uniforms = self.uniforms("accepting", batch, max_length, draft.lengths)
        verdict = self.algorithm(draft.tokens, draft_probs, probs, uniforms, next_uniform, draft.is_candidate)
        return verdict._replace(overlap=overlaps(probs, draft), undefined=undefined)

    def uniforms(self, purpose: str, batch: Batch, count: int, lengths: list[int], first: int = 0) -> torch.Tensor:
        """Random numbers from [0, 1), [R, count] float64, for `count` candidates of each row, from number `first` on.

        They are drawn on the CPU, wherever the text is: few are needed, and a device would take a kernel for each row.
        A row with a seed of its own draws none beyond its `lengths` [R], so that what it gets depends on nothing but
        how many it had before; the others are 0.
        """
        noise = torch.zeros(len(batch.rows), count, dtype=torch.float64, device="cpu")
        if not self.seeded:
            noise.uniform_(generator=self.shared_noise[purpose])
        else:
            for row_noise, row, length in zip(noise, batch.rows, lengths, strict=True):
                generators = self.noise_of(batch.row_states[row])
                row_noise[: max(0, length - first)].uniform_(generator=generators[purpose])
        return noise.to(batch.index.device, non_blocking=True)  # else it would wait for what the device has to do


class CoupledVerifier(Verifier):
    """Draft and target draw by an exponential race with the same noise: that of plain `generate`.

    It comes from the default generator, for all `rows` of the batch, finished ones too; `window` is as in
    `ReplayedNoise`. If `seeded`, a row gets the noise that `generate` would draw for it in a batch of one under its
    seed.
    """

    def __init__(self, rows: int, device: torch.device, window: int, seeded: bool = False):
        self.rows, self.device, self.window, self.seeded = rows, device, window, seeded
        self.target_dtype: torch.dtype | None = None  # of the target's probabilities

    def make_noise(self, seed: int | None) -> ReplayedNoise:
        return ReplayedNoise(self.rows if seed is None else 1, self.device, self.window, seed)

    def noise(self, batch: Batch, probs: torch.Tensor, ahead: int) -> torch.Tensor:
        """The noise, like probs [R, P, V], at P positions of each decoding row, the first `ahead` after its end.

        Of a tree, at P nodes from number `ahead` on; a node has the noise of its position.
        """
        if batch.tree is not None:
            positions = probs.new_empty(()).expand(len(probs), 1 + batch.tree.depth, probs.shape[-1])
            noise = self._noise_at(batch, positions, 0)
            return at_nodes(noise, batch.tree.node_depths[:, ahead : ahead + probs.shape[1]])
        return self._noise_at(batch, probs, ahead)

    def _noise_at(self, batch: Batch, probs: torch.Tensor, ahead: int) -> torch.Tensor:
        """The noise at P consecutive positions, like probs [R, P, V]."""
        if not self.seeded:
            return self.shared_noise.vectors_at(batch.rows, batch.counts, probs, ahead, self.target_dtype)
        noise = []
        for row, row_probs in zip(batch.rows, probs.split(1), strict=True):
            if batch.row_states[row].greedy:
                noise.append(torch.ones_like(row_probs))
                continue
            replayed = self.noise_of(batch.row_states[row])
            noise.append(replayed.vectors_at([0], [batch.counts[row]], row_probs, ahead, self.target_dtype))
        return torch.cat(noise)

    def draw_candidates(self, batch: Batch, scores: torch.Tensor, ahead: int, lengths: list[int]) -> Drawn:
        probs, _ = distribution(scores)
        return sample_exponential_race(probs, self.noise(batch, probs[:, None], ahead)[:, 0]), probs

    def top_candidates(self, batch: Batch, scores: torch.Tensor, ahead: int, count: int) -> Drawn:
        probs, _ = distribution(scores)
        of_nodes = probs.view(len(probs), -1, probs.shape[-1])  # [R, n, V]; n is 1 for scores [R, V]
        weights = of_nodes / self._noise_at(batch, of_nodes[:, :1], ahead)  # all nodes are at one position
        greedy = [batch.row_states[row].greedy for row in batch.rows]
        if any(greedy):  # all but one of the probabilities are 0 there
            is_greedy = to_device_async(greedy, probs.device)[:, None, None]
            weights = torch.where(is_greedy, scores.view_as(weights), weights)
        return weights.topk(count).indices.view(*scores.shape[:-1], count), probs

    def verify(self, batch: Batch, draft: Draft, scores: torch.Tensor) -> Verdict:
        probs, undefined = distribution(scores)
        self.target_dtype = probs.dtype  # the draft's may be another; the first round has no candidates
        target_tokens = sample_exponential_race(probs, self.noise(batch, probs, 0))
        if not draft.tokens.shape[1]:
            return without_candidates(target_tokens[:, 0], undefined)
        first = None if batch.tree is None else batch.tree.first_choice_nodes
        return match_target_tokens(batch, draft, target_tokens, overlaps(at_nodes(probs, first), draft), undefined)

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
    """Probabilities [..., V] of scores, and `undefined` [...] bool: where scores are NaN or exclude every token.

    The distribution is uniform there. For a draft any is right that candidates are both drawn from and judged by; of a
    target it is not used, since a row that gets there ends with an error.
    """
    probs = scores.softmax(-1)
    undefined = probs[..., 0].isnan()  # one NaN makes the whole softmax NaN
    if probs.device.type != "cpu" or undefined.any():  # on other devices the question would wait for them
        probs.masked_fill_(undefined[..., None], 1 / probs.shape[-1])
    return probs, undefined


def match_target_tokens(
    batch: Batch, draft: Draft, target_tokens: torch.Tensor, overlap: torch.Tensor, undefined: torch.Tensor
) -> Verdict:
    """The verdict on a chain or a tree by the target's own tokens [R, K + 1] after each node."""
    if batch.tree is None:
        verdict = verify_match(draft.tokens, target_tokens, draft.is_candidate)
    else:
        verdict = verify_tree(draft.tokens, target_tokens, batch.tree, draft.is_candidate)
    return verdict._replace(overlap=overlap, undefined=at_nodes(undefined, verdict.path_nodes))


def without_candidates(tokens: torch.Tensor, undefined: torch.Tensor) -> Verdict:
    """The verdict of a round without candidates, in which rows choose `tokens` [R]."""
    empty = tokens.new_zeros(len(tokens), 0, dtype=torch.float32)
    return Verdict(tokens.new_zeros(len(tokens)), tokens, empty, empty, undefined)


def overlaps(probs: torch.Tensor, draft: Draft) -> torch.Tensor:
    """sum_x min(p, q) at each candidate, [R, K]; where candidates were not drawn q is 1 at each, so it is p(x).

    Of a tree, at each candidate of first choice, where `probs` are those after the nodes on their branch.
    """
    tokens = draft.first_choices().tokens
    probs = probs[:, : tokens.shape[1]]
    if draft.probs is None:
        return probs.gather(-1, tokens[..., None])[..., 0]
    return torch.minimum(probs, draft.probs[:, : tokens.shape[1]]).sum(-1)
