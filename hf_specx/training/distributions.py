"""The distributions of target and draft as text will be drawn from them later, their loss and their overlap."""

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specx.sampling.warping import HeadWarper, in_runs

from .losses import LOSSES, acceptance_of
from .recipe import TrainingRecipe


def token_probs(recipe: TrainingRecipe, logits: torch.Tensor) -> torch.Tensor:
    """The distribution [N, V] that a token is drawn from, of logits [N, V]; one-hot if text is greedy."""
    if not recipe.do_sample:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    unread = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
    for warper in in_runs(_warpers(recipe)):
        logits = warper(logits) if isinstance(warper, HeadWarper) else warper(unread, logits)
    return logits.softmax(-1)


def losses_of(
    recipe: TrainingRecipe,
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    common: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss at each position, [N], of logits [N, V].

    The draft has the temperature alone here: tokens that top-p and top-k would drop have to learn as well. Logits
    beyond the width of the other model are padding. Where only the `common` tokens [C] can be proposed, both are
    restricted to these, and the loss counts as much as the target has on them: nothing else can be accepted.
    """
    if common is not None:
        common = common.to(draft_logits.device)
        p = token_probs(recipe, target_logits)[:, common]
        log_q = _tempered(recipe, draft_logits[:, common]).log_softmax(-1)
        total = p.sum(-1)
        return total * LOSSES[recipe.loss](p / total.clamp_min(torch.finfo(p.dtype).tiny)[:, None], log_q)
    width = min(target_logits.shape[-1], draft_logits.shape[-1])
    log_q = _tempered(recipe, draft_logits).log_softmax(-1)
    return LOSSES[recipe.loss](token_probs(recipe, target_logits)[:, :width], log_q[:, :width])


def overlap(recipe: TrainingRecipe, target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """α at each position, [N], of logits [N, V]; for greedy text, whether both have the same argmax."""
    width = min(target_logits.shape[-1], draft_logits.shape[-1])
    p, q = (token_probs(recipe, logits)[:, :width] for logits in (target_logits, draft_logits))
    return acceptance_of(p, q)


def _tempered(recipe: TrainingRecipe, logits: torch.Tensor) -> torch.Tensor:
    return logits if recipe.temperature == 1 else logits / recipe.temperature


def _warpers(recipe: TrainingRecipe) -> list[LogitsProcessor]:
    """Those of `generate`, in its order."""
    warpers: list[LogitsProcessor] = []
    if recipe.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(recipe.temperature)))
    if recipe.top_k:
        warpers.append(TopKLogitsWarper(recipe.top_k))
    if recipe.top_p < 1:
        warpers.append(TopPLogitsWarper(recipe.top_p))
    return warpers
