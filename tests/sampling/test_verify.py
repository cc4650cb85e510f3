"""The verifiers against tables written by hand, slow twins of the papers' recursions, and exact enumeration."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_cases import Case, case, either, laws

from hf_specx.common.round import Judgement
from hf_specx.sampling.verify import pick, race, verify_block, verify_match, verify_token


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


def assert_as(twin, verify, arguments: Case) -> Judgement:
    verdict = verify(*arguments)
    expected = [twin(*row) for row in zip(*(a.tolist() for a in arguments), strict=True)]
    assert list(zip(verdict.accepted.tolist(), verdict.next_token.tolist(), strict=True)) == expected
    return verdict


@pytest.mark.parametrize(
    ("candidates", "choices", "accepted", "next_token"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 4),
        ([1, 2, 3], [1, 2, 9, 4], 2, 9),
        ([1, 2, 3], [9, 2, 3, 4], 0, 9),
        ([1, 2, 3], [1, 9, 3, 4], 1, 9),
        ([1], [1, 7], 1, 7),
        ([1], [2, 7], 0, 2),
        ([], [5], 0, 5),
    ],
)
def test_match_by_hand(candidates: list[int], choices: list[int], accepted: int, next_token: int):
    verdict = verify_match(torch.tensor([candidates], dtype=torch.int64), torch.tensor([choices]))
    assert (verdict.accepted.tolist(), verdict.next_token.tolist()) == ([accepted], [next_token])


@either
def test_by_hand(verify):
    """With one candidate both verifiers keep it with probability p / q, here 1/2."""
    q, p = torch.tensor([[[0.8, 0.2]]]), torch.tensor([[[0.4, 0.6], [0.1, 0.9]]])
    for uniform, choice, expected in [
        (0.49, 0.11, (1, 1)),  # the bonus token by p = (0.1, 0.9)
        (0.49, 0.09, (1, 0)),
        (0.51, 0.0, (0, 1)),  # the residual is (0, 0.4): token 0 cannot be drawn
    ]:
        noise = torch.tensor([[uniform]], dtype=torch.float64), torch.tensor([choice], dtype=torch.float64)
        verdict = verify(torch.tensor([[0]]), q, p, *noise)
        assert (verdict.accepted.item(), verdict.next_token.item()) == expected


def test_block_keeps_the_last_index_that_passes():
    """h_1 = 0.1 / 0.6 and h_2 = p_2 = 1: the first uniform fails, the second passes, both candidates stay."""
    q = torch.tensor([[[0.8, 0.2], [0.3, 0.7]]], dtype=torch.float64)
    p = torch.tensor([[[0.4, 0.6], [0.8, 0.2], [0.5, 0.5]]], dtype=torch.float64)
    noise = torch.tensor([[0.9, 0.9]], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    candidates = torch.zeros(1, 2, dtype=torch.int64)
    assert verify_block(candidates, q, p, *noise).accepted.tolist() == [2]
    assert verify_token(candidates, q, p, *noise).accepted.tolist() == [0]


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
    assert_as(slow_token, verify_token, arguments)
    assert_as(slow_block, verify_block, arguments)


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_tokens_are_never_emitted(verify, dtype: torch.dtype):
    """u = 0 is a possible uniform, and 0 < 0 must not pass; nor may a residual give a token with p = 0."""
    for seed in range(5):
        candidates, q, p, uniforms, choice = case(seed, rows=400, num_candidates=4, vocab=4, sparsity=0.5)
        q, p = q.to(dtype), p.to(dtype)
        accepted, next_token, *_ = verify(candidates, q, p, torch.zeros_like(uniforms), choice)
        chances = p[:, :-1].gather(-1, candidates[..., None])[..., 0]
        kept = torch.arange(4) < accepted[:, None]
        assert (chances[kept] > 0).all()
        assert (p[torch.arange(400), accepted].gather(-1, next_token[:, None]) > 0).all()
        assert (chances == 0).any()


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sparsity", [0.0, 0.7, 1.0])
def test_equal_laws_accept_everything(verify, dtype: torch.dtype, sparsity: float):
    """At p = q block's h is 0 / 0."""
    candidates, q, p, uniforms, choice = case(seed=3, rows=500, num_candidates=4, sparsity=sparsity)
    q, p = q.to(dtype), p.to(dtype)
    p = torch.cat([q, p[:, -1:]], 1)
    accepted, next_token, *_ = verify(candidates, q, p, uniforms.clamp(min=1 - 1e-9), choice)
    assert (accepted == 4).all()
    assert torch.equal(next_token, pick(p[:, -1], choice))


@either
def test_empty_residual_falls_back_to_the_target(verify):
    """Rounding can make p <= q everywhere; a rejection then has nothing to draw from but p."""
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    p = torch.tensor([[[0.5, 0.5 - 1e-3, 0.0], [0.0, 0.0, 1.0]]])
    noise = torch.full((2, 1), 1 - 1e-6, dtype=torch.float64), torch.tensor([0.4, 0.6], dtype=torch.float64)
    verdict = verify(torch.tensor([[1], [1]]), q.expand(2, -1, -1), p.expand(2, -1, -1), *noise)
    assert verdict.accepted.tolist() == [0, 0]
    assert verdict.next_token.tolist() == [0, 1]


def by_race(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return race(probs, torch.empty_like(probs).exponential_(generator=generator))


def by_pick(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return pick(3 * probs, torch.rand(len(probs), generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("draw", [by_race, by_pick])
def test_draws_are_from_the_law(draw):
    """False alarm: the binomial deviations are 5 standard errors, 6e-7 each and 3e-6 for the five tokens."""
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    seen = draw(probs.expand(100_000, -1), torch.Generator().manual_seed(0)).bincount(minlength=5) / 100_000
    assert ((seen - probs).abs() <= 5 * (probs * (1 - probs) / 100_000).sqrt()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pick_never_draws_what_cannot_be(dtype: torch.dtype):
    """At both ends of [0, 1), with zeros at both ends of the weights, also of weights that are next to nothing."""
    weights = torch.tensor([[0.0, 0.2, 0.0, 0.7, 0.0]], dtype=dtype)
    for scale in (1.0, 1e-30):
        for uniform, token in [(0.0, 1), (1 - 2**-53, 3)]:
            assert pick(weights * scale, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def conditional_laws(seed: int, num_candidates: int, vocab: int, law: dict) -> tuple[torch.Tensor, Case]:
    """Every text of K candidates with its probability under q, and the laws along it, each a function of its prefix.

    The uniforms are one point each of a grid of midpoints, so that the mean over rows is an integral over [0, 1)^K
    with an error of at most K / (2 * points) in any count of accepted tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    points = {2: 60, 3: 16}[num_candidates]
    grid = torch.tensor([(2 * i + 1) / (2 * points) for i in range(points)], dtype=torch.float64)
    grid = torch.cartesian_prod(*[grid] * num_candidates)  # [points^K, K]
    texts = torch.tensor(list(itertools.product(range(vocab), repeat=num_candidates)))  # [V^K, K]
    tables = [
        (laws((vocab**i, vocab), generator, **law), laws((vocab**i, vocab), generator))
        for i in range(num_candidates + 1)
    ]
    powers = vocab ** torch.arange(num_candidates - 1, -1, -1)
    prefixes = [(texts * powers).sum(1) // vocab ** (num_candidates - i) for i in range(num_candidates + 1)]
    q, p = (torch.stack([t[side][at] for t, at in zip(tables, prefixes, strict=True)], 1) for side in (0, 1))
    q = q[:, :-1]
    weights = q.gather(-1, texts[..., None]).prod(1)[:, 0]  # Π q(x_i)
    possible = weights > 0
    arguments = [a[possible].repeat_interleave(len(grid), 0) for a in (texts, q, p)]
    uniforms = grid.repeat(int(possible.sum()), 1)
    choice = torch.full((len(uniforms),), 0.5, dtype=torch.float64)
    return weights[possible].repeat_interleave(len(grid)) / len(grid), Case(*arguments, uniforms, choice)


@pytest.mark.parametrize("num_candidates", [2, 3])
@pytest.mark.parametrize("law", [{}, {"sparsity": 0.5}, {"one_hot": True}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_expected_acceptance_by_enumeration(num_candidates: int, law: dict, seed: int):
    """E[τ] = Σ_i E_q[Π_{j<=i} min(1, p/q)] for token and Σ_i E_q[p_i] for block, never less; equal if q is one-hot."""
    weights, arguments = conditional_laws(seed, num_candidates, 3, law)
    ratios = arguments.target_probs[:, :-1].gather(-1, arguments.candidates[..., None])[..., 0]
    ratios = ratios / arguments.draft_probs.gather(-1, arguments.candidates[..., None])[..., 0]
    expected_token = (weights[:, None] * ratios.clamp(max=1).cumprod(-1)).sum().item()
    reach, expected_block = torch.ones(len(ratios), dtype=torch.float64), 0.0
    for ratio in ratios.unbind(-1):
        reach = (reach * ratio).clamp(max=1)
        expected_block += (weights * reach).sum().item()
    token = (weights * verify_token(*arguments).accepted).sum().item()
    block = (weights * verify_block(*arguments).accepted).sum().item()
    error = num_candidates / {2: 120, 3: 32}[num_candidates]
    assert math.isclose(token, expected_token, abs_tol=error)
    assert math.isclose(block, expected_block, abs_tol=error)
    assert expected_block >= expected_token - 1e-12
    assert not law.get("one_hot") or math.isclose(expected_block, expected_token)
