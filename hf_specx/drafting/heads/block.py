"""DFlash and DSpark, which draft a block of tokens in one forward that sees the target's states at all layers."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .config import HeadConfig
from .layers import HeadLayer, norm


if TYPE_CHECKING:
    from .feed import Feed


class Block(nn.Module):
    """Entry i of a row is the target's state at token i, of which each layer makes keys and values, and nothing else.

    A block is the last token and masks behind it; its entries see all of these and each other.
    """

    layers: Any
    sees_ahead = True

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(
            config.target_hidden_size * len(config.layer_ids or ()), config.hidden_size, config.fc_bias
        )
        self.hidden_norm, self.norm = norm(config), norm(config)
        self.layers = nn.ModuleList(HeadLayer(config, number) for number in range(config.num_hidden_layers))
        if config.markov_rank:
            self.markov_head = MarkovHead(config)
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(config)

    def extra(self, number: int) -> int:
        """The whole block, as it was trained, however many candidates are wanted."""
        assert self.config.block_size is not None
        return self.config.block_size

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """[r, m, H] of the target's states [r, m, n * H_t]."""
        return self.hidden_norm(self.fc(states))

    def read(self, feed: "Feed") -> None:
        """Take up entries of which nothing is drafted."""
        context = self.fused(feed.states)
        for layer in self.layers:
            feed.slots.write(layer.number, *layer.self_attn.keys(context, feed.slots))

    def begin(self, feed: "Feed", size: int) -> torch.Tensor:
        """Take up the new entries, and draft: states [R, n, H] of the places whose candidates are wanted."""
        tokens = nn.functional.pad(feed.last, (0, size - 1), value=self.config.mask_token_id)
        context, states = self.fused(feed.states), feed.embed(tokens)
        for layer in self.layers:
            read = layer.input_layernorm(states)
            keys = layer.self_attn.keys(torch.cat([context, read], 1), feed.slots)
            states = layer.after(states, read, keys, feed.slots)
        found = self.norm(states if self.config.sample_from_anchor else states[:, 1:])[:, : feed.number]
        feed.kept["scores"] = feed.head(found)
        return found

    def score(self, feed: "Feed", states: torch.Tensor, place: int, tokens: torch.Tensor) -> torch.Tensor:
        """[R, V_d] by normed states [R, H] and for DSpark by the tokens [R, 1] before."""
        scores = feed.kept["scores"][:, place]
        if not self.config.markov_rank:
            return scores
        before = self.markov_head.markov_w1(tokens[:, 0])
        if feed.threshold:
            seen = [states, before] if self.config.confidence_head_with_markov else [states]
            sure = self.confidence_head.proj(torch.cat(seen, -1)).sigmoid()
            feed.kept["sure"] = torch.cat([feed.kept["sure"], sure], 1) if place else sure
        return self.markov_head(feed, scores, states, before, place)


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

    def forward(
        self, feed: "Feed", scores: torch.Tensor, states: torch.Tensor, before: torch.Tensor, place: int
    ) -> torch.Tensor:
        """Scores [R, V_d] with what it adds, by states [R, H] and what the first table has for the tokens before."""
        if self.kind == "gated":
            before = self.gate_proj(torch.cat([states, before], -1)).sigmoid() * before
        elif self.kind == "rnn":
            memory = feed.kept["memory"] if place else torch.zeros_like(before)
            gate, new, out = self.joint_proj(torch.cat([memory, before, states], -1)).chunk(3, -1)
            feed.kept["memory"] = torch.lerp(new.tanh(), memory, gate.sigmoid())
            before = out.tanh()
        return torch.addmm(scores, before, self.markov_w2.weight.T)


class ConfidenceHead(nn.Module):
    """How likely a candidate is kept, by its place's state and perhaps by the token before."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        rank = config.markov_rank if config.confidence_head_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + rank, 1)
