"""EAGLE-3, which drafts token by token from its own states, and P-EAGLE, which does so from masks in one forward."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .config import HeadConfig
from .layers import HeadLayer, norm


if TYPE_CHECKING:
    from .feed import Feed


class Eagle(nn.Module):
    """Entry i of a row is token i + 1 with the target's states at i, or with the head's own while it drafts.

    Its first layer reads the token's embedding beside them; what it adds to is the state. It predicts token i + 2.
    """

    layers: Any
    fc_norm: Any
    sees_ahead = False

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config, width = config, config.target_hidden_size * len(config.layer_ids or ())
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

    def read(self, feed: "Feed") -> None:
        """Take up entries of which nothing is drafted."""
        self(feed, feed.tokens, self.fused(feed.states))

    def extra(self, number: int) -> int:
        """Masks behind the new entries: P-EAGLE has one for each candidate but the first."""
        return number - 1 if self.config.kind == "peagle" else 0

    def begin(self, feed: "Feed", masks: int) -> torch.Tensor:
        """Take up the new entries, and draft: [R, n, H] normed states behind the last one and behind each mask."""
        tokens, states, index = feed.tokens, self.fused(feed.states), feed.newest
        if masks:
            tokens = nn.functional.pad(tokens, (0, masks), value=self.config.mask_token_id)
            states = torch.cat([states, self.fused(self.mask_hidden).expand(len(states), masks, -1)], 1)
            behind = torch.arange(tokens.shape[1] - masks, tokens.shape[1], device=index.device)
            index = torch.cat([index, behind.expand(len(index), -1)], 1)
        found = self(feed, tokens, states)
        return self._noted(feed, found.gather(1, index[..., None].expand(-1, -1, found.shape[2])))

    def next(self, feed: "Feed", tokens: torch.Tensor) -> torch.Tensor:
        """[R, 1, H], behind candidates [R, 1]."""
        return self._noted(feed, self(feed, tokens, feed.kept["state"]))

    def score(self, feed: "Feed", states: torch.Tensor, place: int, tokens: torch.Tensor) -> torch.Tensor:
        """[R, V_d] by normed states [R, H]."""
        return feed.head(states)

    def _noted(self, feed: "Feed", states: torch.Tensor) -> torch.Tensor:
        """States behind the last norm; what the next entry begins with is kept."""
        normed = self.norm(states)
        feed.kept["state"] = normed if self.config.norm_output else states
        return normed

    def forward(self, feed: "Feed", tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        first, slots = self.layers[0], feed.slots
        normed = first.hidden_norm(states)
        read = torch.cat([first.input_layernorm(feed.embed(tokens)), normed], -1)
        residual = normed if self.config.norm_before_residual else states
        states = first.after(residual, read, first.self_attn.keys(read, slots), slots)
        for layer in self.layers[1:]:
            states = layer(states, slots)
        return states
