"""EAGLE-3, which drafts token by token from its own states, and P-EAGLE, which does so from masks in one forward."""

from typing import Any

import torch
from torch import nn

from .body import Body, Found
from .config import HeadConfig
from .layers import Entries, HeadLayer, norm


class Eagle(Body):
    """Entry i of a row is token i + 1 with the target's states at i, or with the head's own while it drafts.

    Its first layer reads the token's embedding beside them; what it adds to is the state. It predicts token i + 2.
    """

    layers: Any
    fc_norm: Any

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config, width = config, config.target_hidden_size * len(config.layer_ids or ())
        self.chained = config.kind == "eagle3"
        self.fc = nn.Linear(width, config.hidden_size, config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = norm(config, width)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(norm(config, config.target_hidden_size) for _ in config.layer_ids or ())
        joined = [2 * config.hidden_size] + [config.hidden_size] * (config.num_hidden_layers - 1)
        self.layers = nn.ModuleList(HeadLayer(config, number, width) for number, width in enumerate(joined))
        self.layers[0].hidden_norm = norm(config)
        self.norm = norm(config)
        if config.kind == "peagle":
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, width))

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """[r, m, H] of the target's states [r, m, n * H_t]."""
        if self.config.fc_norm:
            parts = states.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            states = torch.cat([each(part) for each, part in zip(self.fc_norm, parts, strict=True)], -1)
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        return self.fc(states)

    def extra(self, number: int) -> int:
        """Masks behind the new entries: P-EAGLE has one for each candidate but the first."""
        return 0 if self.chained else number - 1

    def read(self, entries: Entries, embedded: Any, states: torch.Tensor) -> None:
        self(entries, embedded, self.fused(states))

    def begin(self, entries: Entries, embedded: Any, states: torch.Tensor, newest: Any, number: int) -> Found:
        fused, masks = self.fused(states), embedded.shape[1] - states.shape[1]
        if masks:
            fused = torch.cat([fused, self.fused(self.mask_hidden).expand(len(fused), masks, -1)], 1)
            behind = torch.arange(states.shape[1], embedded.shape[1], device=newest.device)
            newest = torch.cat([newest, behind.expand(len(newest), -1)], 1)
        found = self(entries, embedded, fused)
        return self._noted(found.gather(1, newest[..., None].expand(-1, -1, found.shape[2])))

    def next(self, entries: Entries, embedded: Any, state: Any) -> Found:
        return self._noted(self(entries, embedded, state))

    def _noted(self, states: torch.Tensor) -> Found:
        """States that are scored, by default behind the last norm, and what the next entry begins with."""
        normed = self.norm(states)
        return normed if self.config.use_last_layernorm else states, normed if self.config.norm_output else states

    def forward(self, entries: Entries, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[r, q, H] behind the last layer, of embedded tokens and fused states [r, q, H]."""
        first = self.layers[0]
        normed = first.hidden_norm(states)
        read = torch.cat([first.input_layernorm(embedded), normed], -1)
        residual = normed if self.config.norm_before_residual else states
        states = first.after(residual, read, first.self_attn.keys(read, entries), entries)
        for layer in self.layers[1:]:
            states = layer(states, entries)
        return states
