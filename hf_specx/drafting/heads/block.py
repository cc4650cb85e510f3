"""DFlash and DSpark, which draft a block of tokens in one forward that sees the target's states at all layers."""

from typing import Any

import torch
from torch import nn

from .body import Body, Found, Scored
from .config import HeadConfig
from .layers import Entries, HeadLayer, norm


class BlockLayer(HeadLayer):
    """A layer whose entries of a block see the context as well."""

    def forward(self, states: torch.Tensor, context: torch.Tensor, entries: Entries) -> torch.Tensor:  # type: ignore[override]
        """[R, q, H] of a block's states [R, q, H], and of the context [R, m, H] that it is to see first now."""
        read = self.input_layernorm(states)
        return self.after(states, read, self.self_attn.keys(torch.cat([context, read], 1), entries), entries)


class Block(Body):
    """Entry i of a row is the target's state at token i, of which each layer makes keys and values, and nothing else.

    A block is the last token and masks behind it; its entries see all of these and each other.
    """

    layers: Any
    markov_head: "MarkovHead"
    sees_ahead = True
    layer_class: type[HeadLayer] = BlockLayer

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config, self.size = config, config.block_size or 0
        self.most = self.size - (not config.sample_from_anchor)
        width = config.target_hidden_size * len(config.layer_ids or ())
        self.fc = nn.Linear(width, config.hidden_size, config.fc_bias)
        self.hidden_norm, self.norm = norm(config), norm(config)
        self.layers = nn.ModuleList(self.layer_class(config, number) for number in range(config.num_hidden_layers))
        self.corrects = config.markov_rank > 0
        if self.corrects:
            self.markov_head = MarkovHead(config)
        if config.confidence_head:
            before = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(config.hidden_size + before, 1)})

    def extra(self, number: int) -> int:
        """The whole block, as it was trained, however many candidates are wanted."""
        return self.size

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """[r, m, H] of the target's states [r, m, n * H_t]."""
        return self.hidden_norm(self.fc(states))

    def read(self, entries: Entries, embedded: Any, states: torch.Tensor) -> None:
        context = self.fused(states)
        for layer in self.layers:
            entries.note(layer.number, *layer.self_attn.keys(context, entries))

    def begin(self, entries: Entries, embedded: Any, states: torch.Tensor, newest: Any, number: int) -> Found:
        context, states = self.fused(states), embedded
        for layer in self.layers:
            states = layer(states, context, entries)
        return self.norm(states if self.config.sample_from_anchor else states[:, 1:])[:, :number], None

    def scored(self, scores: Any, states: torch.Tensor, tokens: torch.Tensor, memory: Any, asked: bool) -> Scored:
        before, seen, sure = None, [states], None
        if self.config.markov_rank:
            before = self.markov_head.markov_w1(tokens[:, 0])
            seen += [before] if self.config.confidence_head_with_markov else []
        if asked:
            sure = self.confidence_head["proj"](torch.cat(seen, -1)).sigmoid()
        if before is not None:
            scores, memory = self.markov_head(scores, states, before, memory)
        return scores, memory, sure


class MarkovHead(nn.Module):
    """What the token before adds to the scores of a place: a product of two tables, which may be gated."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        rank, self.kind = config.markov_rank, config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * rank, 3 * rank)

    def forward(self, scores: torch.Tensor, states: torch.Tensor, before: torch.Tensor, memory: Any) -> Found:
        """Scores [R, V_d] with what it adds, and the memory [R, r] behind this place.

        Args:
            states: [R, H], of the place.
            before: [R, r], what the first table has for the token before.
            memory: [R, r], behind the place before; None for the first one.
        """
        if self.kind == "gated":
            before = self.gate_proj(torch.cat([states, before], -1)).sigmoid() * before
        elif self.kind == "rnn":
            memory = torch.zeros_like(before) if memory is None else memory
            gate, new, out = self.joint_proj(torch.cat([memory, before, states], -1)).chunk(3, -1)
            memory, before = torch.lerp(new.tanh(), memory.to(new.dtype), gate.sigmoid()), out.tanh()
        return torch.addmm(scores.to(before.dtype), before, self.markov_w2.weight.T), memory
