"""The verifiers: which candidates stay, and which token follows them.

Pure tensor functions: all randomness comes in as arguments, and nothing here knows a model, a cache or a text.

Words (one meaning each, everywhere in this package):
    candidate: a drafted token that is not judged yet.
    accepted token: a candidate that the verifier kept.
    recovered token: drawn from the residual, after a rejection.
    bonus token: drawn from the target, after all candidates were accepted.
    residual: norm(max(0, p - q)), what the target gives beyond the draft.
    round: draft, one target forward, verify.
Shapes: B rows, K candidates, V vocabulary. As in the papers p is the target's law and q the draft's, both after
every logits processor, and q is the very law that the candidate was drawn from.
"""

from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    """What one round decided for each row.

    Attributes:
        accepted: [B] int64, how many leading candidates are kept, 0 to K.
        next_token: [B] int64, the recovered token (accepted < K) or the bonus token (accepted == K).
        survival: [B, K], the chance that at least i candidates are kept, i = 1 to the row's length, given these.
    """

    accepted: torch.Tensor
    next_token: torch.Tensor
    survival: torch.Tensor


def verify_token(
    candidates: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    choice: torch.Tensor,
    proposed: torch.Tensor | None = None,
) -> Verdict:
    """Token verification: Algorithm 1 of Leviathan et al. 2022 (arXiv 2211.17192).

    Candidate x is accepted with probability min(1, p(x) / q(x)); the first rejection ends the row's run.

    Args:
        candidates: [B, K] int64, drawn from `draft_probs`.
        draft_probs: [B, K, V], q.
        target_probs: [B, K + 1, V], p; the last position is the one after all candidates.
        uniforms: [B, K] float64 in [0, 1), independent of everything that the draft used.
        choice: [B] float64 in [0, 1), independent of the two above; picks the next token.
        proposed: [B, K] bool, the leading ones of each row that are candidates; None if all are. After them q is 0:
            the next token of a row that keeps them all is drawn from p, at the row's own length.
    """
    p, q = _at(target_probs[:, :-1], candidates), _at(draft_probs, candidates)  # [B, K]
    passed = uniforms * q < p  # strict: u may be 0, and a token with p = 0 must never pass
    accepted = _leading(passed if proposed is None else passed & proposed).sum(-1)
    target = _row(target_probs, accepted)  # [B, V]
    residual = target
    if most := candidates.shape[1]:
        all_kept = accepted == (most if proposed is None else proposed.sum(-1))
        draft = _row(draft_probs, accepted.clamp(max=most - 1))
        residual = (target - draft.masked_fill_(all_kept[:, None], 0)).clamp_(min=0)
    survival = (p.double() / q).clamp(max=1).cumprod(-1)
    return Verdict(accepted, _draw(residual, target, choice), survival)


def verify_block(
    candidates: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    choice: torch.Tensor,
    proposed: torch.Tensor | None = None,
) -> Verdict:
    """Block verification: Algorithm 2 of Sun et al. 2024 (arXiv 2403.10444), never shorter on average than token.

    P(at least i candidates are kept | X^i) is p_i = min(1, p_{i-1} * p(x_i) / q(x_i)). Where q is taken as 0
    behind the last candidate, the position there is an ordinary one: Z = h = p_K, and the residual is p.
    Arguments as in `verify_token`.
    """
    if proposed is not None:
        draft_probs = draft_probs.masked_fill(~proposed[..., None], 0)
    p, q = _at(target_probs[:, :-1], candidates), _at(draft_probs, candidates)
    sums = torch.nn.functional.pad((p.double().log() - q.double().log()).cumsum(-1), (1, 0))  # [B, K + 1], from 0
    reach = (sums - sums.cummax(-1).values).exp()  # p_i of the recursion: the running sum, reflected at its maximum
    excess = reach[..., None].to(target_probs.dtype) * target_probs  # [B, K + 1, V]
    excess[:, :-1] -= draft_probs
    mass = excess.clamp_(min=0).sum(-1).double()  # Z
    # h is 0 / 0 only where the two laws are the same; then a later index passes for sure, and NaN need not
    keep = mass / (mass + 1 - reach)
    passed = torch.nn.functional.pad(uniforms, (1, 0)) < keep
    if proposed is not None:
        passed &= torch.nn.functional.pad(proposed, (1, 0), value=True)
    index = torch.arange(passed.shape[1], device=passed.device)
    accepted = (passed * index).amax(-1)  # the last one that passes counts, not the first that fails
    return Verdict(accepted, _draw(_row(excess, accepted), _row(target_probs, accepted), choice), reach[:, 1:])


def verify_match(candidates: torch.Tensor, choices: torch.Tensor, proposed: torch.Tensor | None = None) -> Verdict:
    """Keep candidates while they are what the target itself chose; exact for any candidates whatever.

    Greedy and coupled verification both end here: `choices` [B, K + 1] is the target's argmax, or its argmax of p / E.
    """
    alike = candidates == choices[:, :-1]
    alike = _leading(alike if proposed is None else alike & proposed)
    accepted = alike.sum(-1)
    return Verdict(accepted, choices.gather(1, accepted[:, None])[:, 0], alike)


def race(probs: torch.Tensor, exponentials: torch.Tensor) -> torch.Tensor:
    """A draw from `probs` [..., V] as the winner of an exponential race; how `torch.multinomial(probs, 1)` draws.

    With the same Exp(1) noise, two similar laws mostly give the same token: that is what couples draft and target.
    """
    return (probs / exponentials).argmax(-1)


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """A draw from unnormalised weights [B, V] by the inverse of their distribution function.

    One random number a row, where a race takes V; they are the larger part of a draw on a CPU.

    Args:
        uniforms: [B] float64 in [0, 1); so u times the sum is below the sum, and a weight of 0 is never drawn.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True)[:, 0]


def _at(probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """probs [B, K, V] at tokens [B, K]."""
    return probs.gather(-1, tokens[..., None])[..., 0]


def _row(probs: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """probs [B, K + 1, V] at position index [B]."""
    return probs[torch.arange(len(index), device=index.device), index]


def _leading(passed: torch.Tensor) -> torch.Tensor:
    """[B, K] int64, 1 up to the first of passed [B, K] that does not hold."""
    return passed.cumprod(-1, dtype=torch.int64)


def _draw(residual: torch.Tensor, target: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """A token from the unnormalised residual [B, V], or from the target where the residual underflowed to nothing."""
    empty = residual.sum(-1, keepdim=True) == 0
    return pick(torch.where(empty, target, residual), choice)
