"""The keys and values of a finished call, in the columns that the host's own cache would have, for the next turn."""

import torch
from transformers.cache_utils import Cache, DynamicCache


Columns = list[tuple[torch.Tensor, torch.Tensor]]


def assemble(rows: dict[int, Columns], ends: list[int], length: int) -> Cache:
    """A cache of the host's own kind.

    Args:
        rows: for each of the B rows its keys and values [H, n, D], layer by layer, from the first column on.
        ends: columns of each row that are valid.
        length: columns of the cache; those behind the end of a row are zero, where the host has the keys of pads.
    """
    cache = DynamicCache()
    for number, layer in enumerate(rows[0]):
        keys, values = (x.new_zeros(len(ends), x.shape[0], length, x.shape[2]) for x in layer)
        for row, columns in rows.items():
            end = min(ends[row], length)
            keys[row, :, :end], values[row, :, :end] = (x[:, :end] for x in columns[number])
        cache.update(keys, values, number)
    return cache
