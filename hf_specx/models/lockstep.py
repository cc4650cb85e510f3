"""The lockstep layout: all rows advance alike, so transformers' own cache is cropped; what cannot be is put back.

States that cannot be cropped (recurrent, convolutional) are kept as they were before a forward.
"""

import copy
from collections.abc import Container, Iterator
from types import MethodType
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round

from .host_cache import HostCacheRunner
from .prompts import PreparedInputs
from .slots import KeysValues, has_columns, own_copy, self_attention


STATE_NAMES = ("conv_states", "recurrent_states")


class LockstepRunner(HostCacheRunner):
    """All rows have emitted equally many tokens, so a rollback crops the cache, and puts back states from before."""

    lockstep = True

    def __init__(self, prompt: PreparedInputs, draft_vocab_size: int | None = None):
        super().__init__(prompt, draft_vocab_size)
        self.cache = own_copy(self.cache)

    def prefill(self) -> Any:
        output = super().prefill()
        config = self.model.config.get_text_config(decoder=True)
        image_layers = getattr(config, "cross_attention_layers", None) or ()  # layers that attend to no text
        self.states = States(self_attention(self.cache), image_layers)
        return output

    def _rewind(self, batch: Batch, counts: list[int]) -> None:
        filled, wanted = self.num_filled_slots[batch.rows[0]], counts[0]
        reached = self.states.restore(wanted, filled)
        self.length -= filled - reached
        if reached < wanted:  # the states are of an earlier moment: feed again what was accepted since
            ahead = wanted - batch.counts[batch.rows[0]]
            missing = self._clamp_ids(batch.last(wanted - reached, ahead))
            self._feed(batch, missing, [reached] * len(counts), ahead, 1)
        for row in batch.rows:
            self.num_filled_slots[row] = wanted

    def _feed(
        self, batch: Batch, tokens: torch.Tensor, before: list[int], ahead: int, logits_to_keep: int
    ) -> torch.Tensor:
        self.states.save(before[0])
        return super()._feed(batch, tokens, before, ahead, logits_to_keep)

    def drop_rows(self, keep_indices: torch.Tensor) -> None:
        super().drop_rows(keep_indices)
        self.states.gather_rows(keep_indices)

    def _save_keys_values(self, done: Round) -> None:
        """As there, unless all rows end together, or the cache has more than keys and values of the whole text."""
        counts = done.batch.counts
        if done.finished and len(done.rows) == len(counts) and len(set(counts)) == 1:
            return  # the cache itself is handed over
        text = self_attention(self.cache)
        has_keys_only = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in text.layers)
        if type(text) is DynamicCache and has_keys_only and has_columns(text):
            super()._save_keys_values(done)

    def row_keys_values(self, index: int, row: int) -> Iterator[KeysValues]:
        end = self.width + self.num_filled_slots[row]
        layers: list[Any] = self_attention(self.cache).layers
        for layer in layers:
            yield layer.keys[index, :, :end].clone(), layer.values[index, :, :end].clone()

    def past_key_values(self, batch: Batch, emitted: int) -> Cache | None:
        """The cache itself if all rows ended together; else it is put together from keys, if there are all."""
        rows = len(batch.counts)
        if len(self.saved_keys_values) + len(self.last_rows) == rows:
            return super().past_key_values(batch, emitted)
        if self.saved_keys_values or self.num_rows < rows or len(set(batch.counts)) > 1:
            return None
        self._rewind(batch.view_at(batch.counts, list(range(rows))), [emitted - 1] * rows)
        return self.cache


class States:
    """Snapshots of what a cache cannot take back, by the number of emitted tokens it had read.

    Of transformers' cache these are recurrent states, unless convolutions are the only ones, which it crops. A cache
    of a class of the model's own is copied as a whole. Layers in `fixed` are never cropped.
    """

    def __init__(self, cache: Cache, fixed: Container[int] = ()):
        self.cache, self.fixed = cache, fixed
        self.copies_all = type(cache) is not DynamicCache
        linear = [x for x in getattr(cache, "layers", ()) if isinstance(x, LinearAttentionCacheLayerMixin)]
        is_recurrent = any(any(layer.is_recurrent_states_initialized.values()) for layer in linear)
        self.layers = linear if is_recurrent else []
        self.snapshots: dict[int, Any] = {}
        for layer in () if self.copies_all else cache.layers:
            if layer not in self.layers and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.update = MethodType(_update, layer)  # type: ignore[method-assign]

    def save(self, seen: int) -> None:
        """Copy the states, which have read `seen` emitted tokens, before a forward overwrites them."""
        if self.copies_all and not self.snapshots:
            self.snapshots[seen] = copy.deepcopy(self.cache)
        elif self.layers and not self.copies_all:
            self.snapshots[seen] = [_copy(getattr(layer, name)) for layer in self.layers for name in STATE_NAMES]

    def restore(self, wanted: int, seen: int) -> int:
        """Go back from `seen` to at most `wanted` emitted tokens; returns how many the cache has read then."""
        reached = wanted
        if wanted < seen and (self.copies_all or self.layers):
            reached = max(number for number in self.snapshots if number <= wanted)
            saved = self.snapshots[reached]
            if self.copies_all:
                vars(self.cache).update(vars(saved))
            else:
                owners = [(layer, name) for layer in self.layers for name in STATE_NAMES]
                for (layer, name), states in zip(owners, saved, strict=True):
                    setattr(layer, name, states)
        self.snapshots.clear()
        if not self.copies_all:
            self._crop(seen - reached)
        return reached

    def gather_rows(self, keep_indices: torch.Tensor) -> None:
        """Keep only the rows at indices `keep_indices` [R']."""
        for snapshot in self.snapshots.values():
            if self.copies_all:
                snapshot.batch_select_indices(keep_indices)
                continue
            for states in snapshot:
                states.update((n, x[keep_indices.to(x.device)]) for n, x in states.items() if x is not None)

    def _crop(self, tokens: int) -> None:
        """Take the last `tokens` off the keys of all layers."""
        for number, layer in enumerate(self.cache.layers):
            if number in self.fixed or not getattr(layer, "is_initialized", True):  # if it shares another's keys
                continue
            if layer not in self.layers:
                layer.crop(-tokens)  # type: ignore[union-attr]
            elif isinstance(layer, DynamicSlidingWindowLayer):
                DynamicSlidingWindowLayer.crop(layer, -tokens)
            elif isinstance(layer, DynamicLayer):
                DynamicLayer.crop(layer, -tokens)


def _copy(states: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {number: None if state is None else state.clone() for number, state in states.items()}


def _update(
    layer: DynamicSlidingWindowLayer, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's own `update`, cut to the columns that its mask has: 5.17 gives all that was recorded."""
    columns, _ = layer.get_mask_sizes(key_states.shape[-2])
    keys, values = type(layer).update(layer, key_states, value_states, *args, **kwargs)
    return keys[:, :, -columns:], values[:, :, -columns:]
