"""A DSpark or DFlash head over whole texts, as it drafts: blocks that begin at several tokens, in one forward.

The states of a text are read once. A block sees those before its first token, and itself (arXiv 2607.05147).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_specx.drafting.heads.layers import Rotary

from .unrolled import Place, attended, window_of


AT_ONCE = 64  # blocks of a text in a forward, whose mask grows with them


def blocks(
    model: Any, tokens: torch.Tensor, states: torch.Tensor, numbers: torch.Tensor, begins: torch.Tensor
) -> Iterator[Place]:
    """Places of blocks, as `unrolled` has those of drafts; of each `AT_ONCE` blocks anew from step 0 on."""
    body: Any = model.draft_head.body
    context, most = Context(body.config, states), min(model.steps, body.most)
    body.read(context, None, states)
    nowhere = tokens.shape[1]  # where rows with fewer blocks have others, which propose nothing
    anchors = nn.utils.rnn.pad_sequence([row.nonzero()[:, 0] for row in begins], True, nowhere)
    numbers, tokens = nn.functional.pad(numbers, (0, most), value=-1), nn.functional.pad(tokens, (0, most))
    for part in anchors.split(AT_ONCE, 1):
        context.aim(part, body.size)
        first = tokens.gather(1, part).view(-1, 1)
        block = nn.functional.pad(first, (0, body.size - 1), value=body.config.mask_token_id)
        no_states = states.new_zeros(len(block), 0, states.shape[2])  # those of the text are read
        normed, _ = body.begin(context, model.drafter.embed(block), no_states, None, most)
        places = (part[..., None] + torch.arange(most, device=part.device)).flatten(1)
        before, wanted = (each.gather(1, places).view(-1, most) for each in (tokens, numbers))
        order = (wanted >= 0).sum(1).argsort(descending=True, stable=True)  # the longest first, as texts end
        for step, count in enumerate((wanted >= 0).sum(0).tolist()):
            longest = order[:count]
            yield step, before[longest, step], wanted[longest, step], normed[longest, step]


class Context:
    """The states of texts, and blocks behind some of them; in place of the `Entries` of a call.

    Args:
        config: `HeadConfig` of the head.
        states: [B, m, W].
    """

    def __init__(self, config: Any, states: torch.Tensor):
        self.config, self.rotary = config, Rotary(config, states.device)
        self.places = torch.arange(states.shape[1], device=states.device)
        self.turns = self.rotary(self.places[None])
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep keys and values [B, m, H, D] of the states."""
        self.held[layer] = key, value

    def aim(self, anchors: torch.Tensor, size: int) -> None:
        """Let blocks of this size come, [B * A, size, ...], behind the states at places [B, A]."""
        self.anchors, self.size = anchors, size
        self.at = anchors[..., None] + 1 + torch.arange(size, device=anchors.device)
        self.turns = self.rotary(self.at.flatten(0, 1))

    def attend(self, layer: int, *parts: torch.Tensor) -> torch.Tensor:
        """[B * A, S, n * H * D] of queries [B * A, S, n * H, D], keys and values [B * A, S, H, D] of the blocks."""
        query, key, value = (part.unflatten(0, self.anchors.shape).flatten(1, 2) for part in parts)
        found = attended(query, [self.held[layer], (key, value)], self._mask(layer))
        return found.unflatten(1, self.at.shape[1:]).flatten(0, 1)

    def _mask(self, layer: int) -> torch.Tensor:
        """[B, 1, A * S, m + A * S] bool: states up to that of the anchor, and the block itself."""
        at, anchors = self.at.flatten(1), self.anchors.repeat_interleave(self.size, 1)
        keys = torch.cat([self.places.expand(len(at), -1), at], 1)
        owner = torch.arange(at.shape[1], device=at.device) // self.size
        own = (owner[:, None] == owner).expand(len(at), -1, -1)
        seen = torch.cat([self.places <= anchors[..., None], own], 2)
        if (window := window_of(self.config, layer)) is not None:
            back = at[..., None] - keys[:, None]
            seen = seen & (back < window) & (self.config.sliding_window_non_causal | (back >= 0))
        return seen[:, None]
