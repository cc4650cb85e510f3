"""Medusa: one small network for each candidate, which reads the target's last state."""

from typing import Any

import torch
from torch import nn

from .config import HeadConfig
from .network import HeadNetwork, StepOutput


class MedusaBlock(nn.Module):
    """A linear layer beside what it reads."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + nn.functional.silu(self.linear(states))


class Medusa(HeadNetwork):
    """Network i drafts candidate i, of the target's state that the token before the first one was chosen by."""

    has_attention = False
    gives_logits = True
    reads_final_states = True

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.max_candidates = config.medusa_num_heads or 0
        for number in range(self.max_candidates):
            blocks = [MedusaBlock(config.hidden_size) for _ in range(config.medusa_num_layers or 0)]
            output = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self.add_module(str(number), nn.Sequential(*blocks, output))

    def first_step(
        self, cache: Any, embedded: Any, states: torch.Tensor, newest: Any, num_candidates: int
    ) -> StepOutput:
        """Logits [R, n, V_d] in place of states, since the networks have no output in common."""
        newest_states = states.gather(1, newest[..., None].expand(-1, -1, states.shape[2]))
        logits = [self.get_submodule(str(number))(newest_states) for number in range(num_candidates)]
        return torch.cat(logits, 1), None
