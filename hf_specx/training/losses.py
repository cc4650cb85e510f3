"""How far a draft's distribution q is from the target's p: as a loss, and as α on held-out texts, with its interval.

Both are as text will be drawn from them later.
A loss takes p [N, V] and log q [N, V] in float32 or float64 and returns [N]. p may have zeros, as after top-p; log q
is finite. Gradients flow into log q alone.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_specx.sampling.processors import fuse_warpers, warp

from .recipe import TrainingRecipe
from .target_outputs import TargetOutputCache, Text


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


LOSSES = {"jsd": jsd, "total_variation": total_variation}


def acceptance_of(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """α = Σₓ min(p, q), the chance that a candidate is accepted (Leviathan et al. 2022, Theorem 3.5): [N]."""
    return torch.minimum(p, q).sum(-1)


def token_probs(recipe: TrainingRecipe, logits: torch.Tensor) -> torch.Tensor:
    """The distribution [N, V] that a token is drawn from, of logits [N, V]; one-hot if text is greedy."""
    if not recipe.do_sample:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    temperature = [TemperatureLogitsWarper(float(recipe.temperature))] if recipe.temperature != 1 else []
    top_k = [TopKLogitsWarper(recipe.top_k)] if recipe.top_k else []
    top_p = [TopPLogitsWarper(recipe.top_p)] if recipe.top_p < 1 else []
    return warp(fuse_warpers([*temperature, *top_k, *top_p]), logits).softmax(-1)  # in the order of `generate`


class Predicted(NamedTuple):
    """The predictions of a draft for texts, beside the outputs of the target."""

    logits: torch.Tensor  # [M, V_d]
    rows: torch.Tensor  # [M], of the target's N rows the one that each predicts
    steps: torch.Tensor | None = None  # [M], candidates before each; None if any number of them changes nothing
    ids: torch.Tensor | None = None  # [V_d] or [M, V_d], the target's ids of the columns; None if they are 0, 1, ...
    share: float = 1.0  # of each in the loss of a token, which is the mean over all its predictions
    selected: "Predicted | None" = None  # the same predictions by a selector, which have a loss of their own

    def paired_with(self, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's probabilities [M, V'] of [N, V], and these logits [M, V'], of the tokens that both have."""
        if self.ids is not None and self.ids.ndim == 2:
            return probs[self.rows[:, None], self.ids], self.logits
        width = min(probs.shape[-1], self.logits.shape[-1])
        columns = probs[:, :width] if self.ids is None else probs[:, self.ids]
        return columns[self.rows], self.logits[:, :width]


def losses_of(recipe: TrainingRecipe, target_logits: torch.Tensor, predicted: Predicted) -> torch.Tensor:
    """The loss of each prediction, [M], for the target's logits [N, V].

    The draft has the temperature alone here: tokens that top-p and top-k would drop have to learn as well. Logits
    beyond the width of the other model are padding. That of a selector is added; tokens that are not selected change
    it by nothing that could be learned.
    """
    p, logits = predicted.paired_with(token_probs(recipe, target_logits))
    full_width = predicted.logits.float() / recipe.temperature
    log_q = full_width.log_softmax(-1)[:, : logits.shape[-1]]
    losses = LOSSES[recipe.loss](p, log_q)
    return losses if predicted.selected is None else losses + losses_of(recipe, target_logits, predicted.selected)


def overlap(recipe: TrainingRecipe, target_logits: torch.Tensor, predicted: Predicted) -> torch.Tensor:
    """α of each prediction, [M]; for greedy text, whether both have the same argmax."""
    q = token_probs(recipe, predicted.logits.float())
    p, q = predicted._replace(logits=q).paired_with(token_probs(recipe, target_logits))
    return acceptance_of(p, q)


class Estimate(NamedTuple):
    """A mean over held-out prompts, and the ends of its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@torch.no_grad()
def measure(target_outputs: TargetOutputCache, learner: Any, draft: Any, texts: Sequence[Text]) -> torch.Tensor:
    """The sums from which α and tokens a round follow, for each of T texts: [T, 2, 2] float64, sum and count.

    [:, 0] is the sum of Σₓ min(p, q) over all predictions, and their number. [:, 1] is the sum of tokens of rounds,
    one of which begins at each new token of a text, and the number of these rounds. The tokens of a round are
    1 + Σᵢ Πⱼ Σₓ min(p, q), with i over its candidates and j over the candidates up to i.
    """
    recipe = learner.recipe
    sums: list[list[list[float]]] = []
    for start in range(0, len(texts), recipe.batch_size):
        part = texts[start : start + recipe.batch_size]
        outputs = target_outputs.outputs(part)
        predicted = learner.predict(draft, part, outputs)
        overlaps = overlap(recipe, outputs.logits.to(predicted.logits.device), predicted).double()
        all_steps = torch.arange(recipe.num_draft_tokens, device=overlaps.device)[:, None]
        steps = all_steps if predicted.steps is None else predicted.steps
        table = overlaps.new_full((len(all_steps), len(outputs.logits)), math.nan)
        table[steps, predicted.rows] = overlaps
        sums += [_sums(of_text) for of_text in table.cpu().split([len(text.new) for text in part], 1)]
    return torch.tensor(sums, dtype=torch.float64, device="cpu")


def _sums(overlaps: torch.Tensor) -> list[list[float]]:
    """The sums and counts of `measure` for one text.

    `overlaps` [K, n] has Σₓ min(p, q) of each of its n new tokens as the first, second, ... candidate; nan for none.
    """
    num_steps, num_tokens = overlaps.shape
    padded = nn.functional.pad(overlaps.nan_to_num(0), (0, num_steps))
    along_draft = torch.stack([padded[step, step : step + num_tokens] for step in range(num_steps)])
    tokens_of_rounds = 1 + along_draft.cumprod(0).sum(0)
    alpha_sums = [float(overlaps.nansum()), int((~overlaps.isnan()).sum())]
    return [alpha_sums, [float(tokens_of_rounds.sum()), num_tokens]]


def alpha(sums: torch.Tensor) -> float:
    """The mean over all texts of [T, 2] sums and counts."""
    return float(sums[:, 0].sum() / sums[:, 1].sum())


def estimate(sums: torch.Tensor, before: torch.Tensor | None = None) -> Estimate:
    """A mean with its percentile bootstrap interval; prompts are resampled, since their tokens are not independent.

    With the sums `before` of another draft on the same texts, the gain over it, text by text.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    samples = torch.randint(len(sums), (RESAMPLES, len(sums)), generator=generator, device="cpu")

    def resampled(sums: torch.Tensor) -> torch.Tensor:
        return sums[samples, 0].sum(-1) / sums[samples, 1].sum(-1)

    value, values = alpha(sums), resampled(sums)
    if before is not None:
        value -= alpha(before)
        values -= resampled(before)
    low, high = torch.quantile(values, values.new_tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2])).tolist()
    return Estimate(value, low, high)
