"""EAGLE-3, which drafts token by token from its own states, and P-EAGLE, which does so from masks in one forward."""

from typing import Any

import torch
from torch import nn

from .config import HeadConfig
from .layers import HeadCache, HeadLayer, rms_norm
from .network import HeadNetwork, StepOutput


class Eagle(HeadNetwork):
    """Entry i of a row is token i + 1 with the target's states at i, or with the head's own while it drafts.

    Its first layer reads the token's embedding beside them; what it adds to is the state. It predicts token i + 2.
    """

    layers: Any
    fc_norm: Any

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.autoregressive = self.grows_trees = config.kind == "eagle3"
        width = config.target_hidden_size * len(config.layer_ids or ())
        self.fc = nn.Linear(width, config.hidden_size, config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = rms_norm(config, width)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(rms_norm(config, config.target_hidden_size) for _ in config.layer_ids or ())
        input_widths = [2 * config.hidden_size] + [config.hidden_size] * (config.num_hidden_layers - 1)
        self.layers = nn.ModuleList(
            HeadLayer(config, number, input_width) for number, input_width in enumerate(input_widths)
        )
        self.layers[0].hidden_norm = rms_norm(config)
        self.norm = rms_norm(config)
        if config.kind == "peagle":
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, width))

    def fuse_target_states(self, states: torch.Tensor) -> torch.Tensor:
        """[r, m, H] of the target's states [r, m, n * H_t]."""
        if self.config.fc_norm:
            by_layer = states.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            normed = [norm(state) for norm, state in zip(self.fc_norm, by_layer, strict=True)]
            states = torch.cat(normed, -1)
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        return self.fc(states)

    def num_draft_entries(self, num_candidates: int) -> int:
        """Masks behind the context: P-EAGLE has one for each candidate but the first."""
        return 0 if self.autoregressive else num_candidates - 1

    def append_context(self, cache: HeadCache, embedded: Any, states: torch.Tensor) -> None:
        self(cache, embedded, self.fuse_target_states(states))

    def first_step(
        self, cache: HeadCache, embedded: Any, states: torch.Tensor, newest: Any, num_candidates: int
    ) -> StepOutput:
        fused = self.fuse_target_states(states)
        num_masks = embedded.shape[1] - states.shape[1]
        predicting = newest
        if num_masks:
            mask_states = self.fuse_target_states(self.mask_hidden).expand(len(fused), num_masks, -1)
            fused = torch.cat([fused, mask_states], 1)
            masks = torch.arange(states.shape[1], embedded.shape[1], device=newest.device)
            predicting = torch.cat([newest, masks.expand(len(newest), -1)], 1)
        output = self(cache, embedded, fused)
        return self._step_output(output.gather(1, predicting[..., None].expand(-1, -1, output.shape[2])))

    def next_step(self, cache: HeadCache, embedded: Any, carried: Any) -> StepOutput:
        return self._step_output(self(cache, embedded, carried))

    def _step_output(self, states: torch.Tensor) -> StepOutput:
        """The states that logits are computed of, by default behind the last norm, and the one that is fed back."""
        normed = self.norm(states)
        scored = normed if self.config.use_last_layernorm else states
        fed_back = normed if self.config.norm_output else states
        return scored, fed_back

    def forward(self, cache: HeadCache, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[r, q, H] behind the last layer, of embedded tokens and fused states [r, q, H]."""
        first = self.layers[0]
        normed = first.hidden_norm(states)
        inputs = torch.cat([first.input_layernorm(embedded), normed], -1)
        residual = normed if self.config.norm_before_residual else states
        states = first.attention_and_mlp(residual, inputs, first.self_attn.keys_values(inputs, cache), cache)
        for layer in self.layers[1:]:
            states = layer(states, cache)
        return states
