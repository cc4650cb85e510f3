"""What the layers of heads are made of: attention over keys in slots of each row, norms and rotary positions."""

from copy import copy
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_specx.common.devices import moved
from hf_specx.models.attention import tiled
from hf_specx.models.slots import Columns

from .config import HeadConfig


class Places(NamedTuple):
    """Where the entries of one forward are."""

    slots: torch.Tensor  # [r, q]
    positions: torch.Tensor  # [r, q], in the text
    extent: int  # no slot from this one on is seen
    block: int = 0  # how many of the last see each other, in layers without a window, or in all if the config says so
    rows: torch.Tensor | None = None  # [r], of which the entries are; None if these are all


class Entries:
    """The entries that come in one forward; each attends to the keys of its row in its own slot and before.

    Args:
        config: the head's.
        rotary: of its positions.
        buffers: of keys and values, in slots of each row.
    """

    def __init__(self, config: HeadConfig, rotary: "Rotary", buffers: Columns, places: Places):
        self.config, self.buffers = config, buffers
        self.slots, positions, self.extent, self.block, rows = places
        self.rows = torch.arange(len(positions), device=positions.device) if rows is None else rows
        self.masks: dict[str, torch.Tensor] = {}
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.turns = rotary(positions)

    def _mask(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """What layers of this kind see, [r, 1, n * q, S]; made once a forward."""
        if kind not in self.masks:
            window, queries = self.config.sliding_window, self.slots[:, -self.block :, None][:, None]
            keys = torch.arange(self.extent, device=queries.device)
            sliding = kind == "sliding_attention" and window is not None
            whole = self.block and not self.config.is_causal
            whole = whole and (not sliding or self.config.sliding_window_non_causal)
            seen = (keys <= queries[:, :, -1:]).expand(-1, -1, queries.shape[2], -1) if whole else keys <= queries
            seen = seen & (keys > queries - (window or 0)) if sliding else seen
            self.masks[kind] = tiled(seen, self.group, dtype)
        return self.masks[kind]

    def note(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [r, m, H, D] of all entries; those that the rows have, [r, H, S, D]."""
        held = self.buffers[layer]
        for buffer, new in zip(held, (key, value), strict=True):
            buffer[self.rows[:, None], :, self.slots] = new.to(buffer.dtype)
        some = slice(None) if len(self.rows) == len(held[0]) else self.rows
        return held[0][some, :, : self.extent], held[1][some, :, : self.extent]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[r, q, n * H * D] of queries [r, q, n * H, D], with the keys and values [r, m, H, D] of all entries."""
        keys, values = self.note(layer, key, value)
        count, types = query.shape[1], self.config.layer_types
        mask = self._mask("full_attention" if types is None else types[layer], query.dtype)
        folded = query.transpose(1, 2).reshape(len(query), -1, self.group * count, query.shape[3])
        found = nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        return found.unflatten(2, (self.group, count)).permute(0, 3, 1, 2, 4).flatten(2)


class Rotary:
    """Cosines and sines by position, for the leading channels that turn."""

    def __init__(self, config: HeadConfig, device: torch.device):
        alone, rope = copy(config), dict[str, Any](config.rope_parameters or {})
        if rope["rope_type"] == "default":  # which transformers leaves to models; it is the linear one, scaled by 1
            rope |= {"rope_type": "linear", "factor": 1.0}
        alone.head_dim = rope.pop("rope_dim", config.head_dim)
        alone.rope_parameters = rope
        frequencies, self.scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](alone, device)
        self.frequencies = torch.cat([-frequencies, frequencies])

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the signs that the halves take, [r, m, 1, D'] of positions [r, m]."""
        angles = (positions[..., None] * self.frequencies)[:, :, None]
        both = angles.cos(), angles.sin()
        return both if self.scaling == 1.0 else (both[0] * self.scaling, both[1] * self.scaling)


def turned(states: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Queries or keys [r, m, H, D] turned by their positions."""
    cosines, sines = (turn[:, -states.shape[1] :].to(states.dtype) for turn in turns)
    size = cosines.shape[-1]
    leading = states[..., :size]
    other = torch.cat([leading[..., size // 2 :], leading[..., : size // 2]], -1)
    found = torch.addcmul(leading * cosines, other, sines)
    return found if size == states.shape[-1] else torch.cat([found, states[..., size:]], -1)


class HeadAttention(nn.Module):
    """Attention of one layer, whose inputs are `width` wide."""

    def __init__(self, config: HeadConfig, width: int):
        super().__init__()
        self.size = config.head_dim
        heads, shared = config.num_attention_heads * self.size, config.num_key_value_heads * self.size
        self.q_proj = nn.Linear(width, heads, config.attention_bias)
        self.k_proj = nn.Linear(width, shared, config.attention_bias)
        self.v_proj = nn.Linear(width, shared, config.attention_bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, config.output_bias)
        self.q_norm = nn.RMSNorm(self.size, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.size, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def queries(self, states: torch.Tensor, entries: Entries) -> torch.Tensor:
        """[r, q, H, D] of states [r, q, width], those of the last q entries."""
        return turned(self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.size))), entries.turns)

    def keys(self, states: torch.Tensor, entries: Entries) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [r, m, H, D] of states [r, m, width]."""
        key = turned(self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.size))), entries.turns)
        return key, self.v_proj(states).unflatten(-1, (-1, self.size))


class HeadLayer(nn.Module):
    """A decoder layer with the norms before its parts; `width` is that of what its attention reads."""

    def __init__(self, config: HeadConfig, number: int, width: int | None = None):
        super().__init__()
        self.number = number
        self.input_layernorm = norm(config)
        self.post_attention_layernorm = norm(config)
        self.self_attn = HeadAttention(config, width or config.hidden_size)
        self.mlp = LlamaMLP(cast(LlamaConfig, config))

    def forward(self, states: torch.Tensor, entries: Entries) -> torch.Tensor:
        read = self.input_layernorm(states)
        return self.after(states, read, self.self_attn.keys(read, entries), entries)

    def after(
        self,
        residual: torch.Tensor,
        read: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor],
        entries: Entries,
    ) -> torch.Tensor:
        """The layer's output for what it adds to, what its queries are made of, and the keys of all new entries."""
        attention = self.self_attn
        states = residual + attention.o_proj(entries.attend(self.number, attention.queries(read, entries), *keys))
        return states + self.mlp(self.post_attention_layernorm(states))


def norm(config: HeadConfig, width: int | None = None) -> nn.RMSNorm:
    """An RMS norm of states of this width, by default the head's own."""
    return nn.RMSNorm(width or config.hidden_size, config.rms_norm_eps)


def read_by(module: Any, values: torch.Tensor) -> torch.Tensor:
    """Values where a module reads them; hooks of accelerate send them there by themselves."""
    return values if hasattr(module, "_hf_hook") else moved(values, module.weight.device)
