"""What tests of the check share: a tiny pair, quick settings, and faulty variants that must be seen."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny import near, tiny
from tiny_tokenizer import SIZES, TEXTS, tiny_tokenizer

from hf_specx import CheckResult, DraftTargetPair, check
from hf_specx.common.round import Verdict
from hf_specx.engine.run import Run
from hf_specx.models.attention import Masks
from hf_specx.models.runner import ModelRunner
from hf_specx.sampling import verifiers, verify
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.verifiers import CoupledVerifier, GreedyVerifier, RejectionVerifier, distribution
from hf_specx.sampling.verify import sample_exponential_race, sample_inverse_cdf, verify_match, verify_token


QUICK = {"batch_sizes": (32,), "max_new_tokens": 16, "samples": 64, "num_draft_tokens": 3}
QUICK |= {"temperature": 0.7, "top_k": 0}
PROMPTS = [*TEXTS, "the dog on the mat"]


@cache
def tiny_pair(dtype: torch.dtype = torch.float32) -> DraftTargetPair:
    target = tiny(**SIZES)
    draft = near(target, 0.07).to(dtype)
    return DraftTargetPair(target.to(dtype), draft, tiny_tokenizer())


def quick(pair: DraftTargetPair | None = None, **changes) -> CheckResult:
    """A check of the tiny pair, or another, that takes a second or two."""
    return check(pair or tiny_pair(), PROMPTS, **{"advance": lambda: None} | QUICK | changes)


def failed(result: CheckResult) -> set[str]:
    """The verifications that a check rejects."""
    return {line.what.split(":")[0].split(",")[0] for line in result.lines if line.verdict == "failed"}


def forced(passed: torch.Tensor) -> torch.Tensor:
    """Uniforms [B, K] by which token verification keeps exactly the candidates that have passed."""
    return torch.where(passed, 0.0, torch.inf).double()


def counts(candidates: torch.Tensor, is_candidate: torch.Tensor | None) -> torch.Tensor:
    """Candidates [B] of each row."""
    return torch.ones_like(candidates).sum(-1) if is_candidate is None else is_candidate.sum(-1)


def all_accepted(candidates, q, p, uniforms, next_uniform, is_candidate=None) -> Verdict:
    accepted = counts(candidates, is_candidate)
    return Verdict(accepted, sample_inverse_cdf(p[torch.arange(len(p)), accepted], next_uniform), uniforms)


def inverted(candidates, q, p, uniforms, next_uniform, is_candidate=None) -> Verdict:
    """u < q / p."""
    p_at, q_at = (x.gather(-1, candidates[..., None])[..., 0] for x in (p[:, :-1], q))
    return verify_token(candidates, q, p, forced(uniforms * p_at < q_at), next_uniform, is_candidate)


def last_kept(
    candidates: torch.Tensor, target_tokens: torch.Tensor, is_candidate: torch.Tensor | None = None
) -> Verdict:
    """One candidate more than agrees with the target."""
    right = verify_match(candidates, target_tokens, is_candidate)
    accepted = torch.minimum(right.accepted + 1, counts(candidates, is_candidate))
    return Verdict(accepted, target_tokens.gather(1, accepted[:, None])[:, 0], right.prefix_acceptance)


def colder(verifier: RejectionVerifier, batch, scores, ahead, lengths):
    """The draft samples at half the temperature that it is judged by."""
    uniforms = verifier.uniforms("drafting", batch, 1, lengths, ahead)
    return sample_inverse_cdf(distribution(scores * 2)[0], uniforms[:, 0]), distribution(scores)[0]


def keeping_within(nats: float) -> Callable:
    """`verify` of greedy and coupled rules that keeps a candidate as far below the best choice as that."""

    def verify(verifier, batch, draft, scores):
        if isinstance(verifier, CoupledVerifier):
            probs, _ = distribution(scores)
            verifier.target_dtype = probs.dtype
            scores = probs.double().log() - verifier.noise(batch, probs, 0).double().log()
        best, undefined = scores.max(-1), torch.zeros(scores.shape[:2], dtype=torch.bool)
        candidates = draft.tokens
        near = scores[:, :-1].gather(-1, candidates[..., None])[..., 0] >= best.values[:, :-1] - nats
        target_tokens = torch.cat([torch.where(near, candidates, best.indices[:, :-1]), best.indices[:, -1:]], 1)
        return verify_match(candidates, target_tokens, draft.is_candidate)._replace(
            overlap=near.float(), undefined=undefined
        )

    return verify


def keep_within(monkeypatch: pytest.MonkeyPatch, nats: float) -> None:
    """Put `keeping_within` in; 0 is right."""
    for verifier in (GreedyVerifier, CoupledVerifier) if nats else ():
        monkeypatch.setattr(verifier, "verify", keeping_within(nats))


def with_fresh_noise(verifier: CoupledVerifier, batch, draft, scores):
    probs, undefined = distribution(scores)
    target_tokens = sample_exponential_race(probs, verifier.noise(batch, probs, 0).flip(-1))  # that of other tokens
    verdict = verify_match(draft.tokens, target_tokens, draft.is_candidate)
    return verdict._replace(overlap=verifiers.overlaps(probs, draft), undefined=undefined)


def between(shift: int) -> Callable:
    """Masks by which a query sees `shift` keys more than those up to itself."""

    def wrong(masks, queries, keys, known=None, first=0):
        return RIGHT_MASKS(masks, queries + shift, keys, known, first)

    return wrong


def positions_behind(decoder, batch, emitted):
    """Of emitted tokens, one too far."""
    return RIGHT_POSITIONS(decoder, batch, emitted + 1)


def last_skipped(run):
    """Processors of a call, of which the target's scores get all but the last."""
    call, right = run.call, RIGHT_PROCESSORS(run)
    run.call = replace(call, processors=call.processors[:-1])
    fewer = RIGHT_PROCESSORS(run)
    run.call = call

    class Skipping(Processors):
        def __init__(self):
            vars(self).update(vars(right))

        def __call__(self, batch, draft, scores, ahead=0):
            return (right if draft is None else fewer)(batch, draft, scores, ahead)

    return Skipping()


RIGHT_MASKS, RIGHT_POSITIONS, RIGHT_PROCESSORS = Masks.between, ModelRunner._positions, Run._make_processors
LAWFUL, EXACT, SAMPLED = {"token", "block"}, {"greedy", "coupled"}, {"coupled", "token", "block"}
# what is replaced, by what, which verifications are checked, and which of them must fail
FAULTS = {
    "bonus in place of recovered": (verify, "_draw", lambda residual, p, u: sample_inverse_cdf(p, u), LAWFUL, LAWFUL),
    "everything accepted": (verifiers, "verify_token", all_accepted, LAWFUL, {"token"}),
    "ratio upside down": (verifiers, "verify_token", inverted, LAWFUL, {"token"}),
    "draft at another temperature": (RejectionVerifier, "draw_candidates", colder, LAWFUL, LAWFUL),
    "one candidate too many": (verifiers, "verify_match", last_kept, EXACT, EXACT),
    "mask that hides the query itself": (Masks, "between", between(-1), EXACT | LAWFUL, EXACT | LAWFUL),
    "mask that shows the next candidate": (Masks, "between", between(1), EXACT | LAWFUL, EXACT | LAWFUL),
    "position off by one": (ModelRunner, "_positions", positions_behind, EXACT | LAWFUL, EXACT | LAWFUL),
    "processor skipped on the target": (Run, "_make_processors", last_skipped, SAMPLED, SAMPLED),
    "coupled with fresh noise": (CoupledVerifier, "verify", with_fresh_noise, {"coupled"}, {"coupled"}),
}


def inject(monkeypatch: pytest.MonkeyPatch, fault: str) -> tuple[set[str], set[str]]:
    """Put a fault in; returns the verifications that are to be checked, and those that must fail."""
    place, name, wrong, checked, rejected = FAULTS[fault]
    monkeypatch.setattr(place, name, wrong)
    return checked, rejected
