"""Grafted pairs, for measurements alone: random weights of any size whose acceptance is set by one number.

The first layers of the target are the draft, and its later layers add a residual scaled by ε. The smaller ε
is, the more the two agree, while every forward costs what it costs in a trained model of this size. They know no
language: whatever is measured on them has to be called synthetic.
"""

import copy
import math
from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .recipes import Recipe


WEIGHT_STD = 0.05
LOGIT_STD = 3.0  # of the logits; unrelated models of this sharpness agree to 2 Φ(-3 / sqrt 2) = 0.03
PROBE_SHAPE = 4, 64  # rows and tokens of the random text on which acceptance is measured
TOLERANCE = 0.01  # of α, where ε is looked for


class Grafted(NamedTuple):
    """A pair that was made.

    Attributes:
        target, draft: in evaluation mode; what they share is in memory once.
        epsilon: of the recipe, or the one that was found; None where the draft is unrelated.
        alpha: the mean of sum_x min(p, q) on random text, at temperature 1.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    epsilon: float | None
    alpha: float


@torch.no_grad()
def graft(recipe: Recipe, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Grafted:
    """Make both models of a recipe, the same ones on each call on the same kind of device."""
    target = _random_llama(recipe, recipe.layers, dtype, device)
    if recipe.unrelated:
        draft = _random_llama(replace(recipe, seed=recipe.seed + 1), recipe.draft_layers, dtype, device)
        return Grafted(target, draft, None, acceptance(target, draft))
    # a copy of everything but the weights
    draft = copy.deepcopy(target, {id(weight): weight for weight in target.parameters()})
    draft.model.layers = draft.model.layers[: recipe.draft_layers]
    draft.config.num_hidden_layers = recipe.draft_layers
    scaled = _Scaled(target, recipe.draft_layers)
    if recipe.epsilon is None:
        return _look_for(recipe.alpha, scaled, target, draft)
    scaled.to(recipe.epsilon)
    return Grafted(target, draft, recipe.epsilon, acceptance(target, draft))


def _config(recipe: Recipe, layers: int) -> PretrainedConfig:
    return AutoConfig.for_model(
        "llama",
        hidden_size=recipe.hidden,
        intermediate_size=recipe.inner,
        num_hidden_layers=layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        vocab_size=recipe.vocab,
        tie_word_embeddings=recipe.tied,
        max_position_embeddings=recipe.positions,
        initializer_range=WEIGHT_STD,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def _random_llama(recipe: Recipe, layers: int, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(recipe.seed)
        model = AutoModelForCausalLM.from_config(_config(recipe, layers), dtype=dtype).eval()
    model.model.norm.weight.fill_(LOGIT_STD / (WEIGHT_STD * math.sqrt(recipe.hidden)))
    return model


class _Scaled:
    """The weights by which the later layers of a target reach its stream."""

    def __init__(self, target: PreTrainedModel, first: int):
        self.scale = 1.0
        self.weights = [
            weight
            for layer in target.model.layers[first:]
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)
        ]

    def to(self, scale: float) -> None:
        """Multiply them so that they are `scale` times what they were at first."""
        for weight in self.weights:
            weight.mul_(scale / self.scale)
        self.scale = scale


def _look_for(alpha: float, scaled: _Scaled, target: PreTrainedModel, draft: PreTrainedModel) -> Grafted:
    """Halve the range of log ε until its middle has the acceptance that is asked for: the larger ε, the smaller α."""
    low, high = math.log(1e-3), math.log(10.0)
    found = math.nan
    while high - low > 1e-2 and not abs(found - alpha) <= TOLERANCE:
        middle = (low + high) / 2
        scaled.to(math.exp(middle))
        found = acceptance(target, draft)
        low, high = (middle, high) if found > alpha else (low, middle)
    return Grafted(target, draft, scaled.scale, found)


@torch.no_grad()
def acceptance(target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """α at temperature 1: the mean of sum_x min(p, q) over the positions of random text, the same on each call."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, target.config.vocab_size, PROBE_SHAPE, generator=generator).to(target.device)
    p, q = (model(input_ids=ids, use_cache=False).logits.float().softmax(-1) for model in (target, draft))
    return float(torch.minimum(p, q).sum(-1).mean())
