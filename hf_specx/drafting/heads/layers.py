"""What the layers of heads are made of: norms, rotary positions, and attention over keys in slots of each row."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_specx.models.attention import tiled

from .config import HeadConfig


class Slots:
    """Keys and values of all layers of a head, [R, C, H, D], written in place; and where the coming entries go.

    Entries of a row lie in consecutive slots from 0 on. The last slot is never seen: fillers are written there.
    """

    def __init__(self, config: HeadConfig):
        self.config, self.capacity = config, 0
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.held: list[list[torch.Tensor]] = []  # keys and values of each layer, once something is written
        self.rows: torch.Tensor | None = None  # [r], whose entries come now; None is all
        self.every = torch.empty(0)  # [R], the indices of all rows
        self.rotary: Rotary | None = None
        self.masks: dict[str, torch.Tensor] = {}

    def reserve(self, rows: int, extent: int, like: torch.Tensor) -> None:
        """Have `extent` slots for each row, and the one for fillers."""
        if extent < self.capacity:
            return
        heads, size = self.config.num_key_value_heads, self.config.head_dim
        before, self.capacity = self.capacity, 2 * extent + 1
        if not self.held:
            empty = like.new_zeros(rows, 0, heads, size)
            self.held = [[empty, empty] for _ in range(self.config.num_hidden_layers)]
        for layer in self.held:
            for number, stored in enumerate(layer):
                layer[number] = stored.new_zeros(len(stored), self.capacity, heads, size)
                layer[number][:, :before] = stored

    def aim(self, slots: torch.Tensor, positions: torch.Tensor, extent: int, block: int = 0) -> None:
        """Say where the coming entries go: slots and positions [r, q]; nothing from `extent` on is seen.

        An entry sees those in its own slot and before. The last `block` entries see each other, in layers without a
        window, or in all if the config says so.
        """
        config = self.config
        if self.rows is None and len(self.every) != len(slots):
            self.every = torch.arange(len(slots), device=slots.device)
        self.index, self.extent = ((self.every if self.rows is None else self.rows)[:, None], slots), extent
        self.rotary = self.rotary or Rotary(config, slots.device)
        self.turns = self.rotary(positions)
        self.queries, self.block, self.masks = slots[:, -block:, None][:, None], block, {}

    def _mask(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """What layers of this kind see, [r, 1, n * q, S]; made once a forward."""
        if kind not in self.masks:
            window, queries = self.config.sliding_window, self.queries
            keys = torch.arange(self.extent, device=queries.device)
            sliding = kind == "sliding_attention" and window is not None
            whole = self.block and (not sliding or self.config.sliding_window_non_causal)
            seen = (keys <= queries[:, :, -1:]).expand(-1, -1, queries.shape[2], -1) if whole else keys <= queries
            seen = seen & (keys > queries - (window or 0)) if sliding else seen
            self.masks[kind] = tiled(seen, self.group, dtype)
        return self.masks[kind]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[r, q, n * H * D] of queries [r, q, n * H, D], with the keys and values [r, m, H, D] of all entries."""
        self.write(layer, key, value)
        keys, values = (stored[:, : self.extent] for stored in self.held[layer])
        if self.rows is not None:
            keys, values = keys[self.rows], values[self.rows]
        count, types = query.shape[1], self.config.layer_types
        mask = self._mask("full_attention" if types is None else types[layer], query.dtype)
        folded = query.transpose(1, 2).reshape(len(query), -1, self.group * count, query.shape[3])
        found = nn.functional.scaled_dot_product_attention(
            folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
        )
        return found.unflatten(2, (self.group, count)).permute(0, 3, 1, 2, 4).flatten(2)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values [r, m, H, D] that nothing attends to yet."""
        keys, values = self.held[layer]
        keys[self.index], values[self.index] = key, value

    def select(self, stay: torch.Tensor) -> None:
        """Keep only the rows at indices `stay` [R']."""
        for layer in self.held:
            layer[:] = [stored.index_select(0, stay.to(stored.device)) for stored in layer]


class Rotary:
    """Cosines and sines by position, for the leading channels that turn."""

    def __init__(self, config: HeadConfig, device: torch.device):
        parameters: dict[str, Any] = config.rope_parameters or {}
        kind, self.scaling = parameters.get("rope_type", "default"), 1.0
        if kind == "default":
            size = int(config.head_dim * config.partial_rotary_factor)
            powers = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
            frequencies = 1.0 / parameters.get("rope_theta", 10000.0) ** powers
        else:
            frequencies, self.scaling = ROPE_INIT_FUNCTIONS[kind](config, device)
        self.frequencies = torch.cat([-frequencies, frequencies])

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the signs that the halves take, [r, m, 1, D'] of positions [r, m]."""
        angles = (positions[..., None] * self.frequencies)[:, :, None]
        if self.scaling == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self.scaling, angles.sin() * self.scaling


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

    def queries(self, states: torch.Tensor, slots: Slots) -> torch.Tensor:
        """[r, q, H, D] of states [r, q, width], those of the last q entries."""
        return turned(self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.size))), slots.turns)

    def keys(self, states: torch.Tensor, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [r, m, H, D] of states [r, m, width]."""
        key = turned(self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.size))), slots.turns)
        return key, self.v_proj(states).unflatten(-1, (-1, self.size))


class HeadMLP(nn.Module):
    """The usual gated one."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(states)) * self.up_proj(states))


class HeadLayer(nn.Module):
    """A decoder layer with the norms before its parts; `width` is that of what its attention reads."""

    def __init__(self, config: HeadConfig, number: int, width: int | None = None):
        super().__init__()
        self.number = number
        self.input_layernorm = norm(config)
        self.post_attention_layernorm = norm(config)
        self.self_attn = HeadAttention(config, width or config.hidden_size)
        self.mlp = HeadMLP(config)

    def forward(self, states: torch.Tensor, slots: Slots) -> torch.Tensor:
        read = self.input_layernorm(states)
        return self.after(states, read, self.self_attn.keys(read, slots), slots)

    def after(
        self,
        residual: torch.Tensor,
        read: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor],
        slots: Slots,
    ) -> torch.Tensor:
        """The layer's output for what it adds to, what its queries are made of, and the keys of all new entries."""
        attention = self.self_attn
        states = residual + attention.o_proj(slots.attend(self.number, attention.queries(read, slots), *keys))
        return states + self.mlp(self.post_attention_layernorm(states))


def norm(config: HeadConfig, width: int | None = None) -> nn.RMSNorm:
    """An RMS norm of states of this width, by default the head's own."""
    return nn.RMSNorm(width or config.hidden_size, config.rms_norm_eps)
