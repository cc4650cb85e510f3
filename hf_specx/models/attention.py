"""Attention of several new tokens of a row to keys that query heads share, without a copy of the keys for each head.

Under a mask the `sdpa` function of transformers repeats keys and values for every query head of a group (`repeat_kv`),
in each layer of each forward. Here heads that share keys are folded into the query length, since they are just more
queries to these keys. A bool mask is made additive once for each forward, where torch does it in each layer.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface


ALIGNED = 16  # entries between rows of a mask: with others CUDA's memory-efficient kernel copies it in each layer
IGNORED = {"output_attentions", "position_ids", "sliding_window", "use_cache"}  # by transformers' function as well


class GroupedAttention:
    """An attention function for transformers; a call that it cannot serve goes to transformers' own `sdpa`."""

    def __init__(self) -> None:
        # by mask, then group size and dtype: the mask of one forward serves all its layers
        self.tiles: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """[R, q, n * H, D'] of queries [R, n * H, q, D], keys [R, H, S, D] and values [R, H, S, D'], without weights.

        The mask [R or 1, 1, q, S] is bool or additive; n is the `num_key_value_groups` of the module.
        """
        group = getattr(module, "num_key_value_groups", 1)
        rows, heads, count, _ = query.shape
        if (
            heads != group * key.shape[1]
            or attention_mask is None
            or attention_mask.shape[1:-1] != (1, count)
            or (not kwargs.keys() <= IGNORED and any(kwargs[name] is not None for name in kwargs.keys() - IGNORED))
        ):
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
            )
        folded = torch.nn.functional.scaled_dot_product_attention(
            query if group == 1 else query.reshape(rows, -1, group * count, query.shape[3]),
            key,
            value,
            attn_mask=self._tiled(attention_mask, group, query.dtype),
            dropout_p=dropout,
            scale=scaling,
        )
        if group == 1:
            return folded.transpose(1, 2).contiguous(), None
        output = folded.unflatten(2, (group, count)).permute(0, 3, 1, 2, 4)  # [R, q, H, n, D']
        return output.flatten(2, 3).contiguous(), None

    def _tiled(self, mask: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
        """[R or 1, 1, n * q, S], additive as torch would make it in every layer."""
        if torch.compiler.is_dynamo_compiling():  # the compiler finds that all layers need the same
            return tiled(mask, group, dtype)
        tiles = self.tiles.setdefault(mask, {})
        if (group, dtype) not in tiles:
            tiles[group, dtype] = tiled(mask, group, dtype)
        return tiles[group, dtype]


def tiled(mask: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask [R or 1, 1, q, S], additive and repeated for folded queries: [R or 1, 1, n * q, S]."""
    rows, _, count, extent = mask.shape
    width = -(-extent // ALIGNED) * ALIGNED
    tile = torch.zeros(rows, group, count, width, dtype=dtype, device=mask.device)[..., :extent]
    tile = tile.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else tile.copy_(mask)
    return tile.flatten(1, 2)[:, None]


TRACED = GroupedAttention()
ACTIVE: ContextVar[GroupedAttention | None] = ContextVar("ACTIVE", default=None)  # of this thread or asyncio task
LOCK = threading.Lock()


class Switch:
    """Stands in the registry of transformers for the function `patched` while there are `uses`.

    Contexts that use it have `ACTIVE`, and others, as plain `generate` in another thread, what was there before. While
    torch compiles it is `TRACED` or that: what a user compiles serves plain forwards as well.
    """

    def __init__(self) -> None:
        self.patched: Any = sdpa_attention_forward
        self.uses = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # which cannot trace a `ContextVar`
            return (TRACED if self.traces() else self.patched)(*args, **kwargs)
        return (ACTIVE.get() or self.patched)(*args, **kwargs)

    @torch.compiler.assume_constant_result
    def traces(self) -> bool:
        return ACTIVE.get() is TRACED


SWITCH = Switch()  # always the same, since what a user compiles is made anew for another function


@contextlib.contextmanager
def grouped_queries(traced: bool = False) -> Iterator[None]:
    """A context in which `sdpa` folds groups of query heads; if a user has replaced `sdpa`, nothing is changed.

    Torch may compile this into forwards that are `traced`, and must not into those that a user compiles.
    """
    place: Any = AttentionInterface._global_mapping
    with LOCK:
        found = beneath(ALL_ATTENTION_FUNCTIONS["sdpa"])
        usual = found[-1] is sdpa_attention_forward
        if usual and SWITCH not in found:
            SWITCH.patched = found[0]
            place["sdpa"] = SWITCH
        SWITCH.uses += usual
    if not usual:
        yield
        return
    before = ACTIVE.set(TRACED if traced else GroupedAttention())
    try:
        yield
    finally:
        ACTIVE.reset(before)
        with LOCK:
            SWITCH.uses -= 1
            # another copy of this file, as each published pair has its own, may have put its switch over ours
            while getattr(place["sdpa"], "uses", None) == 0:
                place["sdpa"] = place["sdpa"].patched


def beneath(found: Any) -> list[Any]:
    """What lies in a place, from the top: switches of this copy and of others, and last what they are put over."""
    layers = [found]
    while isinstance(getattr(layers[-1], "uses", None), int):
        layers.append(layers[-1].patched)
    return layers
