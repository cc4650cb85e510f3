"""An EAGLE-3 head over whole texts, as it drafts: first from the target's states, then step by step from its own.

This is the training-time test of EAGLE-3 (arXiv 2503.01840, §3.2). At step s the entry of token i + 1 has the state
that the head found for the entry before at step s - 1, and sees true entries up to i - s and its own of the steps
between, as in a draft that began there; so a forward over a text is every draft that could begin in it.
"""

from typing import Any

import torch
from torch import nn

from hf_specx.drafting.heads.head import DraftHead
from hf_specx.drafting.heads.layers import Rotary


class Unrolled(nn.Module):
    """A head that is trained; to the head's body it is what feeds it.

    Args:
        draft_head: of the kind "eagle3"; its weights are those of this module.
        embed: the target's embeddings and their device, for a head that has none; they are not trained.
        output: what scores states, for a head that has no output of its own; it is not trained.
        steps: candidates of a draft.
    """

    def __init__(
        self,
        draft_head: DraftHead,
        embed: tuple[nn.Module, torch.device],
        output: Any,
        steps: int,
    ):
        super().__init__()
        self.draft_head, self.steps = draft_head, steps
        self.of_target = embed, output  # in a tuple: no part of what is trained or saved
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, wanted: torch.Tensor) -> list[torch.Tensor]:
        """What follows the tokens, by each step of drafting.

        Args:
            tokens: [B, m] int64; the token of an entry stands behind that of its state.
            states: [B, m, W] of the target.
            wanted: [B, m] bool, after which tokens.

        Returns:
            For each step s logits [n_s, V_d], row by row, of the wanted entries that are not among the first s.
        """
        body, shape = self.draft_head.body, tokens.shape
        self.tokens, self.states = tokens, states
        self.newest = torch.arange(shape[1], device=tokens.device).expand(shape)
        self.slots = Steps(self.draft_head.config, self.newest)
        found = []
        for step in range(self.steps):
            if step:
                self.kept["state"] = nn.functional.pad(self.kept["state"][:, :-1], (0, 0, 1, 0))
                self.slots.step = step
            normed = body.next(self, tokens) if step else body.begin(self, 0)
            found.append(self.head(normed[:, step:][wanted[:, step:]]))
        self.kept.clear()
        return found

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, m, H] of tokens [B, m], by the head's own embeddings or the target's."""
        own = getattr(self.draft_head, "embed_tokens", None)
        (embed, device), _ = self.of_target
        found = embed(tokens.to(device)) if own is None else own(tokens)
        return found.to(tokens.device, self.states.dtype)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Scores [n, V_d] of normed states [n, H]."""
        own = getattr(self.draft_head, "lm_head", None)
        if own is not None:
            return own(states)
        output: Any = self.of_target[1]
        return output(states.to(output.weight.device, output.weight.dtype)).to(states.device)


class Steps:
    """Keys and values of all entries of a text at all steps so far; in place of the `Slots` of a call.

    Args:
        config: `HeadConfig` of the head.
        positions: [B, m] of the entries, from 0 on: only differences count.
    """

    def __init__(self, config: Any, positions: torch.Tensor):
        self.config, self.step, self.turns = config, 0, Rotary(config, positions.device)(positions[:1])
        self.back = positions[0][:, None] - positions[0]  # [m, m], how far a key's entry is behind a query's
        self.held: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(config.num_hidden_layers)]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[B, m, n * H * D] of queries [B, m, n * H, D], with the keys and values [B, m, H, D] of this step."""
        self.held[layer].append((key, value))
        keys, values = (torch.cat(parts, 1).transpose(1, 2) for parts in zip(*self.held[layer], strict=True))
        found = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=self._mask(layer), enable_gqa=True
        )
        return found.transpose(1, 2).flatten(2)

    def _mask(self, layer: int) -> torch.Tensor:
        """[m, (s + 1) * m] bool: true entries up to that where the draft began, and its own one of each step since."""
        types, window = self.config.layer_types, self.config.sliding_window
        true = self.back >= self.step
        if window is not None and types is not None and types[layer] == "sliding_attention":
            true = true & (self.back < window)
        return torch.cat([true, *(self.back == self.step - own for own in range(1, self.step + 1))], 1)
