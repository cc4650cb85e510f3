"""How well a draft agrees with the target on texts that were not trained on, and how sure that is."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_specx.common.devices import execution_device
from hf_specx.scheduling.costs import Costs
from hf_specx.scheduling.draft_length import MAX_DRAFT_TOKENS, expected_tokens

from .distributions import overlap
from .reading import Reader, logits_where_written
from .recipe import TrainingRecipe
from .texts import Text


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
def measure_alpha(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    texts: Sequence[Text],
    recipe: TrainingRecipe,
    rows: int,
    reader: Reader | None = None,
) -> torch.Tensor:
    """α of each text: [T, 2] float64, the sum of Σₓ min(p, q) over its new tokens, and their number.

    Args:
        target, draft: in evaluation mode.
        texts: written by the target.
        recipe: how text is sampled.
        rows: texts in a forward.
        reader: of the draft; None if it has the target's tokens.
    """
    found, reader = [], reader or Reader()
    for start in range(0, len(texts), rows):
        part = texts[start : start + rows]
        batch = reader.collate(part, everywhere=True)
        of_target = logits_where_written(target, execution_device(target), batch)
        of_draft = reader.draft_logits(draft, execution_device(draft), batch, rows)
        shares = overlap(recipe, of_target.to(of_draft.device), of_draft).double().cpu()
        found += [(float(each.sum()), len(each)) for each in shares.split([len(text.new) for text in part])]
    return torch.tensor(found, dtype=torch.float64)


def alpha(sums: torch.Tensor) -> float:
    """The mean over all tokens of [T, 2] sums and numbers."""
    return float(sums[:, 0].sum() / sums[:, 1].sum())


def estimate(sums: torch.Tensor, before: torch.Tensor | None = None) -> Estimate:
    """α with its percentile bootstrap interval over prompts, whose tokens are not independent (Efron 1979).

    Args:
        sums: [T, 2], of `measure_alpha`.
        before: the same of another draft on the same texts; α is then the gain over it, text by text.
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


def predicted_speedup(costs: Costs, of_alpha: float) -> float:
    """The best speed-up at batch size 1 that this α allows, by the times of the forwards."""
    numbers: Iterable[int] = range(1, MAX_DRAFT_TOKENS + 1)
    return max(costs.forward_limited_speedup(1, expected_tokens(of_alpha, number), number) for number in numbers)
