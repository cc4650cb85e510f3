"""Tiny random targets of Gemma 4 and assistants for them, and what an assistant must propose, by another computation.

`assistant_logits` is written from the description of the format alone, whole texts in, in float64; of transformers it
takes the target's keys and states, and nothing of the assistant but its weights.
"""

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


VOCAB_SIZE = 8  # so that candidates of random assistants are often right
WINDOW = 5
EPS = 1e-6
COMMON = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
COMMON |= {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW}
COMMON |= {"max_position_embeddings": 256, "initializer_range": 0.3, "eos_token_id": None, "pad_token_id": 0}
COMMON |= {"tie_word_embeddings": False}  # else random models repeat their last token
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
}
COMMON |= {"rope_parameters": ROPE}
KINDS: dict[str, dict[str, Any]] = {  # as the checkpoints of these names
    "12B": {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0},
    "E2B": {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE},
    "31B": {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0}
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
}
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 4, "centroid_intermediate_top_k": 2}


def gemma4_target(kind: str = "12B", seed: int = 2, **changes: Any) -> PreTrainedModel:
    sizes = COMMON | KINDS[kind] | changes
    sizes |= {"num_hidden_layers": len(sizes["layer_types"])}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **sizes)).float().eval()
    return disturbed(model)


def assistant_of(target: PreTrainedModel, seed: int = 4, unified: bool = False, **changes: Any) -> PreTrainedModel:
    """An assistant of four layers, of another width than the target's."""
    text = target.config
    sizes = COMMON | {"hidden_size": 24, "num_hidden_layers": 4, "num_kv_shared_layers": 4}
    sizes |= {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "attention_k_eq_v": text.attention_k_eq_v}
    sizes |= {"vocab_size": text.vocab_size, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    sizes |= {"sliding_window": text.sliding_window}
    if text.attention_k_eq_v:
        sizes |= {"num_global_key_value_heads": 1}
    sizes |= {name: changes.pop(name) for name in list(changes) if name in sizes}
    name = "gemma4_unified_assistant" if unified else "gemma4_assistant"
    kind = {"model_type": "gemma4_unified_text" if unified else "gemma4_text"}
    given = {"text_config": kind | sizes, "backbone_hidden_size": text.hidden_size} | changes
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **given)).float().eval()
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
    return disturbed(model)


@torch.no_grad()
def disturbed(model: PreTrainedModel) -> PreTrainedModel:
    """With norms and scalars that are not all 1, so that one that is left out is seen."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or "layer_scalar" in name:
            value.mul_(1 + 0.3 * torch.randn_like(value))
    return model


@torch.no_grad()
def assistant_logits(
    assistant: PreTrainedModel,
    target: PreTrainedModel,
    read: Any,
    text: Sequence[int],
    drafted: Sequence[int],
    keys: int = 0,
    position: int = 0,
    window: int = 0,
) -> list[Tensor]:
    """[V] of each of the candidates that are `drafted`, those before it known; -inf for tokens of other clusters.

    Args:
        read: what the target gives for the text, see `targets_read`.
        text: [n + 1], of which the target has read all but the last.
        keys, position, window: what wrong variants add: to the keys that are seen, the position, the window.
    """
    weights, config, n = _doubles(assistant), assistant.config.get_text_config(), len(text) - 1
    seen = n + keys  # one more is the key of the last token
    state = read.hidden_states[-1][0, n - 1].double()
    scale, embeddings = target.config.hidden_size**0.5, target.get_input_embeddings().weight.double()
    proposed = []
    for token in [text[-1], *drafted][: len(drafted)]:
        x = weights["pre_projection.weight"] @ torch.cat([embeddings[token] * scale, state])
        for number, kind in enumerate(config.layer_types):
            key, value = (each[0].double() for each in read.shared_kv_states[kind])
            first = max(0, seen - config.sliding_window - window) if kind == "sliding_attention" else 0
            both = key[:, first:seen], value[:, first:seen]
            x = _layer(weights, f"model.layers.{number}.", config, kind, x, n - 1 + position, *both)
        normed = _rms(x, weights["model.norm.weight"])
        state = weights["post_projection.weight"] @ normed
        proposed.append(_scores(assistant, weights, normed))
    return proposed


def _scores(assistant: PreTrainedModel, weights: dict, normed: Tensor) -> Tensor:
    scores = weights["lm_head.weight"] @ normed
    if not assistant.config.use_ordered_embeddings:
        return scores
    clusters = weights["masked_embedding.token_ordering"].long().view(assistant.config.num_centroids, -1)
    likely = (weights["masked_embedding.centroids.weight"] @ normed).sort(descending=True).indices
    allowed = clusters[likely[: assistant.config.centroid_intermediate_top_k]].flatten()
    return torch.full_like(scores, -torch.inf).index_copy(0, allowed, scores[allowed])


@torch.no_grad()
def targets_read(target: PreTrainedModel, texts: Sequence[Sequence[int]]) -> list[Any]:
    """States and keys of the target for each text [n + 1], of one forward; pads behind a text change nothing."""
    if not texts:
        return []
    ids = pad_sequence([torch.tensor(list(text)) for text in texts], batch_first=True)
    read = target(ids, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    return [
        SimpleNamespace(
            hidden_states=[read.hidden_states[-1][row, None]],
            shared_kv_states={kind: [x[row, None] for x in pair] for kind, pair in read.shared_kv_states.items()},
        )
        for row in range(len(texts))
    ]


@cache
def _doubles(assistant: PreTrainedModel) -> dict[str, Tensor]:
    return {name: value.double() for name, value in assistant.state_dict().items()}


def _layer(weights: dict, layer: str, config: Any, kind: str, x: Tensor, position: int, key: Tensor, value: Tensor):
    size, groups = key.shape[2], config.num_attention_heads // key.shape[0]
    read = _rms(x, weights[f"{layer}input_layernorm.weight"])
    query = (weights[f"{layer}self_attn.q_proj.weight"] @ read).view(-1, size)
    query = _rotate(_rms(query, weights[f"{layer}self_attn.q_norm.weight"]), position, kind)
    key, value = (each.repeat_interleave(groups, 0) for each in (key, value))
    chances = torch.einsum("hd,hnd->hn", query, key).softmax(-1)
    mixed = torch.einsum("hn,hnd->hd", chances, value).flatten()
    mixed = weights[f"{layer}self_attn.o_proj.weight"] @ mixed
    x = x + _rms(mixed, weights[f"{layer}post_attention_layernorm.weight"])
    read = _rms(x, weights[f"{layer}pre_feedforward_layernorm.weight"])
    gate = nn.functional.gelu(weights[f"{layer}mlp.gate_proj.weight"] @ read, approximate="tanh")
    wide = weights[f"{layer}mlp.down_proj.weight"] @ (gate * (weights[f"{layer}mlp.up_proj.weight"] @ read))
    x = x + _rms(wide, weights[f"{layer}post_feedforward_layernorm.weight"])
    return x * weights[f"{layer}layer_scalar"]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def _rotate(x: Tensor, position: int, kind: str) -> Tensor:
    """Queries [heads, D]: channel i turns with channel i + D / 2; of full layers a quarter of these pairs does."""
    half, rope = x.shape[1] // 2, ROPE[kind]
    turning = torch.arange(half) < half * rope.get("partial_rotary_factor", 1.0)
    speed = turning * rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = (position * speed).cos(), (position * speed).sin()
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], 1)
