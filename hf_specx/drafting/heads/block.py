"""DFlash and DSpark, which draft a block of tokens in one forward that sees the target's states at all layers."""

from typing import Any

import torch
from torch import nn

from .config import HeadConfig
from .layers import HeadCache, HeadLayer, rms_norm
from .network import AdjustedLogits, HeadNetwork, StepOutput


class BlockLayer(HeadLayer):
    """A layer whose entries of a block see the context as well."""

    def forward(self, states: torch.Tensor, context: torch.Tensor, cache: HeadCache) -> torch.Tensor:  # type: ignore[override]
        """[R, q, H] of a block's states [R, q, H], and of the context [R, m, H] that comes in with it."""
        normed = self.input_layernorm(states)
        keys_values = self.self_attn.keys_values(torch.cat([context, normed], 1), cache)
        return self.attention_and_mlp(states, normed, keys_values, cache)


class Block(HeadNetwork):
    """Context entry i is the target's state at token i, of which each layer makes keys and values, and nothing else.

    A block is the last token and masks behind it; its entries see all of the context and each other.
    """

    layers: Any
    markov_head: "MarkovHead"
    drafts_block = True
    layer_class: type[HeadLayer] = BlockLayer

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.block_size = config.block_size or 0
        self.max_candidates = self.block_size - (not config.sample_from_anchor)
        width = config.target_hidden_size * len(config.layer_ids or ())
        self.fc = nn.Linear(width, config.hidden_size, config.fc_bias)
        self.hidden_norm = rms_norm(config)
        self.norm = rms_norm(config)
        self.layers = nn.ModuleList(self.layer_class(config, number) for number in range(config.num_hidden_layers))
        self.adjusts_logits = config.markov_rank > 0
        if self.adjusts_logits:
            self.markov_head = MarkovHead(config)
        if config.confidence_head:
            markov_width = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(config.hidden_size + markov_width, 1)})

    def num_draft_entries(self, num_candidates: int) -> int:
        """The whole block, as it was trained, however many candidates are wanted."""
        return self.block_size

    def fuse_target_states(self, states: torch.Tensor) -> torch.Tensor:
        """[r, m, H] of the target's states [r, m, n * H_t]."""
        return self.hidden_norm(self.fc(states))

    def append_context(self, cache: HeadCache, embedded: Any, states: torch.Tensor) -> None:
        context = self.fuse_target_states(states)
        for layer in self.layers:
            cache.write(layer.number, *layer.self_attn.keys_values(context, cache))

    def first_step(
        self, cache: HeadCache, embedded: Any, states: torch.Tensor, newest: Any, num_candidates: int
    ) -> StepOutput:
        context = self.fuse_target_states(states)
        block = embedded
        for layer in self.layers:
            block = layer(block, context, cache)
        proposing = block if self.config.sample_from_anchor else block[:, 1:]
        return self.norm(proposing)[:, :num_candidates], None

    def adjust_logits(
        self, logits: Any, states: torch.Tensor, previous: torch.Tensor, carried: Any, with_confidence: bool
    ) -> AdjustedLogits:
        previous_embedded = confidence = None
        confidence_inputs = [states]
        if self.config.markov_rank:
            previous_embedded = self.markov_head.markov_w1(previous[:, 0])
            if self.config.confidence_head_with_markov:
                confidence_inputs.append(previous_embedded)
        if with_confidence:
            confidence = self.confidence_head["proj"](torch.cat(confidence_inputs, -1)).sigmoid()
        if previous_embedded is not None:
            logits, carried = self.markov_head(logits, states, previous_embedded, carried)
        return logits, carried, confidence


class MarkovHead(nn.Module):
    """What the previous token adds to the logits of a candidate: its row of `markov_w1` times `markov_w2`.

    The row may be gated by the state of the candidate, or by that of a recurrent unit.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        rank, self.kind = config.markov_rank, config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * rank, 3 * rank)

    def forward(self, logits: torch.Tensor, states: torch.Tensor, previous: torch.Tensor, memory: Any) -> StepOutput:
        """Logits [R, V_d] with what it adds, and the memory [R, r] behind this candidate.

        Args:
            logits: [R, V_d], of the candidate.
            states: [R, H], of the same.
            previous: [R, r], the row of `markov_w1` for the previous token.
            memory: [R, r], behind the candidate before; None for the first one.
        """
        if self.kind == "gated":
            previous = self.gate_proj(torch.cat([states, previous], -1)).sigmoid() * previous
        elif self.kind == "rnn":
            memory = torch.zeros_like(previous) if memory is None else memory
            gate, new, output = self.joint_proj(torch.cat([memory, previous, states], -1)).chunk(3, -1)
            memory = torch.lerp(new.tanh(), memory.to(new.dtype), gate.sigmoid())
            previous = output.tanh()
        return torch.addmm(logits.to(previous.dtype), previous, self.markov_w2.weight.T), memory
