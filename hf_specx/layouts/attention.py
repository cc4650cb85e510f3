"""Attention of several new tokens of a row to keys that query heads share, without a copy of the keys for each head.

Under a mask the `sdpa` function of transformers repeats keys and values for every query head of a group (`repeat_kv`),
in each layer of each forward. Heads that share keys are just more queries to these keys, so here they are folded into
the query length, as transformers does itself for a single token. A bool mask is made additive once for each forward,
where torch does it in each layer.
"""

import contextlib
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_specx.common.patching import Overriding, beneath, patch_function


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
        """
        Args:
            module: the attention module; its `num_key_value_groups` is n.
            query: [R, n * H, q, D].
            key: [R, H, S, D].
            value: [R, H, S, D'].
            attention_mask: [R or 1, 1, q, S], bool or additive.

        Returns:
            [R, q, n * H, D'], and None for the weights.
        """
        group = getattr(module, "num_key_value_groups", 1)
        rows, heads, count, _ = query.shape
        if (
            heads != group * key.shape[1]
            or attention_mask is None
            or attention_mask.shape[1:-1] != (1, count)
            or any(value is not None for name, value in kwargs.items() if name not in IGNORED)
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
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return mask if group == 1 else mask.repeat(1, 1, group, 1)


TRACED = GroupedAttention()


def grouped_queries(traced: bool = False) -> contextlib.AbstractContextManager[None]:
    """A context in which `sdpa` folds groups of query heads; if a user has replaced `sdpa`, nothing is changed.

    Args:
        traced: whether torch may compile this into the forwards, as it must not into those that a user compiles, since
            plain `generate` runs them too.
    """
    if beneath(ALL_ATTENTION_FUNCTIONS["sdpa"])[-1] is not sdpa_attention_forward:
        return contextlib.nullcontext()
    sdpa = patch_function(AttentionInterface._global_mapping, "sdpa", TRACED)
    return Overriding({sdpa: TRACED if traced else GroupedAttention()})
