"""A head over whole texts, as it drafts: at each place the state that it has there, of all drafts in few forwards.

EAGLE-3 is unrolled (the training-time test of arXiv 2503.01840, §3.2): at step s the entry of token i + 1 has the
state that the head found for the entry before at step s - 1, as in a draft that began s tokens earlier. DSpark and
DFlash have blocks that begin at several tokens (arXiv 2607.05147). A draft sees true entries up to where it began, and
its own.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_specx.drafting.heads.layers import Rotary


AT_ONCE = 64  # blocks of a text in a forward, whose mask grows with them
# a step, and of n places at it the token [n] before each, its number [n], and its normed state [n, H]
Place = tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]


def unrolled(
    model: Any, tokens: torch.Tensor, states: torch.Tensor, numbers: torch.Tensor, begins: torch.Tensor
) -> Iterator[Place]:
    """Places of all drafts, of which each is scored, from step 0 on.

    Args:
        model: `HeadOnTexts`.
        tokens: [B, m] int64; the token of an entry stands behind that of its state.
        states: [B, m, W] of the target.
        numbers: [B, m], of what follows each token; -1 where nothing is wanted.
        begins: [B, m] bool, behind which tokens blocks begin; here drafts begin behind all.
    """
    body: Any = model.draft_head.body
    every = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    entries, embedded = Entries(body.config, every[:1], len(tokens)), model.drafter.embed(tokens)
    normed, state = body.begin(entries, embedded, states, every, model.steps)
    for step in range(model.steps):
        if step:
            entries.come(every[:1], every[:1] - step)
            normed, state = body.next(entries, embedded, nn.functional.pad(state[:, :-1], (0, 0, 1, 0)))
        wanted = numbers[:, step:] >= 0
        yield step, tokens[:, step:][wanted], numbers[:, step:][wanted], normed[:, step:][wanted]


def blocks(
    model: Any, tokens: torch.Tensor, states: torch.Tensor, numbers: torch.Tensor, begins: torch.Tensor
) -> Iterator[Place]:
    """Places of blocks, likewise; of each `AT_ONCE` blocks anew from step 0 on."""
    body: Any = model.draft_head.body
    every, most = torch.arange(tokens.shape[1], device=tokens.device), min(model.steps, body.most)
    entries = Entries(body.config, every.expand(tokens.shape), len(tokens))
    body.read(entries, None, states)
    nowhere = tokens.shape[1]  # where rows with fewer blocks have others, which propose nothing
    anchors = nn.utils.rnn.pad_sequence([row.nonzero()[:, 0] for row in begins], True, nowhere)
    numbers, tokens = nn.functional.pad(numbers, (0, most), value=-1), nn.functional.pad(tokens, (0, most))
    for part in anchors.split(AT_ONCE, 1):
        inside = torch.arange(body.size, device=part.device)
        entries.forget_drafts()
        entries.come((part[..., None] + 1 + inside).flatten(1), part.repeat_interleave(body.size, 1), body.size)
        first = tokens.gather(1, part).view(-1, 1)
        block = nn.functional.pad(first, (0, body.size - 1), value=body.config.mask_token_id)
        no_states = states.new_zeros(len(block), 0, states.shape[2])  # those of the text are read
        normed, _ = body.begin(entries, model.drafter.embed(block), no_states, None, most)
        places = (part[..., None] + inside[:most]).flatten(1)
        before, wanted = (each.gather(1, places).view(-1, most) for each in (tokens, numbers))
        order = (wanted >= 0).sum(1).argsort(descending=True, stable=True)  # the longest first, as texts end
        for step, count in enumerate((wanted >= 0).sum(0).tolist()):
            longest = order[:count]
            yield step, before[longest, step], wanted[longest, step], normed[longest, step]


PLACES: Any = {"eagle3": unrolled, "dspark": blocks, "dflash": blocks}


class Entries:
    """The entries of texts that have come so far, the true ones first, in place of the `Entries` of a call.

    Args:
        config: `HeadConfig` of the head.
        positions: [B, m] of the true ones; [1, m] if they are those of all texts.
        texts: how many there are, B.
    """

    def __init__(self, config: Any, positions: torch.Tensor, texts: int):
        self.config, self.rotary, self.texts = config, Rotary(config, positions.device), texts
        self.parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # positions, and those behind which drafts began
        self.held: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)  # keys and values, by layer
        self.come(positions, positions)

    def come(self, positions: torch.Tensor, began: torch.Tensor, size: int = -1) -> None:
        """Let entries [B, q] of drafts come, which a head has in rows of `size`."""
        self.parts.append((positions, began))
        self.turns = self.rotary(positions.reshape(-1, positions.shape[1] if size < 0 else size))

    def forget_drafts(self) -> None:
        for known in (self.parts, *self.held.values()):
            del known[1:]

    def note(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep keys and values [B, q, H, D]."""
        self.held[layer].append((key, value))

    def attend(self, layer: int, *parts: torch.Tensor) -> torch.Tensor:
        """[r, S, n * H * D] of queries [r, S, n * H, D], with the keys and values [r, S, H, D] that come with them."""
        count = self.parts[-1][0].shape[1]
        query, key, value = (part.reshape(self.texts, count, *part.shape[2:]) for part in parts)
        self.note(layer, key, value)
        keys, values = (torch.cat(each, 1).transpose(1, 2) for each in zip(*self.held[layer], strict=True))
        found = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=self._mask(layer), enable_gqa=True
        )
        return found.transpose(1, 2).reshape(parts[0].flatten(2).shape)

    def _mask(self, layer: int) -> torch.Tensor:
        """[B, 1, q, k] bool of the newest entries: true ones up to where each began, and those of its own draft."""
        (known, _), *own = self.parts
        at, began = (each[..., None] for each in self.parts[-1])
        seen = torch.cat([known[:, None] <= began, *(other[:, None] == began for _, other in own)], 2)
        types, window = self.config.layer_types, self.config.sliding_window
        if types is not None and types[layer] == "sliding_attention" and window is not None:
            back = at - torch.cat([positions for positions, _ in self.parts], 1)[:, None]
            seen = seen & (back < window) & (self.config.sliding_window_non_causal | (back >= 0))
        return seen[:, None]
