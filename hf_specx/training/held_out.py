"""How well a draft agrees with the target on texts that were not trained on, and how sure that is."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .losses import overlap
from .reading import Text, collate, logits_where_written
from .recipe import TrainingRecipe


RESAMPLES = 2000
LEVEL = 0.95


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
