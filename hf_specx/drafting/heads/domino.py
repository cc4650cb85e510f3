"""Domino: the block of DFlash, whose places are corrected by a recurrent state of the tokens before them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_specx.common.errors import brief, is_int

from .block import Block
from .body import Scored
from .config import HeadConfig
from .tensors import Weights


class Domino(Block):
    """A block whose places, but the first `pure_draft_prefix_len`, get what a network says of tokens and state.

    The memory [R, D + 1] behind a place is the state of the tokens before it, and the number of places.
    """

    embeds_tokens = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        self.corrects, width = True, config.hidden_size + config.gru_hidden_dim
        self.prefix_gru = PrefixGru(config.hidden_size, config.gru_hidden_dim)
        into = nn.Linear(width, config.emb_dim, bias=False)
        self.embed_proj = nn.Sequential(
            into, nn.SiLU(), nn.Linear(config.emb_dim, config.draft_vocab_size, bias=False)
        )

    def scored(self, scores: Any, states: torch.Tensor, tokens: torch.Tensor, memory: Any, asked: bool) -> Scored:
        if memory is None:
            memory = states.new_zeros(len(states), self.config.gru_hidden_dim + 1)
        prefix, place = self.prefix_gru(tokens[:, 0], memory[:, :-1]), memory[:, -1:]
        added = self.embed_proj(torch.cat([states, prefix], -1)).to(scores.dtype)
        scores = torch.where(place < self.config.pure_draft_prefix_len, scores, scores + added)
        return scores, torch.cat([prefix, place + 1], -1), None


class PrefixGru(nn.Module):
    """A step of a recurrent unit without biases, by the names of `nn.GRU`."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.zeros(3 * size, width))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(3 * size, size))

    def forward(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The state [R, D] behind embedded tokens [R, H]."""
        read = nn.functional.linear(embedded, self.weight_ih_l0).chunk(3, -1)
        before = nn.functional.linear(state, self.weight_hh_l0).chunk(3, -1)
        reset, keep = ((one + other).sigmoid() for one, other in zip(read[:2], before[:2], strict=True))
        new = (read[2] + reset * before[2]).tanh()
        return torch.lerp(new, state.to(new.dtype), keep.to(new.dtype))


def domino_fields(said: dict[str, Any], weights: Weights, need: Callable[[Any, str], None]) -> dict[str, Any]:
    """The fields of `HeadConfig` that Domino alone has.

    Args:
        said: its config, with the options of its parts.
        need: raises a ValueError that begins with the head's name, unless what it is given holds.
    """
    sizes = {"gru_hidden_dim": "prefix_gru.weight_hh_l0", "emb_dim": "embed_proj.2.weight"}
    missing = [weight for weight in sizes.values() if weight not in weights]
    need(not missing, f"lacks {', '.join(missing)}, which Domino has; get it again.")
    pure = said.get("pure_draft_prefix_len", 0)
    message = (
        f"has pure_draft_prefix_len={brief(pure)} in its config.json, which is no number of places; get it again."
    )
    need(is_int(pure) and pure >= 0, message)
    return {field: weights[weight].shape[-1] for field, weight in sizes.items()} | {"pure_draft_prefix_len": pure}
