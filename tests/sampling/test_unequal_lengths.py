"""Rows that draft unlike numbers of candidates in one round: each is judged as alone, and keeps its distribution.

A chi-square test of the right distribution fails by chance with probability 1e-6, and one of a wrong variant has to.
"""

from collections.abc import Callable

import pytest
import torch
from scipy import stats
from verify_cases import case, either

from hf_specx.common.round import Judgement
from hf_specx.sampling.verify import verify_match


NUM_CANDIDATES = 4
LENGTHS = torch.arange(300) % (NUM_CANDIDATES + 1)  # of each row, 0 to K
PROPOSED = torch.arange(NUM_CANDIDATES) < LENGTHS[:, None]


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("law", [{}, {"sparsity": 0.5}, {"one_hot": True}], ids=str)
def test_rows_are_judged_as_alone(verify: Callable[..., Judgement], law: dict, dtype: torch.dtype):
    """Also where fillers are likely tokens that any number would let pass."""
    x, q, p, u, choice = case(seed=5, rows=len(LENGTHS), num_candidates=NUM_CANDIDATES, **law)
    x, u = torch.where(PROPOSED, x, p[:, :-1].argmax(-1)), torch.where(PROPOSED, u, 0.0)
    q, p = q.to(dtype), p.to(dtype)
    verdict = verify(x, q, p, u, choice, PROPOSED)
    for row, k in enumerate(LENGTHS.tolist()):
        one = slice(row, row + 1)
        alone = verify(x[one, :k], q[one, :k], p[one, : k + 1], u[one, :k], choice[one])
        assert torch.equal(verdict.accepted[one], alone.accepted)
        assert torch.equal(verdict.next_token[one], alone.next_token)
        assert torch.equal(verdict.survival[one, :k], alone.survival)
    assert len(verdict.accepted[LENGTHS == NUM_CANDIDATES].unique()) > 2


def test_rows_are_matched_as_alone():
    generator = torch.Generator().manual_seed(0)
    candidates = torch.randint(2, (len(LENGTHS), NUM_CANDIDATES), generator=generator)
    choices = torch.randint(2, (len(LENGTHS), NUM_CANDIDATES + 1), generator=generator)
    candidates = torch.where(PROPOSED, candidates, choices[:, :-1])  # fillers that would match
    verdict = verify_match(candidates, choices, PROPOSED)
    for row, k in enumerate(LENGTHS.tolist()):
        one = slice(row, row + 1)
        alone = verify_match(candidates[one, :k], choices[one, : k + 1])
        assert torch.equal(verdict.accepted[one], alone.accepted)
        assert torch.equal(verdict.next_token[one], alone.next_token)
        assert torch.equal(verdict.survival[one, :k], alone.survival)


P = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [0.3, 0.3, 0.4]])  # p of a token after each other
Q = torch.tensor([[0.4, 0.35, 0.25], [0.2, 0.5, 0.3], [0.6, 0.1, 0.3]])  # q
DRAFTED = 3
THRESHOLD = 0.38


def by_row(sure: torch.Tensor) -> torch.Tensor:
    """As many as the row index says, whatever is drafted."""
    return torch.arange(len(sure)) % (DRAFTED + 1)


def to_the_first_unsure(sure: torch.Tensor) -> torch.Tensor:
    """Up to the first candidate below the threshold, which is judged as well."""
    return (sure.long().cumprod(1).sum(1) + 1).clamp(max=DRAFTED)


def without_the_unsure(sure: torch.Tensor) -> torch.Tensor:
    """Wrong: a candidate is dropped because of what it is."""
    return sure.long().cumprod(1).sum(1)


def draw_rounds(verify: Callable[..., Judgement], count: Callable, masked: bool = True, rows: int = 100_000):
    """Three tokens [N, 3] of each text: a round in which each row has its own number of candidates, then plain steps.

    Args:
        verify: token or block verification.
        count: lengths [N] of the rows, given which candidates [N, K] are as likely as the threshold.
        masked: whether the verifier is told of these.
    """
    torch.manual_seed(0)
    drafts = [torch.zeros(rows, dtype=torch.long)]
    for _ in range(DRAFTED):
        drafts.append(Q[drafts[-1]].multinomial(1)[:, 0])
    contexts = torch.stack(drafts, 1)  # [N, 1 + K], the prompt first
    sure = Q[contexts[:, :-1]].gather(2, contexts[:, 1:, None])[..., 0] >= THRESHOLD
    proposed = torch.arange(DRAFTED) < count(sure)[:, None]
    contexts[:, 1:].masked_fill_(~proposed, 0)
    uniforms, choice = torch.rand(rows, DRAFTED).double(), torch.rand(rows).double()
    mask = proposed if masked else None
    accepted, token, *_ = verify(contexts[:, 1:], Q[contexts[:, :-1]], P[contexts], uniforms, choice, mask)
    texts = contexts[:, 1:].clone()
    for i in range(DRAFTED):
        token = torch.where(i > accepted, P[token].multinomial(1)[:, 0], token)
        texts[:, i] = torch.where(i < accepted, texts[:, i], token)
    return texts


def p_value(texts: torch.Tensor) -> float:
    distribution = torch.einsum("a,ab,bc->abc", P[0], P, P).flatten().double()
    seen = (texts * torch.tensor([9, 3, 1])).sum(1).bincount(minlength=27)
    return stats.chisquare(seen.numpy(), (distribution / distribution.sum() * len(texts)).numpy()).pvalue


@either
@pytest.mark.parametrize("count", [by_row, to_the_first_unsure])
def test_distribution(verify: Callable[..., Judgement], count: Callable):
    """Of all rows in one batch, and of those with each number of candidates where the number is no choice."""
    texts = draw_rounds(verify, count)
    groups = [texts[i :: DRAFTED + 1] for i in range(DRAFTED + 1)] if count is by_row else []
    assert min(map(p_value, [texts, *groups])) > 1e-6 / 5


@pytest.mark.parametrize(("count", "masked"), [(by_row, False), (without_the_unsure, True)])
@either
def test_wrong_variants_are_seen(verify: Callable[..., Judgement], count: Callable, masked: bool):
    """Fillers that are judged as if they were drawn, and candidates that are dropped after looking at them."""
    assert p_value(draw_rounds(verify, count, masked)) < 1e-12
