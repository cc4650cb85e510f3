"""Verification as it must not be, for tests that have to see it."""

import torch

from hf_specx.common.round import Verdict
from hf_specx.sampling.verifiers import RejectionVerifier
from hf_specx.sampling.verify import sample_inverse_cdf, verify_block, verify_token


class SharedNoise(RejectionVerifier):
    """The recovered token is drawn by the number that its rejected candidate was drawn by.

    Candidate i is drawn from q by the uniform d_i, and the next token from the residual by the one that failed.
    """

    def draw_candidates(self, batch, scores, ahead, lengths):
        state = self.shared_noise["drafting"].get_state()
        token, probs = super().draw_candidates(batch, scores, ahead, lengths)
        again = torch.Generator().set_state(state)
        drawn = torch.rand(len(probs), generator=again, dtype=torch.float64)
        self.drawn = [*(self.drawn if ahead else []), drawn]
        return token, probs

    def verify(self, batch, draft, scores):
        right = self.algorithm

        def wrong(candidates, q, p, uniforms, next_uniform, is_candidate):
            accepted = right(candidates, q, p, uniforms, next_uniform, is_candidate).accepted
            if candidates.shape[1]:
                drawn = torch.stack([*self.drawn, next_uniform], 1)  # [R, K + 1]
                next_uniform = drawn[torch.arange(len(accepted)), accepted]
            return right(candidates, q, p, uniforms, next_uniform, is_candidate)

        self.algorithm = wrong
        try:
            return super().verify(batch, draft, scores)
        finally:
            self.algorithm = right


class GreedyDraft(RejectionVerifier):
    """Candidates are the draft's argmax, and are judged as if drawn from its distribution."""

    def draw_candidates(self, batch, scores, ahead, lengths):
        return scores.argmax(-1), scores.softmax(-1)


class OneStream(RejectionVerifier):
    """A row's acceptance and its residual are drawn with what its drafts are drawn with."""

    def make_noise(self, seed):
        generators = super().make_noise(seed)
        for name in ("accepting", "next token"):
            generators[name].manual_seed(generators["drafting"].initial_seed())
        return generators


class Restarted(RejectionVerifier):
    """The streams of a row start anew each round."""

    def draw_candidates(self, batch, scores, ahead, lengths):
        if ahead == 0:
            self.restart(batch, "drafting")
        return super().draw_candidates(batch, scores, ahead, lengths)

    def verify(self, batch, draft, scores):
        self.restart(batch, "accepting", "next token")
        return super().verify(batch, draft, scores)

    def restart(self, batch, *names):
        for row in batch.row_states:
            generators = self.noise_of(row)
            for name in names:
                generators[name].manual_seed(generators[name].initial_seed())


def block_to_first_failure(candidates, q, p, uniforms, next_uniform, is_candidate) -> Verdict:
    """Block verification with `break` where the paper goes on to the later indices."""
    index = torch.arange(candidates.shape[1])
    if not len(index):
        return verify_block(candidates, q, p, uniforms, next_uniform, is_candidate)
    alone = [uniforms.where(index == i, 1.0) for i in index]  # no index but i can pass
    passed = [verify_block(candidates, q, p, u, next_uniform, is_candidate).accepted > 0 for u in alone]
    run = torch.stack(passed, 1).cumprod(1).sum(1, keepdim=True)
    return verify_block(candidates, q, p, torch.where(index + 1 == run, 0.0, 1.0).double(), next_uniform, is_candidate)


def token_without_unlikely(candidates, q, p, uniforms, next_uniform, is_candidate) -> Verdict:
    """Token verification that takes an unlikely candidate, and those after it, as not drafted."""
    likely = q.gather(-1, candidates[..., None])[..., 0] > 0.15
    drafted = likely.cumprod(1).bool()
    return verify_token(
        candidates, q, p, uniforms, next_uniform, drafted if is_candidate is None else drafted & is_candidate
    )


CONTROLS: dict[str, tuple[str, str, str, object]] = {
    "residual by the draft's noise": ("token", "sampling.verifiers", "RejectionVerifier", SharedNoise),
    "residual replaced by the target": ("token", "sampling.verify", "_draw", lambda _, p, u: sample_inverse_cdf(p, u)),
    "greedy draft, soft q": ("token", "sampling.verifiers", "RejectionVerifier", GreedyDraft),
    "block up to the first failure": ("block", "sampling.verifiers", "verify_block", block_to_first_failure),
    "unlikely candidates dropped": ("token", "sampling.verifiers", "verify_token", token_without_unlikely),
}
SEEDED_CONTROLS: dict[str, tuple[str, str, str, object]] = {
    "one stream for all uses": ("token", "sampling.verifiers", "RejectionVerifier", OneStream),
    "streams that start anew": ("token", "sampling.verifiers", "RejectionVerifier", Restarted),
}
