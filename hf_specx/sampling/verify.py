"""Verification: which candidates are accepted, and which token follows them.

Pure tensor functions: all randomness comes in as arguments, and nothing here knows a model, a cache or a text. Their
verdicts leave `overlap` and `undefined` to the `Verifier`, since these are the same for all ways to verify.

Symbols: p and q are the distributions of the target and of the draft, both after every logits processor; a candidate
was drawn from exactly q. After a rejection comes a recovered token, drawn from the residual norm(max(0, p - q)); after
all candidates a bonus token, drawn from p. Of a tree, node 0 is the last emitted token and node i + 1 is candidate i.
R rows that still decode, K candidates of a row, D candidates on the longest branch, V tokens of the vocabulary. All
other words of the package: .github/GLOSSARY.md of its repository.
"""

import itertools

import torch

from hf_specx.common.round import Verdict
from hf_specx.common.tree import Tree, at_nodes


def verify_token(
    candidates: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    next_uniform: torch.Tensor,
    is_candidate: torch.Tensor | None = None,
) -> Verdict:
    """Token verification: Algorithm 1 of Leviathan et al. 2022 (arXiv 2211.17192).

    Candidate x is accepted with probability min(1, p(x) / q(x)); no candidate after the first rejection is.

    Args:
        candidates: [R, K] int64, drawn from `draft_probs`.
        draft_probs: [R, K, V], q.
        target_probs: [R, K + 1, V], p; the last position is the one after all candidates.
        uniforms: [R, K] float64 in [0, 1), independent of the draft's random numbers.
        next_uniform: [R] float64 in [0, 1), independent of these and of `uniforms`; draws the next token.
        is_candidate: [R, K] bool, true up to each row's length, as in `Draft`; None if everywhere. After that q is 0:
            the next token of a row that keeps all its candidates is drawn from p, at the row's own length.
    """
    num_candidates = candidates.shape[1]
    p = _probs_of(candidates, target_probs[:, :-1])  # [R, K]
    q = _probs_of(candidates, draft_probs)
    passed = uniforms * q < p  # strict: u may be 0, and a token with p = 0 must never pass
    if is_candidate is not None:
        passed &= is_candidate
    accepted = _leading(passed).sum(-1)
    target = _at_position(accepted, target_probs)  # [R, V]
    residual = target
    if num_candidates:
        all_accepted = accepted == (num_candidates if is_candidate is None else is_candidate.sum(-1))
        draft = _at_position(accepted.clamp(max=num_candidates - 1), draft_probs)
        residual = (target - draft.masked_fill_(all_accepted[:, None], 0)).clamp_(min=0)
    prefix_acceptance = (p.double() / q).clamp(max=1).cumprod(-1)
    return Verdict(accepted, _draw(residual, target, next_uniform), prefix_acceptance)


def verify_block(
    candidates: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    next_uniform: torch.Tensor,
    is_candidate: torch.Tensor | None = None,
) -> Verdict:
    """Block verification: Algorithm 2 of Sun et al. 2024 (arXiv 2403.10444).

    On average it accepts at least as many candidates as token verification. With p_0 = 1, at least i candidates are
    accepted with probability p_i = min(1, p_{i-1} * p(x_i) / q(x_i)), given x_1 to x_i. The position after the last
    candidate needs no case of its own: with q = 0 there, Z = h = p_K and the residual is p.
    Arguments as in `verify_token`.
    """
    if is_candidate is not None:
        draft_probs = draft_probs.masked_fill(~is_candidate[..., None], 0)
    p = _probs_of(candidates, target_probs[:, :-1])  # [R, K]
    q = _probs_of(candidates, draft_probs)
    log_ratios = p.double().log() - q.double().log()
    sums = torch.nn.functional.pad(running_sums(log_ratios), (1, 0))  # [R, K + 1], from 0
    # log p_i = min(0, log p_{i-1} + log ratio) is the running sum, reflected at its maximum
    p_i = (sums - sums.cummax(-1).values).exp()
    residuals = p_i[..., None].to(target_probs.dtype) * target_probs  # [R, K + 1, V]
    residuals[:, :-1] -= draft_probs
    z = residuals.clamp_(min=0).sum(-1).double()
    # 0 / 0 only where p = q; then a later index always passes, so a NaN, which nothing is less than, changes nothing
    h = z / (z + 1 - p_i)
    passed = torch.nn.functional.pad(uniforms, (1, 0)) < h
    if is_candidate is not None:  # q is 0 there, which makes h NaN; that must not be what it depends on
        passed &= torch.nn.functional.pad(is_candidate, (1, 0), value=True)
    index = torch.arange(passed.shape[1], device=passed.device)
    accepted = (passed * index).amax(-1)  # the last one that passes counts, not the first that fails
    residual = _at_position(accepted, residuals)
    target = _at_position(accepted, target_probs)
    return Verdict(accepted, _draw(residual, target, next_uniform), p_i[:, 1:])


def verify_match(
    candidates: torch.Tensor, target_tokens: torch.Tensor, is_candidate: torch.Tensor | None = None
) -> Verdict:
    """Accept candidates while they equal the target's own tokens; exact however they were drafted.

    For greedy and coupled verification: `target_tokens` [R, K + 1] int64 is the target's argmax of p, or of p / E.
    """
    matches = candidates == target_tokens[:, :-1]
    if is_candidate is not None:
        matches &= is_candidate
    is_accepted = _leading(matches)
    accepted = is_accepted.sum(-1)
    return Verdict(accepted, target_tokens.gather(1, accepted[:, None])[:, 0], is_accepted)


def verify_tree(
    candidates: torch.Tensor, target_tokens: torch.Tensor, tree: Tree, is_candidate: torch.Tensor | None = None
) -> Verdict:
    """Go from the last emitted token to the child that is the target's own token there, until there is none.

    As in `verify_match`, which does the same in a chain, every emitted token is the target's own, so this is exact for
    any tree. `target_tokens` [R, K + 1] are those after each node, under coupled verification by the noise of the
    node's position.

    A candidate matches if it is the target's token after its parent, and a node is reached if it and all on the way to
    it match. Siblings have different tokens, so the reached nodes are one path, and the walk ends at the deepest.
    """
    is_match = candidates == target_tokens.gather(1, tree.parent_nodes)  # [R, K]
    if is_candidate is not None:
        is_match &= is_candidate
    is_match = torch.nn.functional.pad(is_match, (1, 0), value=True)  # [R, K + 1]; node 0 is always reached
    is_reached = (is_match[:, None] | ~tree.node_mask).all(-1)
    last_node = (is_reached * (1 + tree.node_depths)).argmax(-1, keepdim=True)  # [R, 1]
    path_nodes = at_nodes(tree.node_paths, last_node)[:, 0]
    accepted = tree.node_depths.gather(1, last_node)[:, 0]
    next_token = target_tokens.gather(1, last_node)[:, 0]
    prefix_acceptance = is_reached.gather(1, tree.first_choice_nodes)[:, 1:].long()
    return Verdict(accepted, next_token, prefix_acceptance, path_nodes=path_nodes)


def sample_exponential_race(probs: torch.Tensor, exponentials: torch.Tensor) -> torch.Tensor:
    """Draw tokens from `probs` [..., V] by an exponential race, as `torch.multinomial(probs, 1)` does: int64 [...].

    With the same Exp(1) noise [..., V] two similar distributions mostly give the same token, which couples draft and
    target.
    """
    return (probs / exponentials).argmax(-1)


def sample_inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw tokens from unnormalised weights [R, V] by inverting their cumulative sum: int64 [R].

    It needs one random number a row, [R] float64 in [0, 1), where an exponential race needs V, and on a CPU these take
    most of the time of a draw. As 1 is excluded, a weight of 0 is never drawn.
    """
    if forbids_cumsum(weights):
        return sample_inverse_cdf_by_halves(weights, uniforms)
    sums = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True)[:, 0]


def forbids_cumsum(values: torch.Tensor) -> bool:
    """Whether `torch.use_deterministic_algorithms` is on, which has no cumulative sum of floats on CUDA."""
    return values.device.type != "cpu" and torch.are_deterministic_algorithms_enabled()


def running_sums(values: torch.Tensor) -> torch.Tensor:
    """Cumulative sums of floats [R, K]."""
    if forbids_cumsum(values):
        return torch.stack(list(itertools.accumulate(values.unbind(-1))), -1)
    return values.cumsum(-1)


def sample_inverse_cdf_by_halves(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """What `sample_inverse_cdf` draws, up to rounding at its edges: by the sums of ever smaller runs of weights."""
    size = 1 << (weights.shape[1] - 1).bit_length()
    sums = [torch.nn.functional.pad(weights.double(), (0, size - weights.shape[1]))]  # of runs of 1, 2, 4, ... weights
    while sums[-1].shape[1] > 1:
        sums.append(sums[-1][:, ::2] + sums[-1][:, 1::2])
    rest = uniforms[:, None] * sums.pop()
    run = torch.zeros_like(rest, dtype=torch.int64)
    for halves in reversed(sums):
        first = halves.gather(1, 2 * run)
        second = halves.gather(1, 2 * run + 1)
        is_second = (rest >= first) & (second > 0)  # what is left may have been rounded up to all of the first
        rest = torch.where(is_second, rest - first, rest)
        run = 2 * run + is_second
    return run[:, 0]


def _probs_of(tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """[R, K], the entries of probs [R, K, V] for tokens [R, K]."""
    return probs.gather(-1, tokens[..., None])[..., 0]


def _at_position(position: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """[R, V], of probs [R, P, V] those at one position of each row, [R]."""
    return probs[torch.arange(len(position), device=position.device), position]


def _leading(passed: torch.Tensor) -> torch.Tensor:
    """[R, K] int64, 1 before the first False of passed [R, K], and 0 from there on."""
    return passed.cumprod(-1, dtype=torch.int64)


def _draw(residual: torch.Tensor, target: torch.Tensor, next_uniform: torch.Tensor) -> torch.Tensor:
    """A token from the unnormalised residual [R, V], or from the target where all of the residual underflowed to 0."""
    empty = residual.sum(-1, keepdim=True) == 0
    return sample_inverse_cdf(torch.where(empty, target, residual), next_uniform)
