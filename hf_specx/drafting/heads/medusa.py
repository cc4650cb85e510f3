"""Medusa: one small network for each candidate, which reads the target's last state."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from .config import HeadConfig


if TYPE_CHECKING:
    from .feed import Feed


class MedusaBlock(nn.Module):
    """A linear layer beside what it reads."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + nn.functional.silu(self.linear(states))


class Medusa(nn.Module):
    """Network i drafts candidate i, of the target's state that the token before the first one was chosen by."""

    sees_ahead = False

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        for number in range(config.medusa_num_heads or 0):
            blocks = [MedusaBlock(config.hidden_size) for _ in range(config.medusa_num_layers or 0)]
            scores = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self.add_module(str(number), nn.Sequential(*blocks, scores))

    def extra(self, number: int) -> int:
        """It has no entries."""
        return 0

    def read(self, feed: "Feed") -> None:
        """There is nothing to keep."""

    def begin(self, feed: "Feed", extra: int) -> torch.Tensor:
        """[R, n, H], the newest state once for each candidate."""
        states = feed.states.gather(1, feed.newest[..., None].expand(-1, -1, feed.states.shape[2]))
        return states.expand(-1, self.config.medusa_num_heads or 0, -1)

    def score(self, feed: "Feed", states: torch.Tensor, place: int, tokens: torch.Tensor) -> torch.Tensor:
        """[R, V_d] of states [R, H]."""
        return self.get_submodule(str(place))(states)
