"""What the layers of heads are made of: attention over keys in slots of each row, norms and rotary positions."""

from copy import copy
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_specx.common.devices import to_device
from hf_specx.models.attention import TreeAttention, tiled
from hf_specx.models.slots import LayersKeysValues

from .config import HeadConfig


class SlotMapping(NamedTuple):
    """In which slots the entries of one forward are written, and at which positions they stand."""

    slots: torch.Tensor  # [r, q], of the cache
    positions: torch.Tensor  # [r, q], in the text
    kv_length: int  # no slot from this one on is seen
    block_size: int = 0  # how many of the last see each other, in layers without a window or as the config says
    rows: torch.Tensor | None = None  # [r], of the cache; None if these are all
    tree: TreeAttention | None = None  # where entries are candidates of one


class HeadCache:
    """The keys and values of a head's layers, as one forward writes and attends to them.

    Each entry attends to the keys of its row in its own slot and before; one of a tree to those that it follows.

    Args:
        config: the head's.
        rotary: of the positions.
        buffers: keys and values of all rows, in slots.
        mapping: where the entries of this forward go.
    """

    def __init__(self, config: HeadConfig, rotary: "Rotary", buffers: LayersKeysValues, mapping: SlotMapping):
        self.config, self.buffers = config, buffers
        self.slots, positions, self.kv_length, self.block_size, rows, self.tree = mapping
        self.rows = torch.arange(len(positions), device=positions.device) if rows is None else rows
        self.masks: dict[str, torch.Tensor] = {}
        self.queries_per_key = config.num_attention_heads // config.num_key_value_heads
        self.cos_sin = rotary(positions)

    def _mask(self, layer_type: str, dtype: torch.dtype) -> torch.Tensor:
        """What layers of this type see, [r, 1, n * q, S]; made once a forward."""
        if layer_type not in self.masks:
            window = self.config.sliding_window
            queries = self.slots[:, -self.block_size :, None][:, None]
            keys = torch.arange(self.kv_length, device=queries.device)
            sliding = layer_type == "sliding_attention" and window is not None
            sees_block = self.block_size and not self.config.is_causal
            sees_block = sees_block and (not sliding or self.config.sliding_window_non_causal)
            if self.tree is not None:  # whose slots are not by position
                queries = self.tree.node_positions(self.slots)[:, None, :, None]
                positions, visible_nodes = self.tree.of_slots(keys[None])
                keys, visible = positions[:, None, None], visible_nodes[:, None]
            elif sees_block:
                visible = (keys <= queries[:, :, -1:]).expand(-1, -1, queries.shape[2], -1)
            else:
                visible = keys <= queries
            if sliding:
                visible = visible & (keys > queries - (window or 0))
            self.masks[layer_type] = tiled(visible, self.queries_per_key, dtype)
        return self.masks[layer_type]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [r, m, H, D] of all entries; returns those that the rows have by now, [r, H, S, D]."""
        keys, values = self.buffers[layer]
        for buffer, new in ((keys, key), (values, value)):
            buffer[self.rows[:, None], :, self.slots] = new.to(buffer.dtype)
        rows = slice(None) if len(self.rows) == len(keys) else self.rows
        return keys[rows, :, : self.kv_length], values[rows, :, : self.kv_length]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[r, q, n * H * D] of queries [r, q, n * H, D], with the keys and values [r, m, H, D] of all entries."""
        keys, values = self.write(layer, key, value)
        length, layer_types = query.shape[1], self.config.layer_types
        mask = self._mask("full_attention" if layer_types is None else layer_types[layer], query.dtype)
        grouped = query.transpose(1, 2).reshape(len(query), -1, self.queries_per_key * length, query.shape[3])
        attended = nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return attended.unflatten(2, (self.queries_per_key, length)).permute(0, 3, 1, 2, 4).flatten(2)


class Rotary:
    """Cosines and sines by position, for the leading channels that are rotated."""

    def __init__(self, config: HeadConfig, device: torch.device):
        config = copy(config)
        rope = dict[str, Any](config.rope_parameters or {})
        if rope["rope_type"] == "default":  # which transformers leaves to models; it is the linear one, scaled by 1
            rope |= {"rope_type": "linear", "factor": 1.0}
        config.head_dim = rope.pop("rope_dim", config.head_dim)
        config.rope_parameters = rope
        with torch.device(device):  # else transformers would take torch's default for some of the numbers
            frequencies, self.scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device)
        self.frequencies = torch.cat([-frequencies, frequencies])

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the signs that the halves take, [r, m, 1, D'] of positions [r, m]."""
        angles = (positions[..., None] * self.frequencies)[:, :, None]
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scaling == 1.0 else (cos * self.scaling, sin * self.scaling)


def apply_rotary(states: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Queries or keys [r, m, H, D] rotated by their positions, the last m of those in `cos_sin`."""
    cos, sin = (values[:, -states.shape[1] :].to(states.dtype) for values in cos_sin)
    size = cos.shape[-1]
    leading = states[..., :size]
    swapped = torch.cat([leading[..., size // 2 :], leading[..., : size // 2]], -1)
    rotated = torch.addcmul(leading * cos, swapped, sin)
    return rotated if size == states.shape[-1] else torch.cat([rotated, states[..., size:]], -1)


class HeadAttention(nn.Module):
    """Attention of one layer, whose inputs are `width` wide."""

    def __init__(self, config: HeadConfig, width: int):
        super().__init__()
        self.head_dim = config.head_dim
        query_width = config.num_attention_heads * self.head_dim
        key_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, query_width, config.attention_bias)
        self.k_proj = nn.Linear(width, key_width, config.attention_bias)
        self.v_proj = nn.Linear(width, key_width, config.attention_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, config.output_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def queries(self, states: torch.Tensor, cache: HeadCache) -> torch.Tensor:
        """[r, q, H, D] of states [r, q, width], those of the last q entries."""
        return apply_rotary(self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim))), cache.cos_sin)

    def keys_values(self, states: torch.Tensor, cache: HeadCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [r, m, H, D] of states [r, m, width]."""
        key = apply_rotary(self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.head_dim))), cache.cos_sin)
        return key, self.v_proj(states).unflatten(-1, (-1, self.head_dim))


class HeadLayer(nn.Module):
    """A decoder layer with the norms before its parts; `width` is that of the attention's inputs."""

    def __init__(self, config: HeadConfig, number: int, width: int | None = None):
        super().__init__()
        self.number = number
        self.input_layernorm = rms_norm(config)
        self.post_attention_layernorm = rms_norm(config)
        self.self_attn = HeadAttention(config, width or config.hidden_size)
        self.mlp = LlamaMLP(cast(LlamaConfig, config))

    def forward(self, states: torch.Tensor, cache: HeadCache) -> torch.Tensor:
        normed = self.input_layernorm(states)
        return self.attention_and_mlp(states, normed, self.self_attn.keys_values(normed, cache), cache)

    def attention_and_mlp(
        self,
        residual: torch.Tensor,
        normed: torch.Tensor,
        keys_values: tuple[torch.Tensor, torch.Tensor],
        cache: HeadCache,
    ) -> torch.Tensor:
        """The layer's output.

        Args:
            residual: what the attention adds to.
            normed: what queries are made of.
            keys_values: of all new entries.
            cache: where these are written.
        """
        attention = self.self_attn
        attended = cache.attend(self.number, attention.queries(normed, cache), *keys_values)
        states = residual + attention.o_proj(attended)
        return states + self.mlp(self.post_attention_layernorm(states))


def rms_norm(config: HeadConfig, width: int | None = None) -> nn.RMSNorm:
    """An RMS norm of states of this width, by default the head's own."""
    return nn.RMSNorm(width or config.hidden_size, config.rms_norm_eps)


def to_device_of(module: Any, values: torch.Tensor) -> torch.Tensor:
    """Values on the device of a module's weights; hooks of accelerate send them there by themselves."""
    return values if hasattr(module, "_hf_hook") else to_device(values, module.weight.device)
