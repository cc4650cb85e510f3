"""The drafts that a head makes in whole texts, as it will draft: of many that begin in a text, in few forwards.

EAGLE-3 learns by its training-time test (arXiv 2503.01840, §3.2): for the first candidate of a draft it reads the
target's states, for the others its own for the candidate before. DSpark and DFlash have a block at once (arXiv
2607.05147). A draft sees the text's entries up to where it began, and its own.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_specx.drafting.heads.layers import Rotary


DRAFTS_AT_ONCE = 64  # drafts of a text in a forward, whose mask grows with them
# a step, and of n candidates at it the previous token [n], the number [n], and the normed state [n, H]
StepStates = tuple[int, Tensor, Tensor, Tensor]


def unrolled_drafts(
    model: Any, tokens: Tensor, states: Tensor, numbers: Tensor, begins: Tensor
) -> Iterator[StepStates]:
    """Yield the states of the candidates of many drafts, step by step, for `DRAFTS_AT_ONCE` drafts after another.

    Args:
        model: `HeadOnTexts`.
        tokens: [B, m] int64; the token of an entry is the one behind that of its state.
        states: [B, m, W] of the target.
        numbers: [B, m], of what follows each token; -1 where nothing is to be predicted.
        begins: [B, m] bool, behind which tokens drafts begin.
    """
    network: Any = model.draft_head.network
    num_steps, nowhere = model.num_steps, tokens.shape[1]
    positions = torch.arange(nowhere, device=tokens.device).expand(tokens.shape)
    cache = UnrolledCache(network.config, positions)
    numbers = nn.functional.pad(numbers, (0, num_steps), value=-1)
    tokens = nn.functional.pad(tokens, (0, num_steps))
    # rows in which fewer drafts begin than in others, or none, have some at `nowhere`, which propose nothing
    anchors = nn.utils.rnn.pad_sequence([row.nonzero()[:, 0] for row in begins], True, nowhere)
    groups = nn.functional.pad(anchors, (0, not anchors.shape[1]), value=nowhere).split(DRAFTS_AT_ONCE, 1)
    drafts = UNROLL_BY_KIND[network.config.kind](model, cache, tokens, states, groups)
    for group, normed in zip(groups, drafts, strict=True):
        columns = (group[..., None] + torch.arange(num_steps, device=group.device)).flatten(1)
        previous = tokens.gather(1, columns).view(-1, num_steps)
        predicted = numbers.gather(1, columns).view(-1, num_steps)
        order = (predicted >= 0).sum(1).argsort(descending=True, stable=True)  # the longest first, as texts end
        for step, count in enumerate((predicted >= 0).sum(0).tolist()):
            longest = order[:count]
            yield step, previous[longest, step], predicted[longest, step], normed[longest, step]


def unroll_steps(model: Any, cache: Any, tokens: Tensor, states: Tensor, groups: Sequence[Tensor]) -> Iterator[Tensor]:
    """The normed states [B * a, K, H] of drafts that are made step by step, for each group of anchors [B, a].

    The arguments are those of `unrolled_drafts`, with K more tokens.
    """
    network, embedded = model.draft_head.network, model.drafter.embed(tokens)
    positions = cache.entries[0][0]
    normed_of_text, carried_of_text = (
        nn.functional.pad(values, (0, 0, 0, 1))
        for values in network.first_step(cache, embedded[:, : states.shape[1]], states, positions, model.num_steps)
    )
    for anchors in groups:
        cache.drop_drafts()
        normed, carried = gathered_columns(normed_of_text, anchors), gathered_columns(carried_of_text, anchors)
        by_step = [normed]
        for step in range(1, model.num_steps):
            cache.add_entries(anchors + step, anchors)
            normed, carried = network.next_step(cache, gathered_columns(embedded, anchors + step), carried)
            by_step.append(normed)
        yield torch.stack(by_step, 2).flatten(0, 1)


def unroll_blocks(
    model: Any, cache: Any, tokens: Tensor, states: Tensor, groups: Sequence[Tensor]
) -> Iterator[Tensor]:
    """The normed states [B * a, K, H] of drafts whose candidates are made in one forward, for each group [B, a]."""
    network: Any = model.draft_head.network
    size = network.block_size
    network.append_context(cache, None, states)
    for anchors in groups:
        offsets = torch.arange(size, device=anchors.device)
        cache.drop_drafts()
        positions = (anchors[..., None] + 1 + offsets).flatten(1)
        cache.add_entries(positions, anchors.repeat_interleave(size, 1), size)
        last_tokens = tokens.gather(1, anchors).view(-1, 1)
        no_states = states.new_zeros(len(last_tokens), 0, states.shape[2])  # those of the text are read
        embedded = model.drafter.embed(last_tokens, size - 1)
        yield network.first_step(cache, embedded, no_states, None, model.num_steps)[0]


def gathered_columns(values: Tensor, columns: Tensor) -> Tensor:
    """The values [B, a, H] in some columns [B, a] of values [B, m, H]."""
    return values.gather(1, columns[..., None].expand(-1, -1, values.shape[2]))


UNROLL_BY_KIND: Any = {"eagle3": unroll_steps} | dict.fromkeys(("dspark", "dflash", "dflash2"), unroll_blocks)


class UnrolledCache:
    """The keys and values of texts and of drafts in them, in place of the `HeadCache` of a call.

    Args:
        config: `HeadConfig` of the head.
        positions: [B, m] of the entries of the texts.

    Attributes:
        entries: of the texts, and of each step of drafts: positions [B, q], and those behind which the drafts began.
        keys_values: by layer, of the same.
        cos_sin: of the newest entries.
    """

    def __init__(self, config: Any, positions: Tensor):
        self.config, self.rotary = config, Rotary(config, positions.device)
        self.entries: list[tuple[Tensor, Tensor]] = []
        self.keys_values: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.add_entries(positions, positions)

    def add_entries(self, positions: Tensor, anchors: Tensor, size: int = -1) -> None:
        """Add entries [B, q], which the head has in rows of `size`."""
        self.entries.append((positions, anchors))
        self.cos_sin = self.rotary(positions.reshape(-1, positions.shape[1] if size < 0 else size))

    def drop_drafts(self) -> None:
        """Keep the entries of the texts alone."""
        del self.entries[1:]
        for keys_values in self.keys_values.values():
            del keys_values[1:]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Add keys and values [B, q, H, D] of the newest entries."""
        self.keys_values[layer].append((key, value))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[r, S, n * H * D] of queries [r, S, n * H, D], with the keys and values [r, S, H, D] that come with them."""
        shape = query.flatten(2).shape
        query, key, value = (x.reshape(*self.entries[-1][0].shape, *x.shape[2:]) for x in (query, key, value))
        self.write(layer, key, value)
        keys, values = (torch.cat(parts, 1).transpose(1, 2) for parts in zip(*self.keys_values[layer], strict=True))
        attended = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, attn_mask=self._mask(layer), enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(shape)

    def _mask(self, layer: int) -> Tensor:
        """[B, 1, q, k] bool of the newest entries: the text up to where the draft began, and those of the same one."""
        (text_positions, _), *drafts = self.entries
        queries, began = (values[..., None] for values in self.entries[-1])
        in_text = text_positions[:, None] <= began
        in_draft = [anchors[:, None] == began for _, anchors in drafts]
        visible = torch.cat([in_text, *in_draft], 2)
        distance = queries - torch.cat([positions for positions, _ in self.entries], 1)[:, None]
        if self.config.is_causal:
            visible = visible & (distance >= 0)
        layer_types, window = self.config.layer_types, self.config.sliding_window
        if layer_types is not None and layer_types[layer] == "sliding_attention" and window is not None:
            not_ahead = self.config.sliding_window_non_causal | (distance >= 0)
            visible = visible & (distance < window) & not_ahead
        return visible[:, None]
