"""The keys and values of a finished call as a cache of transformers, which the next call can continue."""

import warnings

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache


Columns = list[tuple[torch.Tensor, torch.Tensor]]
NOT_FILLED = (
    "past_key_values= was not filled with this text: its rows ended at different steps, and its states or windows "
    "cannot be put together from them, or it is spread over ranks; pass the whole text without it in the next turn."
)


def assemble(rows: dict[int, Columns], ends: list[int], length: int, crossed: Columns) -> Cache:
    """A `DynamicCache`, or an `EncoderDecoderCache` of two.

    Args:
        rows: for each of the B rows its keys and values [H, n, D], layer by layer, from the first column on.
        ends: for each row how many of its columns are valid.
        length: columns of the cache. After a row's end they are zero, where `generate` would have keys of pads.
        crossed: keys and values [B, H, S, D] of cross-attention, layer by layer; empty without an encoder.
    """
    cache = DynamicCache()
    for number, layer in enumerate(rows[0]):
        keys, values = (x.new_zeros(len(ends), x.shape[0], length, x.shape[2]) for x in layer)
        for row, columns in rows.items():
            end = min(ends[row], length)
            keys[row, :, :end], values[row, :, :end] = (x[:, :end] for x in columns[number])
        cache.update(keys, values, number)
    if not crossed:
        return cache
    encoded = DynamicCache()
    for number, (keys, values) in enumerate(crossed):
        encoded.update(keys, values, number)
    return EncoderDecoderCache(cache, encoded)


def columns_of(cache: Cache) -> Columns:
    """Keys and values [R, H, n, D] of a cache of transformers, layer by layer."""
    return [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[misc, union-attr]


def fill(user_cache: Cache, past: Cache | None) -> Cache | None:
    """Fill the user's own cache as `generate` would; without a `past`, warn and leave it as it is.

    Returns:
        `user_cache`, or None where it was not filled.
    """
    if past is None:
        warnings.warn(NOT_FILLED, UserWarning, stacklevel=2)
        return None
    vars(user_cache).update(vars(past))
    return user_cache
