"""Which keys new tokens see, and attention to keys that query heads share, without a copy of the keys for each head.

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
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_specx.common.architectures import ASK_FOR_MASKS


SLIDING, CHUNKED = "sliding_attention", "chunked_attention"
Mask = torch.Tensor | dict[str, torch.Tensor]  # [R, 1, q, S], or one for each kind of layer if a model has several
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


def columns_of_ring(newest: torch.Tensor, ring: int) -> torch.Tensor:
    """The numbers [R, ring] of columns in the slots of a ring, where these are the newest ones, [R, 1]."""
    return newest - (newest - torch.arange(ring, device=newest.device)) % ring


class Masks:
    """4D masks by position for one model: bool under sdpa, additive under eager attention."""

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config(decoder=True)
        self.additive = None if config._attn_implementation == "sdpa" else model.dtype
        self.window: int | None = getattr(config, "sliding_window", None)
        self.chunk: int | None = getattr(config, "attention_chunk_size", None)
        self.layers: list[str] = list(getattr(config, "layer_types", None) or ())
        self.kinds = sorted(set(self.layers))
        # how many keys a token sees in a layer of a kind, its own among them
        self.windows: dict[str, int] = {x: n for x, n in {SLIDING: self.window, CHUNKED: self.chunk}.items() if n}
        self.longest_window = max([self.windows.get(kind, 0) for kind in self.kinds or [SLIDING]])
        plain = self.additive is None and self.window is None and not self.kinds
        self.only_causal = plain and config.model_type not in ASK_FOR_MASKS

    def __call__(
        self,
        slots: torch.Tensor,
        pads: torch.Tensor | None,
        extent: int,
        holes: torch.Tensor | None = None,
        ring: int = 0,
    ) -> Mask:
        """For queries at slots [R, q], of `extent` leading slots without `pads` [R] and `holes` [R, S] bool.

        Layers with a window have a ring of slots, if `ring` is not 0 and less than `extent`.
        """
        keys, queries = torch.arange(extent, device=slots.device), slots[:, None, :, None]
        first: Any = 0 if pads is None else pads[:, None, None, None]
        known = None if pads is None else keys >= first
        if known is not None and holes is not None:
            known = known & ~holes[:, None, None]
        if not 0 < ring < extent:
            return self.between(queries, keys, known, first)
        columns = columns_of_ring(slots[:, -1:], ring)
        there = columns >= (0 if pads is None else pads[:, None])
        if holes is not None:
            there = there & ~holes.gather(1, columns.clamp(min=0))
        columns, there = columns[:, None, None], there[:, None, None]
        in_ring: Any = self.between(queries, columns, there, first)
        if not self.kinds:
            return in_ring
        whole: Any = self.between(queries, keys, known, first)
        return {kind: (in_ring if kind in self.windows else whole)[kind] for kind in self.kinds}

    def between(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        known: torch.Tensor | None = None,
        first: torch.Tensor | int = 0,
    ) -> Mask:
        """For queries and keys by their numbers in a text, counted alike; all arguments broadcast to [R, 1, q, S].

        A key is `known` if it is a token of the query's row, as all are if None; `first` is the row's first number.
        """
        visible = keys <= queries if known is None else known & (keys <= queries)
        masks = {}
        for kind in self.kinds or [SLIDING]:
            seen = visible
            if kind == SLIDING and self.window is not None:
                seen = visible & (keys > queries - self.window)
            elif kind == CHUNKED and self.chunk is not None:
                seen = visible & ((keys - first) // self.chunk == (queries - first) // self.chunk)
            masks[kind] = self._as_asked(seen)
        return masks if self.kinds else masks[SLIDING]

    def _as_asked(self, visible: torch.Tensor) -> torch.Tensor:
        if self.additive is None:
            return visible
        lowest = torch.finfo(self.additive).min
        return torch.zeros(visible.shape, dtype=self.additive, device=visible.device).masked_fill_(~visible, lowest)
