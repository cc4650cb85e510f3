"""The verifiers against slow twins of the papers' recursions; each row is judged as alone.

The law that follows through `generate` is in test_law.py, the accepted length in test_acceptance.py.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specx.common.round import Verdict
from hf_specx.sampling.verify import (
    sample_exponential_race,
    sample_inverse_cdf,
    sample_inverse_cdf_by_halves,
    verify_block,
    verify_match,
    verify_token,
)


VERIFIERS = {"token": verify_token, "block": verify_block}
either = pytest.mark.parametrize("verify", VERIFIERS.values(), ids=VERIFIERS)


class Case(NamedTuple):
    """Arguments of a verifier, in float64 so that twins that round in another order decide alike."""

    candidates: torch.Tensor  # [B, K]
    draft_probs: torch.Tensor  # [B, K, V]
    target_probs: torch.Tensor  # [B, K + 1, V]
    uniforms: torch.Tensor  # [B, K]
    next_uniform: torch.Tensor  # [B]


def laws(shape: tuple[int, ...], generator: torch.Generator, sparsity: float = 0.0, one_hot: bool = False):
    """Random laws with about that share of zeros, and never all zeros."""
    scores = 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    top = scores == scores.amax(-1, keepdim=True)
    gone = torch.rand(shape, generator=generator) < sparsity
    return scores.masked_fill(~top & (gone | one_hot), -torch.inf).softmax(-1)


def case(
    seed: int, rows: int = 64, num_candidates: int = 3, vocab: int = 5, sparsity: float = 0.0, one_hot: bool = False
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    q = laws((rows, num_candidates, vocab), generator, sparsity, one_hot)
    p = laws((rows, num_candidates + 1, vocab), generator, sparsity)
    candidates = sample_exponential_race(q, torch.empty_like(q).exponential_(generator=generator))
    uniforms = torch.rand(candidates.shape, generator=generator, dtype=torch.float64)
    return Case(candidates, q, p, uniforms, torch.rand(rows, generator=generator, dtype=torch.float64))


def picked(weights: list[float], uniform: float) -> int:
    sums = list(itertools.accumulate(weights))
    return next(token for token, total in enumerate(sums) if total > uniform * sums[-1])


def slow_token(x: list[int], q: list, p: list, u: list[float], c: float) -> tuple[int, int]:
    """Algorithm 1 of Leviathan et al. for one row, with q'(x) = norm(max(0, p - q)) after a rejection."""
    n = next((i for i in range(len(x)) if u[i] >= p[i][x[i]] / q[i][x[i]]), len(x))
    weights = p[n] if n == len(x) else [max(0.0, pv - qv) for pv, qv in zip(p[n], q[n], strict=True)]
    return n, picked(weights if any(weights) else p[n], c)


def slow_block(x: list[int], q: list, p: list, u: list[float], c: float) -> tuple[int, int]:
    """Algorithm 2 of Sun et al. for one row: the last index that passes, then p_τ p - q at τ."""
    reach, tau, residual = 1.0, 0, None
    for i in range(len(x) + 1):
        if i:
            reach = min(1.0, reach * p[i - 1][x[i - 1]] / q[i - 1][x[i - 1]])
        if i < len(x):
            excess = [max(0.0, reach * pv - qv) for pv, qv in zip(p[i], q[i], strict=True)]
            left = sum(excess) + 1 - reach
            passes = sum(excess) / left if left else 1.0
        else:
            excess, passes = p[i], reach
        if i == 0 or u[i - 1] < passes:
            tau, residual = i, excess
    return tau, picked(residual if any(residual) else p[tau], c)


def slow_match(x: list[int], target_tokens: list[int]) -> tuple[int, int]:
    """Candidates of one row up to the first that is not the target's token, and that token."""
    n = next((i for i in range(len(x)) if x[i] != target_tokens[i]), len(x))
    return n, target_tokens[n]


def assert_as(twin, verify, *arguments: torch.Tensor) -> None:
    verdict = verify(*arguments)
    expected = [twin(*row) for row in zip(*(a.tolist() for a in arguments), strict=True)]
    assert list(zip(verdict.accepted.tolist(), verdict.next_token.tolist(), strict=True)) == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    num_candidates=st.integers(0, 4),
    vocab=st.integers(1, 6),
    sparsity=st.sampled_from([0.0, 0.3, 0.8]),
    one_hot=st.booleans(),
)
def test_twins_anywhere(seed: int, num_candidates: int, vocab: int, sparsity: float, one_hot: bool):
    arguments = case(seed, 8, num_candidates, vocab, sparsity, one_hot)
    assert_as(slow_token, verify_token, *arguments)
    assert_as(slow_block, verify_block, *arguments)
    assert_as(slow_match, verify_match, arguments.candidates, arguments.target_probs.argmax(-1))


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_tokens_are_never_emitted(verify, dtype: torch.dtype):
    """u = 0 is a possible uniform, and 0 < 0 must not pass; nor may a residual give a token with p = 0."""
    for seed in range(5):
        candidates, q, p, uniforms, next_uniform = case(seed, rows=400, num_candidates=4, vocab=4, sparsity=0.5)
        q, p = q.to(dtype), p.to(dtype)
        accepted, next_token, *_ = verify(candidates, q, p, torch.zeros_like(uniforms), next_uniform)
        chances = p[:, :-1].gather(-1, candidates[..., None])[..., 0]
        is_accepted = torch.arange(4) < accepted[:, None]
        assert (chances[is_accepted] > 0).all()
        assert (p[torch.arange(400), accepted].gather(-1, next_token[:, None]) > 0).all()
        assert (chances == 0).any()


@either
def test_empty_residual_falls_back_to_the_target(verify):
    """Rounding can make p <= q everywhere; a rejection then has nothing to draw from but p."""
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    p = torch.tensor([[[0.5, 0.5 - 1e-3, 0.0], [0.0, 0.0, 1.0]]])
    noise = torch.full((2, 1), 1 - 1e-6, dtype=torch.float64), torch.tensor([0.4, 0.6], dtype=torch.float64)
    verdict = verify(torch.tensor([[1], [1]]), q.expand(2, -1, -1), p.expand(2, -1, -1), *noise)
    assert verdict.accepted.tolist() == [0, 0]
    assert verdict.next_token.tolist() == [0, 1]


@pytest.mark.parametrize("sample", [sample_inverse_cdf, sample_inverse_cdf_by_halves])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sampling_never_draws_what_cannot_be(dtype: torch.dtype, sample: Callable):
    """At both ends of [0, 1), with zeros at both ends of the weights, also of weights that are next to nothing."""
    weights = torch.tensor([[0.0, 0.2, 0.0, 0.7, 0.0]], dtype=dtype)
    for scale in (1.0, 1e-30):
        for uniform, token in [(0.0, 1), (1 - 2**-53, 3)]:
            assert sample(weights * scale, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize("sample", [sample_inverse_cdf, sample_inverse_cdf_by_halves])
@pytest.mark.parametrize("vocab", [1, 2, 5, 8, 13])
def test_sampling_draws_each_token_as_often_as_it_must(vocab: int, sample: Callable):
    """By enumeration: weights are numbers of equal parts of [0, 1), of each of which the middle is tried."""
    parts = (
        torch.randint(0, 4, (20, vocab), generator=torch.Generator().manual_seed(vocab)) + torch.eye(vocab)[0].long()
    )
    for row in parts:
        number = int(row.sum())
        uniforms = (torch.arange(number, dtype=torch.float64) + 0.5) / number
        tokens = sample(row.float().expand(number, -1), uniforms)
        assert torch.bincount(tokens, minlength=vocab).tolist() == row.tolist()


def test_sampling_by_halves_draws_the_same_tokens():
    """But at the edges of tokens, which a random number is next to never at; never one of weight 0."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2000, 300, generator=generator).mul(4).softmax(-1)
    weights[:, ::3] = 0
    uniforms = torch.rand(2000, generator=generator, dtype=torch.float64)
    tokens = sample_inverse_cdf_by_halves(weights, uniforms)
    assert (tokens == sample_inverse_cdf(weights, uniforms)).all()
    uniforms = torch.where(uniforms < 0.5, 0.0, 1 - 2**-53)
    assert (weights.gather(1, sample_inverse_cdf_by_halves(weights, uniforms)[:, None]) > 0).all()


NUM_CANDIDATES = 4
LENGTHS = torch.arange(300) % (NUM_CANDIDATES + 1)  # of each row, 0 to K
PROPOSED = torch.arange(NUM_CANDIDATES) < LENGTHS[:, None]


def assert_as_alone(verdict: Verdict, judge: Callable[[slice, int], Verdict]) -> None:
    """`judge` gives the verdict on a row, as a slice, with its candidates alone."""
    for row, k in enumerate(LENGTHS.tolist()):
        this_row = slice(row, row + 1)
        alone = judge(this_row, k)
        assert torch.equal(verdict.accepted[this_row], alone.accepted)
        assert torch.equal(verdict.next_token[this_row], alone.next_token)
        assert torch.equal(verdict.prefix_acceptance[this_row, :k], alone.prefix_acceptance)


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("law", [{}, {"sparsity": 0.5}, {"one_hot": True}], ids=str)
def test_rows_are_judged_as_alone(verify: Callable[..., Verdict], law: dict, dtype: torch.dtype):
    """Also where fillers are likely tokens that any number would let pass."""
    x, q, p, u, next_uniform = case(seed=5, rows=len(LENGTHS), num_candidates=NUM_CANDIDATES, **law)
    x, u = torch.where(PROPOSED, x, p[:, :-1].argmax(-1)), torch.where(PROPOSED, u, 0.0)
    q, p = q.to(dtype), p.to(dtype)
    verdict = verify(x, q, p, u, next_uniform, PROPOSED)
    assert_as_alone(verdict, lambda i, k: verify(x[i, :k], q[i, :k], p[i, : k + 1], u[i, :k], next_uniform[i]))
    assert len(verdict.accepted[LENGTHS == NUM_CANDIDATES].unique()) > 2


def test_rows_are_matched_as_alone():
    generator = torch.Generator().manual_seed(0)
    candidates = torch.randint(2, (len(LENGTHS), NUM_CANDIDATES), generator=generator)
    target_tokens = torch.randint(2, (len(LENGTHS), NUM_CANDIDATES + 1), generator=generator)
    candidates = torch.where(PROPOSED, candidates, target_tokens[:, :-1])  # fillers that would match
    verdict = verify_match(candidates, target_tokens, PROPOSED)
    assert_as_alone(verdict, lambda i, k: verify_match(candidates[i, :k], target_tokens[i, : k + 1]))
