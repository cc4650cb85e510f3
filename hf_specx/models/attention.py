"""Masks by position (`Masks`), and attention in which query heads that share keys need no copies of them.

Under a mask the `sdpa` function of transformers repeats keys and values for every query head of a group (`repeat_kv`),
in each layer of each forward. Here heads that share keys are folded into the query length, since they are just more
queries to these keys. A bool mask is made additive once for each forward, where torch does it in each layer.
"""

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_specx.common.architectures import ASK_FOR_MASKS


# one for each copy of this file, as a published pair has its own
OWN_NAMESPACE = f"hf_specx_{hashlib.sha256(__name__.encode()).hexdigest()[:16]}"
SLIDING, CHUNKED = "sliding_attention", "chunked_attention"
Mask = torch.Tensor | dict[str, torch.Tensor]  # [R, 1, q, S], or one for each kind of layer if a model has several
ALIGNED = 16  # entries between rows of a mask: with others CUDA's memory-efficient kernel copies it in each layer
IGNORED = {"output_attentions", "position_ids", "sliding_window", "use_cache"}  # by transformers' function as well


def grouped_attention(
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

    The mask [R or 1, 1, q, S] is bool or additive; n is the `num_key_value_groups` of the module. A call with anything
    else goes to transformers' own function.
    """
    group = getattr(module, "num_key_value_groups", 1)
    rows, heads, count, _ = query.shape
    if (
        heads != group * key.shape[1]
        or attention_mask is None
        or attention_mask.shape[1:-1] != (1, count)
        or (not kwargs.keys() <= IGNORED and any(kwargs[name] is not None for name in kwargs.keys() - IGNORED))
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    if torch.compiler.is_compiling():  # the compiler finds that all layers need the same
        mask = TILED(attention_mask, group, query.dtype)
    else:  # the mask of one forward serves all its layers
        tiles = vars(attention_mask).setdefault("specx_tiles", {})
        if (group, query.dtype) not in tiles:
            tiles[group, query.dtype] = tiled(attention_mask, group, query.dtype)
        mask = tiles[group, query.dtype]
    folded = torch.nn.functional.scaled_dot_product_attention(
        query if group == 1 else query.reshape(rows, -1, group * count, query.shape[3]),
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
    )
    if group == 1:
        return folded.transpose(1, 2).contiguous(), None
    output = folded.unflatten(2, (group, count)).permute(0, 3, 1, 2, 4)  # [R, q, H, n, D']
    return output.flatten(2, 3).contiguous(), None


def tiled(mask: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """A mask [R or 1, 1, q, S], additive and repeated for folded queries: [R or 1, 1, n * q, S]."""
    rows, _, count, kv_length = mask.shape
    width = -(-kv_length // ALIGNED) * ALIGNED
    tile = torch.zeros(rows, group, count, width, dtype=dtype, device=mask.device)[..., :kv_length]
    tile = tile.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else tile.copy_(mask)
    return tile.flatten(1, 2)[:, None]


if not hasattr(getattr(torch.ops, OWN_NAMESPACE), "tiled"):  # else it was registered when this file was loaded before
    torch.library.define(f"{OWN_NAMESPACE}::tiled", "(Tensor mask, int group, ScalarType dtype) -> Tensor")
    torch.library.impl(f"{OWN_NAMESPACE}::tiled", "CompositeImplicitAutograd", tiled)
TILED: Any = getattr(torch.ops, OWN_NAMESPACE).tiled.default  # one operation in a trace, which the compiler looks into


class AttentionSwitch:
    """Replaces transformers' `sdpa` function as long as contexts of `grouped_queries` exist, counted in `uses`.

    In these contexts it calls `grouped_attention`; elsewhere, as in plain `generate` of another thread, transformers'
    own function. Other copies of this file, as in published pairs, use the same object.

    Attributes:
        active: None outside of these contexts; in them, whether torch may compile `grouped_attention` into a forward.
            What a user compiles must keep transformers' own function, since it serves plain forwards as well.
    """

    def __init__(self) -> None:
        self.uses, self.lock = 0, threading.Lock()
        self.active: ContextVar[bool | None] = ContextVar("active", default=None)  # of this thread or asyncio task

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # which cannot trace a `ContextVar`
            return (grouped_attention if self.traces() else sdpa_attention_forward)(*args, **kwargs)
        return (sdpa_attention_forward if self.active.get() is None else grouped_attention)(*args, **kwargs)

    @torch.compiler.assume_constant_result
    def traces(self) -> bool:
        return bool(self.active.get())


SWITCH = AttentionSwitch()  # one object for ever: for another function torch would compile a user's model again


@contextlib.contextmanager
def grouped_queries(traced: bool = False) -> Iterator[None]:
    """A context in which `sdpa` is `grouped_attention`; if a user has replaced `sdpa`, nothing is changed.

    `traced` says whether torch may compile that into a forward: into ours, and not into those that a user compiles.
    """
    registry: Any = AttentionInterface._global_mapping
    function: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    switch = function if hasattr(function, "uses") else SWITCH  # another copy, as each published pair has its own
    if function not in (switch, sdpa_attention_forward):
        yield
        return
    with switch.lock:
        switch.uses += 1
        registry["sdpa"] = switch
    before = switch.active.set(traced)
    try:
        yield
    finally:
        switch.active.reset(before)
        with switch.lock:
            switch.uses -= 1
            if not switch.uses and registry["sdpa"] is switch:
                registry["sdpa"] = sdpa_attention_forward


def columns_of_ring(newest: torch.Tensor, ring: int) -> torch.Tensor:
    """[R, ring], which column of the text each slot of a ring buffer holds, where `newest` [R, 1] is the last one."""
    return newest - (newest - torch.arange(ring, device=newest.device)) % ring


class TreeAttention(NamedTuple):
    """What the nodes of a tree attend to: their text, and those of each other that their mask has.

    The nodes of a row are in consecutive slots from that of node 0 on, siblings too, though these have one position.
    Before node 0 slots are positions; behind all nodes nothing is seen.

    Attributes:
        root_slots: [R, 1] int64, the slot of node 0, which is also its position.
        node_depths: [R, n] int64, of all nodes, as in `Tree`.
        node_mask: [R, q, n] bool, whether each of the q nodes that are fed sees each node.
    """

    root_slots: torch.Tensor
    node_depths: torch.Tensor
    node_mask: torch.Tensor

    def node_positions(self, slots: torch.Tensor) -> torch.Tensor:
        """The positions [R, q] of nodes in these slots [R, q]."""
        return self.root_slots + self.node_depths.gather(1, slots - self.root_slots)

    def of_slots(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions [R, S] of what is in slots [R or 1, S], and which of it each fed node sees, [R, q, S]."""
        nodes = slots - self.root_slots  # [R, S]; negative in the text before node 0
        num_nodes = self.node_depths.shape[1]
        index = nodes.clamp(0, num_nodes - 1)
        positions = slots.minimum(self.root_slots) + self.node_depths.gather(1, index)  # node 0 has depth 0
        is_seen_node = self.node_mask.gather(2, index[:, None].expand(-1, self.node_mask.shape[1], -1))
        is_text, is_node = nodes <= 0, nodes < num_nodes  # all see node 0, also fillers, which see no other
        return positions, is_text[:, None] | (is_seen_node & is_node[:, None])


def _keys_in(
    slots: torch.Tensor, is_token: torch.Tensor | None, tree: TreeAttention | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Positions of the keys in slots [R or 1, S], [R or 1, 1, 1, S], and which of them queries may see, [R, 1, q, S].

    `is_token` [R, 1, 1, S] says which are tokens, None if all are; of a tree a query sees only some of its nodes.
    """
    if tree is None:
        return slots[:, None, None], is_token
    positions, seen = tree.of_slots(slots)
    return positions[:, None, None], seen[:, None] if is_token is None else is_token & seen[:, None]


class Masks:
    """Makes the 4D masks of one model, by position: bool under sdpa, additive under eager attention.

    Attributes:
        additive: the dtype of additive masks; None for bool ones.
        layers: the kind of attention of each layer, as in `config.layer_types`; empty if all are of one kind.
        kinds: these without repetition.
        windows: by kind, how many keys a token sees at most, its own among them.
        longest_window: the largest of these; 0 if there is none.
        only_causal: whether a token that sees all keys needs no mask.
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config(decoder=True)
        self.additive = None if config._attn_implementation == "sdpa" else model.dtype
        self.layers: list[str] = list(getattr(config, "layer_types", None) or ())
        self.kinds = sorted(set(self.layers))
        self.windows: dict[str, int] = {}
        for kind, name in {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}.items():
            window = getattr(config, name, None)
            if window:
                self.windows[kind] = window
        self.longest_window = max([self.windows.get(kind, 0) for kind in self.kinds or [SLIDING]])
        is_causal = self.additive is None and not self.longest_window and not self.kinds
        self.only_causal = is_causal and config.model_type not in ASK_FOR_MASKS

    def __call__(
        self,
        slots: torch.Tensor,
        pads: torch.Tensor | None,
        kv_length: int,
        gaps: torch.Tensor | None = None,
        ring: int = 0,
        tree: TreeAttention | None = None,
    ) -> Mask:
        """The mask [R, 1, q, S] of queries at `slots` [R, q] over the first S = `kv_length` slots.

        Args:
            pads: [R], leading slots without a token; None if no row has any, nor gaps.
            gaps: [R, S] bool, other hidden slots.
            ring: if it is not 0 and less than S, layers with a window hold only so many slots, in a ring buffer.
            tree: where queries are its nodes; windows are then of their positions.
        """
        queries = (slots if tree is None else tree.node_positions(slots))[:, None, :, None]
        first: Any = 0 if pads is None else pads[:, None, None, None]
        has_ring = 0 < ring < kv_length
        ring_masks: Any = {}
        if has_ring:
            ring_slots = columns_of_ring(slots[:, -1:], ring)  # [R, ring]; negative where none was written yet
            is_token = ring_slots[:, None, None] >= first
            if gaps is not None:
                is_token = is_token & ~gaps.gather(1, ring_slots.clamp(min=0))[:, None, None]
            ring_masks = self.between(queries, *_keys_in(ring_slots, is_token, tree), first)
            if not self.kinds:
                return ring_masks
        text_slots = torch.arange(kv_length, device=slots.device)[None]  # [1, S]
        is_text_token = None if pads is None else text_slots >= first
        if is_text_token is not None and gaps is not None:
            is_text_token = is_text_token & ~gaps[:, None, None]
        masks: Any = self.between(queries, *_keys_in(text_slots, is_text_token, tree), first)
        if not has_ring:
            return masks
        return {kind: (ring_masks if kind in self.windows else masks)[kind] for kind in self.kinds}

    def between(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        is_token: torch.Tensor | None = None,
        first: torch.Tensor | int = 0,
    ) -> Mask:
        """The mask of queries and keys, given by their positions in a text; all arguments broadcast to [R, 1, q, S].

        Args:
            is_token: which keys are tokens of the query's row; None if all are.
            first: the position of the row's first token.
        """
        visible = keys <= queries if is_token is None else is_token & (keys <= queries)
        masks = {}
        for kind in self.kinds or [SLIDING]:
            mask, window = visible, self.windows.get(kind)
            if window and kind == SLIDING:
                mask = visible & (keys > queries - window)
            elif window:
                mask = visible & ((keys - first) // window == (queries - first) // window)
            if self.additive is not None:
                hidden, lowest = ~mask, torch.finfo(self.additive).min
                mask = torch.zeros_like(mask, dtype=self.additive).masked_fill_(hidden, lowest)
            masks[kind] = mask
        return masks if self.kinds else masks[SLIDING]
