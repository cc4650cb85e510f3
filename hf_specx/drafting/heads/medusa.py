"""Medusa: one small network for each candidate, which reads the target's last state."""

from typing import Any

import torch
from torch import nn

from .body import Body, Found
from .config import HeadConfig


class MedusaBlock(nn.Module):
    """A linear layer beside what it reads."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + nn.functional.silu(self.linear(states))


class Medusa(Body):
    """Network i drafts candidate i, of the target's state that the token before the first one was chosen by."""

    has_keys = False

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config, self.most = config, config.medusa_num_heads or 0
        for number in range(self.most):
            blocks = [MedusaBlock(config.hidden_size) for _ in range(config.medusa_num_layers or 0)]
            scores = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self.add_module(str(number), nn.Sequential(*blocks, scores))

    def begin(self, entries: Any, embedded: Any, states: torch.Tensor, newest: Any, number: int) -> Found:
        """Scores [R, n, V_d], since it has no output in common."""
        newest = states.gather(1, newest[..., None].expand(-1, -1, states.shape[2]))
        return torch.cat([self.get_submodule(str(place))(newest) for place in range(number)], 1), None
