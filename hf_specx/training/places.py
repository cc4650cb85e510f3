"""A head over whole texts, as it drafts: the state of each place of drafts that begin in one, of many in few forwards.

EAGLE-3 learns by its training-time test (arXiv 2503.01840, §3.2): the first place of a draft has the target's states,
the others what the head found for the place before. DSpark and DFlash have a block at once (arXiv 2607.05147). A draft
sees true entries up to where it began, and its own.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_specx.drafting.heads.layers import Rotary


AT_ONCE = 64  # drafts of a text in a forward, whose mask grows with them
# a step, and of n places at it the token [n] before each, its number [n], and its normed state [n, H]
Place = tuple[int, Tensor, Tensor, Tensor]


def places(model: Any, tokens: Tensor, states: Tensor, numbers: Tensor, begins: Tensor) -> Iterator[Place]:
    """Places of drafts; of each `AT_ONCE` drafts anew from step 0 on.

    Args:
        model: `HeadOnTexts`.
        tokens: [B, m] int64; the token of an entry stands behind that of its state.
        states: [B, m, W] of the target.
        numbers: [B, m], of what follows each token; -1 where nothing is wanted.
        begins: [B, m] bool, behind which tokens drafts begin.
    """
    body: Any = model.draft_head.body
    most, nowhere = model.steps, tokens.shape[1]
    entries = Entries(body.config, torch.arange(nowhere, device=tokens.device).expand(tokens.shape))
    numbers, tokens = nn.functional.pad(numbers, (0, most), value=-1), nn.functional.pad(tokens, (0, most))
    # rows that begin fewer than others, or none, have some at `nowhere`, which propose nothing
    anchors = nn.utils.rnn.pad_sequence([row.nonzero()[:, 0] for row in begins], True, nowhere)
    parts = nn.functional.pad(anchors, (0, not anchors.shape[1]), value=nowhere).split(AT_ONCE, 1)
    drafts = DRAFTS[body.config.kind](model, entries, tokens, states, parts)
    for part, normed in zip(parts, drafts, strict=True):
        at = (part[..., None] + torch.arange(most, device=part.device)).flatten(1)
        before, wanted = (each.gather(1, at).view(-1, most) for each in (tokens, numbers))
        order = (wanted >= 0).sum(1).argsort(descending=True, stable=True)  # the longest first, as texts end
        for step, count in enumerate((wanted >= 0).sum(0).tolist()):
            longest = order[:count]
            yield step, before[longest, step], wanted[longest, step], normed[longest, step]


def unrolled(model: Any, entries: Any, tokens: Tensor, states: Tensor, parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Of drafts behind each of these tokens [B, a], normed states [B * a, K, H] that were found one by one.

    The arguments are those of `places`, with tokens K longer.
    """
    body, embedded, every = model.draft_head.body, model.drafter.embed(tokens), entries.parts[0][0]
    known = body.begin(entries, embedded[:, : states.shape[1]], states, every, model.steps)
    known = [nn.functional.pad(each, (0, 0, 0, 1)) for each in known]
    for part in parts:
        entries.forget_drafts()
        normed, state = (picked(each, part) for each in known)
        found = [normed]
        for step in range(1, model.steps):
            entries.come(part + step, part)
            normed, state = body.next(entries, picked(embedded, part + step), state)
            found.append(normed)
        yield torch.stack(found, 2).flatten(0, 1)


def blocks(model: Any, entries: Any, tokens: Tensor, states: Tensor, parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """The same of drafts that are found at once."""
    body: Any = model.draft_head.body
    body.read(entries, None, states)
    for part in parts:
        inside = torch.arange(body.size, device=part.device)
        entries.forget_drafts()
        entries.come((part[..., None] + 1 + inside).flatten(1), part.repeat_interleave(body.size, 1), body.size)
        first = tokens.gather(1, part).view(-1, 1)
        no_states = states.new_zeros(len(first), 0, states.shape[2])  # those of the text are read
        yield body.begin(entries, model.drafter.embed(first, body.size - 1), no_states, None, model.steps)[0]


def picked(states: Tensor, places: Tensor) -> Tensor:
    """[B, a, H] of states [B, m, H] at places [B, a]."""
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))


DRAFTS: Any = {"eagle3": unrolled, "dspark": blocks, "dflash": blocks}


class Entries:
    """The entries of texts that have come so far, the true ones first, in place of the `Entries` of a call.

    Args:
        config: `HeadConfig` of the head.
        positions: [B, m] of the true ones.
    """

    def __init__(self, config: Any, positions: Tensor):
        self.config, self.rotary = config, Rotary(config, positions.device)
        self.parts: list[tuple[Tensor, Tensor]] = []  # positions, and those behind which drafts began
        self.held: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # keys and values, by layer
        self.come(positions, positions)

    def come(self, positions: Tensor, began: Tensor, size: int = -1) -> None:
        """Let entries [B, q] of drafts come, which a head has in rows of `size`."""
        self.parts.append((positions, began))
        self.turns = self.rotary(positions.reshape(-1, positions.shape[1] if size < 0 else size))

    def forget_drafts(self) -> None:
        for known in (self.parts, *self.held.values()):
            del known[1:]

    def note(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep keys and values [B, q, H, D]."""
        self.held[layer].append((key, value))

    def attend(self, layer: int, *parts: Tensor) -> Tensor:
        """[r, S, n * H * D] of queries [r, S, n * H, D], with the keys and values [r, S, H, D] that come with them."""
        query, key, value = (part.reshape(*self.parts[-1][0].shape, *part.shape[2:]) for part in parts)
        self.note(layer, key, value)
        keys, values = (torch.cat(each, 1).transpose(1, 2) for each in zip(*self.held[layer], strict=True))
        found = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=self._mask(layer), enable_gqa=True
        )
        return found.transpose(1, 2).reshape(parts[0].flatten(2).shape)

    def _mask(self, layer: int) -> Tensor:
        """[B, 1, q, k] bool of the newest entries: true ones up to where each began, and those of its own draft."""
        (known, _), *own = self.parts
        at, began = (each[..., None] for each in self.parts[-1])
        seen = torch.cat([known[:, None] <= began, *(other[:, None] == began for _, other in own)], 2)
        types, window = self.config.layer_types, self.config.sliding_window
        back = at - torch.cat([positions for positions, _ in self.parts], 1)[:, None]
        if self.config.is_causal:
            seen = seen & (back >= 0)
        if types is not None and types[layer] == "sliding_attention" and window is not None:
            seen = seen & (back < window) & (self.config.sliding_window_non_causal | (back >= 0))
        return seen[:, None]
