"""Arguments of verifiers, at random."""

from typing import NamedTuple

import pytest
import torch

from hf_specx.sampling.verify import race, verify_block, verify_token


VERIFIERS = {"token": verify_token, "block": verify_block}
either = pytest.mark.parametrize("verify", VERIFIERS.values(), ids=VERIFIERS)


class Case(NamedTuple):
    """Arguments of a verifier, in float64 so that twins that round in another order decide alike."""

    candidates: torch.Tensor  # [B, K]
    draft_probs: torch.Tensor  # [B, K, V]
    target_probs: torch.Tensor  # [B, K + 1, V]
    uniforms: torch.Tensor  # [B, K]
    choice: torch.Tensor  # [B]


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
    candidates = race(q, torch.empty_like(q).exponential_(generator=generator))
    uniforms = torch.rand(candidates.shape, generator=generator, dtype=torch.float64)
    return Case(candidates, q, p, uniforms, torch.rand(rows, generator=generator, dtype=torch.float64))
