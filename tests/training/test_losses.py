"""Losses: their definitions, their gradients, and distributions with zeros."""

import pytest
import torch

from hf_specx.training.losses import LOSSES, acceptance_of, forward_kl, lk, log_acceptance, total_variation
from hf_specx.training.recipe import LOSS_NAMES


def distributions(rows: int = 6, vocab_size: int = 9, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """p and the draft's logits in float64, some rows close to each other and some far apart."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)
    moved = torch.linspace(0.1, 3, rows, dtype=torch.float64)[:, None]
    logits = p + moved * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64)
    return p.softmax(-1), logits.requires_grad_()


def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.distributions.kl_divergence(torch.distributions.Categorical(a), torch.distributions.Categorical(b))


def variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return 0.5 * (p - q).abs().sum(-1)


def mixture(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    weight = torch.exp(-3 * (1 - variation(p, q))).detach()
    return weight * kl(p, q) + (1 - weight) * variation(p, q)


DEFINITIONS = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd": lambda p, q: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
    "total_variation": variation,
    "log_acceptance": lambda p, q: -(1 - variation(p, q)).log(),
    "lk": mixture,
}


def test_every_loss_has_a_definition():
    assert LOSSES.keys() == DEFINITIONS.keys() == set(LOSS_NAMES)


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_of_the_definition(name: str):
    p, logits = distributions()
    found = LOSSES[name](p, logits.log_softmax(-1))
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    wanted = DEFINITIONS[name](p, logits.softmax(-1))
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), logits)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradient, wanted_gradient)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_is_lost_where_both_agree(name: str):
    p, _ = distributions()
    torch.testing.assert_close(LOSSES[name](p, p.log()), torch.zeros(len(p), dtype=p.dtype))


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"reverse_kl"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_in_p_and_a_draft_that_underflows(name: str, dtype: torch.dtype):
    """As after top-p, and where the draft's softmax is 0 in float32: loss and gradient are finite."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=dtype)
    logits = torch.tensor([[0.0, 1.0, 2.0, -400.0], [-400.0, 0.0, 3.0, 1.0]], dtype=dtype, requires_grad=True)
    loss = LOSSES[name](p, logits.log_softmax(-1))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert (loss > 0).all()
    assert logits.grad.isfinite().all()


def test_log_acceptance_has_the_gradient_of_total_variation_over_alpha():
    """Equation of LK^α: where candidates are hardly ever accepted, it is the larger one."""
    p, logits = distributions()
    alpha = acceptance_of(p, logits.softmax(-1)).detach()
    gradients = [
        torch.autograd.grad(loss(p, logits.log_softmax(-1)).sum(), logits)[0]
        for loss in (log_acceptance, total_variation)
    ]
    torch.testing.assert_close(gradients[0], gradients[1] / alpha[:, None])


def test_lk_lies_between_its_two_parts():
    p, logits = distributions()
    log_q = logits.log_softmax(-1)
    torch.testing.assert_close(lk(p, log_q, eta=0.0), forward_kl(p, log_q))
    torch.testing.assert_close(lk(p, log_q, eta=1e6), total_variation(p, log_q))
