"""Grafted pairs, for measurements alone: random weights of any size whose acceptance is set by one number.

The first layers of the target are the draft, and its later layers add a residual scaled by ε. The smaller ε
is, the more the two agree, while every forward costs what it costs in a trained model of this size. They know no
language: whatever is measured on them has to be called synthetic.
"""

import copy
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hf_specx.common.errors import require


PREFIX = "grafted-"
WEIGHT_STD = 0.05
LOGIT_STD = 3.0  # of the logits; unrelated models of this sharpness agree to 2 Φ(-3 / sqrt 2) = 0.03
PROBE_SHAPE = 4, 64  # rows and tokens of the random text on which acceptance is measured
TOLERANCE = 0.01  # of α, where ε is looked for


@dataclass(frozen=True)
class Recipe:
    """What a grafted pair is made of, all llamas.

    Attributes:
        hidden, inner: widths of the stream and of the feed-forwards.
        layers: of the target, of which the first `draft_layers` are the draft's.
        heads, kv_heads: of attention.
        vocab: tokens.
        tied: whether the embeddings are the head as well.
        epsilon: by which the later layers' residuals are scaled; None is looked for when the pair is made.
        alpha: acceptance to look for, or that was found with this `epsilon`.
        unrelated: whether the draft has random weights of its own instead.
        positions: the longest text.
        seed: of the weights.

    Raises:
        ValueError: for a draft without layers or with all of the target's, and for heads that do not divide.
    """

    hidden: int
    inner: int
    layers: int
    draft_layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = True
    epsilon: float | None = None
    alpha: float = 0.8
    unrelated: bool = False
    positions: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            0 < self.draft_layers < self.layers,
            f"draft_layers={self.draft_layers} is not between 0 and the {self.layers} layers of the target; give "
            "fewer, 1 or more.",
        )
        require(
            self.hidden % (2 * self.heads) == 0 and self.heads % self.kv_heads == 0,
            f"{self.heads} heads and {self.kv_heads} key-value heads do not divide a width of {self.hidden}; the "
            "heads must be a multiple of the key-value heads, and each must be of an even width.",
        )


SMALL = Recipe(384, 1024, 15, 2, heads=8, kv_heads=8, vocab=8192, epsilon=0.065)
MIDDLE = Recipe(768, 2048, 22, 2, heads=12, kv_heads=12, vocab=8192, epsilon=0.056)
LARGE = Recipe(2048, 8192, 16, 2, heads=32, kv_heads=8, vocab=128256)  # the shapes of Llama 3.2 1B
HUGE = Recipe(4096, 14336, 32, 2, heads=32, kv_heads=8, vocab=32768, tied=False)  # those of Mistral 7B v0.3
RECIPES = {
    "30M": SMALL,
    "30M-gqa": replace(SMALL, kv_heads=2),
    "30M-low": replace(SMALL, epsilon=0.184, alpha=0.5),
    "30M-deep": replace(SMALL, draft_layers=5, epsilon=0.056, alpha=0.9),
    "30M-unrelated": replace(SMALL, unrelated=True),
    "163M": MIDDLE,
    "163M-gqa": replace(MIDDLE, kv_heads=3),
    "1B": LARGE,
    "1B-low": replace(LARGE, alpha=0.5),
    "1B-deep": replace(LARGE, draft_layers=5, alpha=0.9),
    "1B-unrelated": replace(LARGE, unrelated=True),
    "7B": HUGE,
}


def check_grafted(name: str) -> None:
    """Whether there is a grafted pair of this name, if the name is one of theirs."""
    known = [PREFIX + each for each in RECIPES]
    told = f"the grafted pair {name!r} is unknown; choose one of {', '.join(known)}."
    require(not name.startswith(PREFIX) or name in known, told)


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
