"""What a draft is trained to make small: how far its distribution q is from the target's p, at one position.

Each function takes p [N, V] and log q [N, V] in float32 or float64 and returns [N]. p may have zeros, as after top-p;
log q is finite. Gradients flow into log q alone.
"""

from collections.abc import Callable

import torch


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ETA = 3.0  # the best of arXiv 2602.23881, table of schedules


def acceptance_of(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """α = Σₓ min(p, q), the chance that a candidate is accepted (Leviathan et al. 2022, Theorem 3.5): [N]."""
    return torch.minimum(p, q).sum(-1)


def forward_kl(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p‖q) = Σ p log(p / q), the usual loss of distillation (Hinton et al. 2015): [N]."""
    return (torch.xlogy(p, p) - p * log_q).sum(-1)


def reverse_kl(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(q‖p) = Σ q log(q / p), as in MiniLLM (arXiv 2306.08543): [N].

    Infinite where p is 0; a p that underflows counts as the smallest normal number of its dtype.
    """
    return (log_q.exp() * (log_q - _log(p))).sum(-1)


def jsd(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence, ½ KL(p‖m) + ½ KL(q‖m) with m = ½ (p + q), as in GKD (arXiv 2306.13649): [N]."""
    q = log_q.exp()
    middle = (p + q) / 2
    return ((torch.xlogy(p, p) + q * log_q) / 2 - middle * _log(middle)).sum(-1)


def total_variation(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """1 - α, one minus the acceptance, which is the total variation distance ½ Σ |p - q|: [N]."""
    return 1 - acceptance_of(p, log_q.exp())


def log_acceptance(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """-log α, with the gradient of total variation over α (LK^α of arXiv 2602.23881): [N]."""
    return -_log(acceptance_of(p, log_q.exp()))


def lk(p: torch.Tensor, log_q: torch.Tensor, eta: float = ETA) -> torch.Tensor:
    """λ KL(p‖q) + (1 - λ) TV(p, q) with λ = exp(-η α), a constant to the gradient (LK^λ of arXiv 2602.23881): [N].

    Where the draft is far off, total variation has hardly a gradient, and the forward KL leads; where it is near,
    total variation, which is what counts. λ is each position's own.
    """
    variation = total_variation(p, log_q)
    weight = torch.exp(-eta * (1 - variation.detach()))
    return weight * forward_kl(p, log_q) + (1 - weight) * variation


LOSSES: dict[str, Loss] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "total_variation": total_variation,
    "log_acceptance": log_acceptance,
    "lk": lk,
}


def _log(x: torch.Tensor) -> torch.Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny).log()
