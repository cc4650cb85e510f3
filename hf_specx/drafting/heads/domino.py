"""Domino: the block of DFlash, whose candidates are corrected by a recurrent state of the tokens before them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_specx.common.errors import brief, is_int

from .block import Block
from .config import HeadConfig
from .network import AdjustedLogits
from .tensors import Weights


class Domino(Block):
    """A block to whose logits, but for the first `pure_draft_prefix_len` candidates, a network adds.

    It reads the state of a candidate and that of a recurrent unit over the tokens before. The carried state [R, D + 1]
    is the latter, and the number of candidates so far.
    """

    embeds_previous_token = True

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        self.adjusts_logits = True
        self.prefix_gru = PrefixGru(config.hidden_size, config.gru_hidden_dim)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.draft_vocab_size, bias=False),
        )

    def adjust_logits(
        self, logits: Any, states: torch.Tensor, previous: torch.Tensor, carried: Any, with_confidence: bool
    ) -> AdjustedLogits:
        if carried is None:
            carried = states.new_zeros(len(states), self.config.gru_hidden_dim + 1)
        prefix = self.prefix_gru(previous[:, 0], carried[:, :-1])
        index = carried[:, -1:]
        added = self.embed_proj(torch.cat([states, prefix], -1)).to(logits.dtype)
        logits = torch.where(index < self.config.pure_draft_prefix_len, logits, logits + added)
        return logits, torch.cat([prefix, index + 1], -1), None


class PrefixGru(nn.Module):
    """A step of a recurrent unit without biases, by the names of `nn.GRU`."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.zeros(3 * size, width))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(3 * size, size))

    def forward(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The state [R, D] behind embedded tokens [R, H]."""
        input_reset, input_update, input_new = nn.functional.linear(embedded, self.weight_ih_l0).chunk(3, -1)
        state_reset, state_update, state_new = nn.functional.linear(state, self.weight_hh_l0).chunk(3, -1)
        reset = (input_reset + state_reset).sigmoid()
        update = (input_update + state_update).sigmoid()
        new = (input_new + reset * state_new).tanh()
        return torch.lerp(new, state.to(new.dtype), update.to(new.dtype))


def domino_fields(options: dict[str, Any], weights: Weights, need: Callable[[Any, str], None]) -> dict[str, Any]:
    """The fields of `HeadConfig` that Domino alone has.

    Args:
        options: of the config and of its parts.
        weights: the tensors.
        need: raises a ValueError that begins with the head's name, unless its first argument holds.
    """
    tensors = {"gru_hidden_dim": "prefix_gru.weight_hh_l0", "emb_dim": "embed_proj.2.weight"}
    missing = [name for name in tensors.values() if name not in weights]
    need(not missing, f"lacks {', '.join(missing)}, which Domino has; get it again.")
    prefix_length = options.get("pure_draft_prefix_len", 0)
    need(
        is_int(prefix_length) and prefix_length >= 0,
        f"has pure_draft_prefix_len={brief(prefix_length)} in its config.json, which is no number of places; "
        "get it again.",
    )
    fields = {field: weights[name].shape[-1] for field, name in tensors.items()}
    return fields | {"pure_draft_prefix_len": prefix_length}
