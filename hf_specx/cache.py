"""Key-value storage with each token at the slot of its position; the only module that knows the host's cache.

A forward says where its tokens go and how many slots are visible. Whatever lies beyond a row's length is hidden by the
mask and overwritten later, so rolling back costs nothing: the invariant is kept by the lengths alone.

The invariant: after a round the target's cache holds exactly the row's prompt and emitted tokens but the last; the
draft's holds a prefix of the same tokens, at most two missing, fed at its next step; nothing else is visible to
attention.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class Slots:
    """Where the tokens of the coming forward are written, shared by all layers of a cache.

    Attributes:
        index: [B, q] int64, the slot of each token; pads go to the spare slot behind the capacity.
        start: the first slot, where all rows write the same run of slots; None where they differ.
        extent: how many leading slots attention may see.
    """

    def __init__(self) -> None:
        self.index = torch.empty(0)
        self.start: int | None = None
        self.extent = 0
        self.capacity = 0


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, H, capacity + 1, D], written in place."""

    is_sliding = False

    def __init__(self, slots: Slots):
        super().__init__()
        self.slots = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # zeros, not uninitialised memory: a masked slot still takes part with weight 0, and 0 * NaN is NaN
        self.keys, self.values = (self._allocate(x) for x in (key_states, value_states))
        self.is_initialized = True

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(like.shape[0], like.shape[1], self.slots.capacity + 1, like.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write key and value states [B, H, q, D] and return the visible slots [B, H, extent, D]."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] <= self.slots.capacity:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)
        return self._written(self.keys, key_states), self._written(self.values, value_states)

    def _grown(self, stored: torch.Tensor) -> torch.Tensor:
        grown = self._allocate(stored)
        grown[:, :, : stored.shape[2]] = stored
        return grown

    def _written(self, stored: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
        assert stored is not None
        if self.slots.start is None:
            rows = torch.arange(len(states), device=states.device)[:, None]
            stored[rows, :, self.slots.index.to(states.device)] = states.transpose(1, 2)
        else:
            stored[:, :, self.slots.start : self.slots.start + states.shape[2]] = states
        return stored[:, :, : self.slots.extent]

    def select(self, places: torch.Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[places.to(self.keys.device)], self.values[places.to(self.values.device)]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.extent, 0

    def get_seq_length(self) -> int:
        return 0 if self.slots.start is None else self.slots.start

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):
    """One `RaggedLayer` a layer, created as the model asks for them."""

    def __init__(self, num_hidden_layers: int):
        self.slots = Slots()
        super().__init__(layers=[RaggedLayer(self.slots) for _ in range(num_hidden_layers)])

    def aim(self, positions: torch.Tensor, extent: int, start: int | None) -> None:
        """Say where the next forward writes.

        Args:
            positions: [B, q] int64, the slot of each token; negative for pads.
            extent: slots that attention may see; the capacity at least doubles where it has to grow.
            start: the first slot where all rows write the same run of slots, else None.
        """
        if extent > self.slots.capacity:
            self.slots.capacity = max(extent, 2 * self.slots.capacity)
        self.slots.extent, self.slots.start = extent, start
        self.slots.index = torch.where(positions < 0, self.slots.capacity, positions)

    def select(self, places: torch.Tensor) -> None:
        """Keep only the rows at places [R']."""
        for layer in self.layers:
            assert isinstance(layer, RaggedLayer)
            layer.select(places)
