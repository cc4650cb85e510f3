"""An EAGLE-3 head over whole texts, as it drafts: first from the target's states, then step by step from its own.

This is the training-time test of EAGLE-3 (arXiv 2503.01840, §3.2). At step s the entry of token i + 1 has the state
that the head found for the entry before at step s - 1, and sees true entries up to i - s and its own of the steps
between, as in a draft that began there; so a forward over a text is every draft that could begin in it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_specx.drafting.heads.layers import Rotary


Place = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]


def unrolled(
    model: Any, tokens: torch.Tensor, states: torch.Tensor, numbers: torch.Tensor, begins: torch.Tensor
) -> Iterator[Place]:
    """Places of all drafts, of which each is scored.

    Args:
        model: `HeadOnTexts`.
        tokens: [B, m] int64; the token of an entry stands behind that of its state.
        states: [B, m, W] of the target.
        numbers: [B, m], of what follows each token; -1 where nothing is wanted.
        begins: [B, m] bool, behind which tokens blocks begin; here drafts begin behind all.

    Yields:
        Of each step s from 0 on: s, and of n places the token [n] before it, the number [n], and the normed state
        [n, H].
    """
    body: Any = model.draft_head.body
    every = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    entries, embedded = Unrolling(body.config, every), model.drafter.embed(tokens)
    normed, state = body.begin(entries, embedded, states, every, model.steps)
    for step in range(model.steps):
        if step:
            entries.step = step
            normed, state = body.next(entries, embedded, nn.functional.pad(state[:, :-1], (0, 0, 1, 0)))
        wanted = numbers[:, step:] >= 0
        yield step, tokens[:, step:][wanted], numbers[:, step:][wanted], normed[:, step:][wanted]


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
        return attended(query, self.held[layer], self._mask(layer))

    def _mask(self, layer: int) -> torch.Tensor:
        """[m, (s + 1) * m] bool: true entries up to that where the draft began, and its own one of each step since."""
        true = self.back >= self.step
        if (window := window_of(self.config, layer)) is not None:
            true = true & (self.back < window)
        return torch.cat([true, *(self.back == self.step - own for own in range(1, self.step + 1))], 1)


def attended(query: torch.Tensor, held: list[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor) -> torch.Tensor:
    """[B, q, n * H * D] of queries [B, q, n * H, D] over parts of keys and values [B, k, H, D], where the mask is."""
    keys, values = (torch.cat(parts, 1).transpose(1, 2) for parts in zip(*held, strict=True))
    found = nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
    )
    return found.transpose(1, 2).flatten(2)


def window_of(config: Any, layer: int) -> int | None:
    """How many entries a layer of a head sees; None if all."""
    types = config.layer_types
    return config.sliding_window if types is not None and types[layer] == "sliding_attention" else None
