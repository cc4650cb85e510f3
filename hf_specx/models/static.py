"""Key-value buffers of fixed size for compiled forwards, and the sizes that there are.

A compiled forward is made for one batch, one capacity and one query length. So that few of them serve all calls, sizes
are rounded up, and idle rows stay until there are as many as others.
"""

import threading
import weakref
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin


Buffers = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values [rows, H, capacity, D] of each layer
EXACT = 9  # query lengths up to this one are not rounded up


def row_bucket(rows: int) -> int:
    """The next power of two."""
    return 1 << (rows - 1).bit_length()


def capacity_bucket(slots: int) -> int:
    """The next power of two from 64 on, or three quarters of it."""
    whole = max(64, 1 << (slots - 1).bit_length())
    return whole * 3 // 4 if whole > 64 and slots <= whole * 3 // 4 else whole


def length_bucket(count: int) -> int:
    """The query length itself up to `EXACT`; beyond, up to a quarter more: four sizes between powers of two."""
    step = max(1, 1 << (count - 2).bit_length() >> 3) if count > EXACT else 1
    return -(-count // step) * step


class StaticLayer(CacheLayerMixin):
    """One layer for one forward: new tokens are written in their slots, and all slots are read."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor):
        """
        Args:
            keys, values: [R, H, C, D].
            slots: [R, q] int64, where the tokens of each row go.
        """
        super().__init__()
        self.keys, self.values, self.slots, self.is_initialized = keys, values, slots, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write key and value states [R, H, q, D] and return all slots [R, H, C, D]."""
        assert self.keys is not None
        assert self.values is not None
        rows = torch.arange(len(key_states), device=key_states.device)[:, None]
        self.keys[rows, :, self.slots] = key_states.transpose(1, 2)
        self.values[rows, :, self.slots] = value_states.transpose(1, 2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        assert self.keys is not None
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0  # positions and masks are given

    def get_max_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2]


class Pool:
    """Buffers of one model by size, kept for later calls, since captured graphs read and write at their addresses.

    Buffers are free again once the object that took them no longer exists.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: list[tuple[tuple[int, int], weakref.ref[object], Buffers]] = []

    def take(self, owner: object, rows: int, capacity: int, like: Buffers) -> Buffers:
        """Buffers of zeros for `owner`, with the layers, heads and dtypes of `like`.

        Zeros, because a masked slot still takes part with weight 0, and 0 * NaN is NaN.
        """
        size = rows, capacity
        with self.lock:
            # idle ones of another capacity are not kept: they may be as large as the model
            # nor those that its owner has outgrown, but for the last ones, which it still copies from
            gone = None, owner
            self.known = [x for x in self.known if x[2] is like or x[1]() not in gone or x[0][1] == capacity]
            for number, (known, user, buffers) in enumerate(self.known):
                if known == size and user() is None:
                    self.known[number] = size, weakref.ref(owner), buffers
                    break
            else:
                buffers = [tuple(_zeros(x, rows, capacity) for x in layer) for layer in like]  # type: ignore[misc]
                self.known.append((size, weakref.ref(owner), buffers))
        for layer in buffers:
            for buffer in layer:
                buffer.zero_()
        return buffers


def _zeros(like: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    with torch.inference_mode(False):  # what is made in that mode could not be written outside of it, by a later call
        made = like.new_zeros(rows, like.shape[1], capacity, like.shape[3])
    torch._dynamo.mark_static_address(made, guard=False)  # captured graphs then write in place
    return made


def move(source: Buffers, target: Buffers, index: torch.Tensor | None) -> None:
    """Copy the rows at `index` [R] of buffers, all that fit if None, to the first rows of others or of these."""
    rows, slots = (min(old, new) for old, new in zip(source[0][0].shape[::2], target[0][0].shape[::2], strict=True))
    for old, new in zip(source, target, strict=True):
        for x, y in zip(old, new, strict=True):
            kept = x[:rows, :, :slots] if index is None else x[index.to(x.device), :, :slots]
            y[: len(kept), :, :slots] = kept
