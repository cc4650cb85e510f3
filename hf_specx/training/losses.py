"""How far a draft's distribution q is from the target's p: as a loss, and as α on held-out texts, with its interval.

Both are as text will be drawn from them later.
A loss takes p [N, V] and log q [N, V] in float32 or float64 and returns [N]. p may have zeros, as after top-p; log q
is finite. Gradients flow into log q alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specx.sampling.processors import in_runs, warp

from .reading import Text, collate, logits_where_written
from .recipe import TrainingRecipe


RESAMPLES = 2000
LEVEL = 0.95


def jsd(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence, ½ KL(p‖m) + ½ KL(q‖m) with m = ½ (p + q), as in GKD (arXiv 2306.13649): [N]."""
    q = log_q.exp()
    middle = (p + q) / 2
    log_middle = middle.clamp_min(torch.finfo(p.dtype).tiny).log()
    return ((torch.xlogy(p, p) + q * log_q) / 2 - middle * log_middle).sum(-1)


def total_variation(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """1 - α, one minus the acceptance, which is the total variation distance ½ Σ |p - q|: [N]."""
    return 1 - acceptance_of(p, log_q.exp())


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
LOSSES = {"jsd": jsd, "total_variation": total_variation}


def acceptance_of(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """α = Σₓ min(p, q), the chance that a candidate is accepted (Leviathan et al. 2022, Theorem 3.5): [N]."""
    return torch.minimum(p, q).sum(-1)


def warpers_of(recipe: TrainingRecipe) -> list[LogitsProcessor]:
    """Those of `generate`, in its order."""
    temperature = [TemperatureLogitsWarper(float(recipe.temperature))] if recipe.temperature != 1 else []
    top_k = [TopKLogitsWarper(recipe.top_k)] if recipe.top_k else []
    top_p = [TopPLogitsWarper(recipe.top_p)] if recipe.top_p < 1 else []
    return [*temperature, *top_k, *top_p]


def token_probs(recipe: TrainingRecipe, logits: torch.Tensor) -> torch.Tensor:
    """The distribution [N, V] that a token is drawn from, of logits [N, V]; one-hot if text is greedy."""
    if not recipe.do_sample:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return warp(in_runs(warpers_of(recipe)), logits).softmax(-1)


def losses_of(recipe: TrainingRecipe, target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """The loss at each position, [N], of logits [N, V].

    The draft has the temperature alone here: tokens that top-p and top-k would drop have to learn as well. Logits
    beyond the width of the other model are padding.
    """
    width = min(target_logits.shape[-1], draft_logits.shape[-1])
    log_q = (draft_logits / recipe.temperature).log_softmax(-1)
    return LOSSES[recipe.loss](token_probs(recipe, target_logits)[:, :width], log_q[:, :width])


def overlap(recipe: TrainingRecipe, target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """α at each position, [N], of logits [N, V]; for greedy text, whether both have the same argmax."""
    width = min(target_logits.shape[-1], draft_logits.shape[-1])
    p, q = (token_probs(recipe, logits)[:, :width] for logits in (target_logits, draft_logits))
    return acceptance_of(p, q)


class Estimate(NamedTuple):
    """A mean over held-out prompts, and the ends of its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@torch.no_grad()
def measure_alpha(target: PreTrainedModel, draft: Any, texts: Sequence[Text], recipe: TrainingRecipe) -> torch.Tensor:
    """Of each text of the target's the sum of Σₓ min(p, q) over its new tokens, and their number: [T, 2] float64."""
    found = []
    for start in range(0, len(texts), recipe.batch_size):
        part = texts[start : start + recipe.batch_size]
        batch = collate(part)
        of_draft = logits_where_written(draft, batch)
        of_target = logits_where_written(target, batch).to(of_draft.device)
        shares = overlap(recipe, of_target, of_draft).double().cpu()
        found += [(float(each.sum()), len(each)) for each in shares.split([len(text.new) for text in part])]
    return torch.tensor(found, dtype=torch.float64)


def alpha(sums: torch.Tensor) -> float:
    """The mean over all tokens of [T, 2] sums and numbers."""
    return float(sums[:, 0].sum() / sums[:, 1].sum())


def estimate(sums: torch.Tensor, before: torch.Tensor | None = None) -> Estimate:
    """α with its percentile bootstrap interval over prompts, whose tokens are not independent (Efron 1979).

    With the sums `before` of another draft on the same texts, the gain over it, text by text.
    """
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(len(sums), (RESAMPLES, len(sums)), generator=generator)

    def resampled(of: torch.Tensor) -> torch.Tensor:
        return of[picked, 0].sum(-1) / of[picked, 1].sum(-1)

    value, values = alpha(sums), resampled(sums)
    if before is not None:
        value, values = value - alpha(before), values - resampled(before)
    low, high = torch.quantile(values, torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=values.dtype)).tolist()
    return Estimate(value, low, high)
