"""Targets that no table knows: copies of registered models, and some that are wrong with several tokens at once.

A wrong one is right for whole prompts and for single tokens behind a cache, which is all that plain `generate` feeds.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tiny import tiny
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def unheard_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose type has another name from now on."""
    kind = type(model.config)
    model.config.__class__ = type(f"Unheard{kind.__name__}", (kind,), {"model_type": f"unheard_of_{kind.model_type}"})
    return model


def behind_a_cache(states: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether states or queries [..., q, D] are several tokens, and keys [..., n, D] more."""
    return 1 < states.shape[-2] < keys.shape[-2]


def mask_dropped(seed: int = 0) -> PreTrainedModel:
    """Each of several tokens behind a cache sees all others."""

    def attention(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        mask = None if behind_a_cache(query, key) else attention_mask
        kwargs["is_causal"] = False if behind_a_cache(query, key) else kwargs.get("is_causal")
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    return replaced_attention(attention, seed)


def replaced_attention(attention: Callable[..., Any], seed: int) -> PreTrainedModel:
    """A model whose attention is another function; masks are made as for sdpa."""
    name = f"of_{attention.__qualname__.split('.')[0]}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    return tiny(seed=seed, attn_implementation=name)


def another_rope(seed: int, shift: float = 0.0, stretch: float = 1.0) -> PreTrainedModel:
    """Several tokens behind a cache are at other positions."""
    model = tiny(seed=seed)
    rotary = model.model.rotary_emb
    whole = rotary.forward

    def forward(states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        several = position_ids.shape[-1] > 1 and bool((position_ids[:, 0] > 0).all())
        return whole(states, position_ids * stretch + shift if several else position_ids)

    rotary.forward = forward
    return model


def positions_off_by_one(seed: int = 0) -> PreTrainedModel:
    return another_rope(seed, shift=1.0)


def another_rope_behind_a_cache(seed: int = 0) -> PreTrainedModel:
    return another_rope(seed, stretch=0.5)


class Quantised(nn.Linear):
    """Rounds what it is given by one scale for all tokens of all rows."""

    levels = 127

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        scale = states.abs().amax().clamp(min=1e-9) / self.levels
        return F.linear((states / scale).round() * scale, self.weight, self.bias)


class CoarselyQuantised(Quantised):
    levels = 7


def quantised(kind: type[Quantised], seed: int) -> PreTrainedModel:
    model = tiny(seed=seed)
    for module in model.model.layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = kind
    return model


def int8(seed: int = 0) -> PreTrainedModel:
    return quantised(Quantised, seed)


def int4(seed: int = 0) -> PreTrainedModel:
    return quantised(CoarselyQuantised, seed)


def steered(seed: int = 0) -> PreTrainedModel:
    """A hook changes the last position of each forward."""
    model = tiny(seed=seed)
    vector = torch.randn(32, generator=torch.Generator().manual_seed(0))

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[:, :-1], output[:, -1:] + vector.to(output)], 1)

    model.model.layers[0].register_forward_hook(hook)
    return model


def forward_replaced(seed: int = 0) -> PreTrainedModel:
    """Its head scores by what the tokens of a forward have in common as well."""
    model = tiny(seed=seed)
    whole = model.lm_head.forward
    model.lm_head.forward = lambda states: whole(states + states.mean(1, keepdim=True))
    return model


class Capacity(nn.Module):
    """An expert that takes the first tokens of a row in a forward, and leaves out the rest."""

    def __init__(self, expert: nn.Module, tokens: int):
        super().__init__()
        self.expert, self.tokens = expert, tokens

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        taken = torch.arange(states.shape[1], device=states.device) < self.tokens
        return self.expert(states) * taken[:, None]


def capacity(seed: int = 0) -> PreTrainedModel:
    model = tiny(seed=seed)
    for layer in model.model.layers:
        layer.mlp = Capacity(layer.mlp, 2)
    return model


def cache_that_loses_a_token(seed: int = 0) -> PreTrainedModel:
    """Several tokens behind a cache do not see the oldest."""

    def attention(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if behind_a_cache(query, key):
            oldest = torch.arange(key.shape[2]) == int(attention_mask[0, 0, 0].int().argmax())
            attention_mask = attention_mask & ~oldest
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    return replaced_attention(attention, seed)


class Remembering(nn.Module):
    """Adds a part of what it gave last, and begins anew with each prompt."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.state = inner, torch.zeros(())

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output = self.inner(states)
        if states.shape[1] > 6 or self.state.shape[:1] != output.shape[:1]:
            self.state = torch.zeros_like(output[:, -1])
        outputs = []
        for place in output.unbind(1):
            self.state = place + 0.3 * self.state
            outputs.append(self.state)
        return torch.stack(outputs, 1)


def state_not_taken_back(seed: int = 0) -> PreTrainedModel:
    model = tiny(seed=seed)
    model.model.layers[0].mlp = Remembering(model.model.layers[0].mlp)
    return model


class Crowded(nn.Module):
    """Gives other states where there are more rows."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states) * (1 + 0.2 * len(states))


def scores_depend_on_rows(seed: int = 0) -> PreTrainedModel:
    model = tiny(seed=seed)
    model.model.layers[0].mlp = Crowded(model.model.layers[0].mlp)
    return model


WRONG: dict[str, Callable[..., PreTrainedModel]] = {
    made.__name__: made
    for made in (
        mask_dropped,
        positions_off_by_one,
        int8,
        int4,
        steered,
        forward_replaced,
        capacity,
        cache_that_loses_a_token,
        state_not_taken_back,
        another_rope_behind_a_cache,
        scores_depend_on_rows,
    )
}
RIGHT = {
    "llama": ("ragged", {}),
    "gpt2": ("ragged", {}),
    "mistral": ("ragged", {}),
    "qwen2": ("ragged", {}),
    "gemma2": ("ragged", {}),
    "phi3": ("ragged", {}),
    "stablelm": ("ragged", {}),
    "opt": ("ragged", {}),
    "bloom": ("padded", {}),
    "lfm2": ("lockstep", {"layer_types": ["conv", "full_attention"]}),
}
