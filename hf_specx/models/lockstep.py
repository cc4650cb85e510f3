"""The lockstep layout: all rows advance by equally many tokens, so that a rollback crops transformers' own cache.

States that cannot be cropped (recurrent, convolutional) are copied before a forward and restored by a rollback.
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

from .prompts import PreparedInputs
from .slots import KeysValues, has_columns, own_copy, self_attention
from .transformers_cache import TransformersCacheRunner


STATE_NAMES = ("conv_states", "recurrent_states")


class LockstepRunner(TransformersCacheRunner):
    """A runner whose rows have all emitted equally many tokens; a rollback crops the cache and restores states."""

    lockstep = True

    def __init__(self, prompt: PreparedInputs, draft_vocab_size: int | None = None):
        super().__init__(prompt, draft_vocab_size)
        self.cache = own_copy(self.cache)

    def prefill(self) -> Any:
        output = super().prefill()
        config = self.model.config.get_text_config(decoder=True)
        image_layers = getattr(config, "cross_attention_layers", None) or ()  # layers that attend to no text
        self.states = CacheSnapshots(self_attention(self.cache), image_layers)
        return output

    def _rewind(self, batch: Batch, counts: list[int]) -> None:
        num_filled, count = self.num_filled_slots[batch.rows[0]], counts[0]
        num_restored = self.states.restore(count, num_filled)
        self.length -= num_filled - num_restored
        if num_restored < count:  # the states are of an earlier moment: feed again what was accepted since
            ahead = count - batch.counts[batch.rows[0]]
            accepted = self._clamp_ids(batch.last(count - num_restored, ahead))
            self._feed(batch, accepted, [num_restored] * len(counts), ahead, 1)
        for row in batch.rows:
            self.num_filled_slots[row] = count

    def _feed(
        self, batch: Batch, tokens: torch.Tensor, before: list[int], ahead: int, logits_to_keep: int
    ) -> torch.Tensor:
        self.states.save(before[0])
        return super()._feed(batch, tokens, before, ahead, logits_to_keep)

    def gather_rows(self, keep_indices: torch.Tensor) -> None:
        super().gather_rows(keep_indices)
        self.states.gather_rows(keep_indices)

    def _save_keys_values(self, round_: Round) -> None:
        """As in `ModelRunner`, if not all rows end together, and the cache has keys and values of the text alone."""
        counts = round_.batch.counts
        if round_.finished and len(round_.rows) == len(counts) and len(set(counts)) == 1:
            return  # the cache itself is handed over
        text_cache = self_attention(self.cache)
        has_keys_only = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in text_cache.layers)
        if type(text_cache) is DynamicCache and has_keys_only and has_columns(text_cache):
            super()._save_keys_values(round_)

    def row_keys_values(self, index: int, row: int) -> Iterator[KeysValues]:
        end = self.width + self.num_filled_slots[row]
        layers: list[Any] = self_attention(self.cache).layers
        for layer in layers:
            yield layer.keys[index, :, :end].clone(), layer.values[index, :, :end].clone()

    def past_key_values(self, batch: Batch, num_columns: int) -> Cache | None:
        """The cache itself if all rows ended together; else one made of their keys, None if some are lost."""
        rows = len(batch.counts)
        if len(self.saved_keys_values) + len(self.last_rows) == rows:
            return super().past_key_values(batch, num_columns)
        if self.saved_keys_values or self.num_rows < rows or len(set(batch.counts)) > 1:
            return None
        self._rewind(batch.view_at(batch.counts, list(range(rows))), [num_columns - 1] * rows)
        return self.cache


class CacheSnapshots:
    """Rolls back a cache of transformers or of a model: crops what can be cropped, and restores copies of the rest.

    What cannot be cropped of transformers' cache are recurrent states, and convolutional ones beside these (alone it
    crops them). A cache of a class of the model's own is copied as a whole. Layers in `fixed` are never cropped.

    Attributes:
        snapshots: copies of the states, by how many emitted tokens these had been computed from.
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

    def save(self, num_computed: int) -> None:
        """Copy the states, computed from so many emitted tokens, before a forward overwrites them."""
        if self.copies_all and not self.snapshots:
            self.snapshots[num_computed] = copy.deepcopy(self.cache)
        elif self.layers and not self.copies_all:
            states = [_copy(getattr(layer, name)) for layer in self.layers for name in STATE_NAMES]
            self.snapshots[num_computed] = states

    def restore(self, count: int, num_computed: int) -> int:
        """Go back from `num_computed` emitted tokens to `count`, or to fewer where a snapshot is older.

        Returns:
            How many emitted tokens the cache is computed from now.
        """
        num_restored = count
        if count < num_computed and (self.copies_all or self.layers):
            num_restored = max(number for number in self.snapshots if number <= count)
            snapshot = self.snapshots[num_restored]
            if self.copies_all:
                vars(self.cache).update(vars(snapshot))
            else:
                owners = [(layer, name) for layer in self.layers for name in STATE_NAMES]
                for (layer, name), states in zip(owners, snapshot, strict=True):
                    setattr(layer, name, states)
        self.snapshots.clear()
        if not self.copies_all:
            self._crop(num_computed - num_restored)
        return num_restored

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
