"""An EAGLE-3 head over whole texts, as it drafts: first from the target's states, then step by step from its own.

This is the training-time test of EAGLE-3 (arXiv 2503.01840, §3.2). At step s the entry of token i + 1 has the state
that the head found for the entry before at step s - 1, and sees true entries up to i - s and its own of the steps
between, as in a draft that began there; so a forward over a text is every draft that could begin in it.
"""

from typing import Any

import torch
from torch import nn

from hf_specx.drafting.heads.head import DraftHead
from hf_specx.drafting.heads.layers import Rotary, read_by


class Unrolled(nn.Module):
    """A head that is trained.

    Args:
        draft_head: of the kind "eagle3"; its weights are those of this module.
        embed, output: the target's, for a head that has none of its own; they are not trained.
        steps: candidates of a draft.
    """

    def __init__(self, draft_head: DraftHead, embed: nn.Module, output: Any, steps: int):
        super().__init__()
        self.draft_head, self.steps = draft_head, steps
        self.of_target = embed, output  # in a tuple: no part of what is trained or saved

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, wanted: torch.Tensor) -> list[torch.Tensor]:
        """What follows the tokens, by each step of drafting.

        Args:
            tokens: [B, m] int64; the token of an entry stands behind that of its state.
            states: [B, m, W] of the target.
            wanted: [B, m] bool, after which tokens.

        Returns:
            For each step s logits [n_s, V_d], row by row, of the wanted entries that are not among the first s.
        """
        body, every = self.draft_head.body, torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        entries, embedded = Unrolling(self.draft_head.config, every), self.embed(tokens, states.dtype)
        normed, state = body.begin(entries, embedded, states, every, self.steps)
        found = [self.scored(normed[wanted])]
        for step in range(1, self.steps):
            entries.step = step
            before = nn.functional.pad(state[:, :-1], (0, 0, 1, 0))
            normed, state = body.next(entries, embedded, before)
            found.append(self.scored(normed[:, step:][wanted[:, step:]]))
        return found

    def embed(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[B, m, H] of tokens [B, m], by the head's own embeddings or the target's."""
        own = getattr(self.draft_head, "embed_tokens", None)
        if own is not None:
            return own(tokens)
        embed, _ = self.of_target
        with torch.no_grad():
            return embed(read_by(embed, tokens)).to(tokens.device, dtype)

    def scored(self, states: torch.Tensor) -> torch.Tensor:
        """Scores [n, V_d] of normed states [n, H]."""
        own = getattr(self.draft_head, "lm_head", None)
        if own is not None:
            return own(states)
        _, output = self.of_target
        fixed = {name: weight.detach() for name, weight in output.named_parameters()}
        given = read_by(output, states.to(output.weight.dtype))
        return torch.func.functional_call(output, fixed, given).to(states.device)


class Unrolling:
    """All entries of a text at all steps so far, with their keys and values; in place of the `Entries` of a call.

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
