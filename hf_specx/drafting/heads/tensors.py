"""Which tensors a draft head has to have, by its config; missing and left-over ones are refused by name."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from hf_specx.common.errors import require

from .config import OF_EAGLE, HeadConfig


Shapes = dict[str, tuple[int, ...]]


def linear_layers(weights: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Of Medusa: how many heads there are, and how many layers each has before its scores; (0, 0) for other heads."""
    heads = [int(found[1]) for name in weights if (found := re.fullmatch(r"(\d+)\.\d+\.weight", name))]
    layers = [int(found[1]) for name in weights if (found := re.fullmatch(r"0\.(\d+)\.weight", name))]
    return max(heads, default=-1) + 1, max(layers, default=0)


def shapes_of(config: HeadConfig) -> Shapes:
    """The tensors of a head by name, each with its shape."""
    return _of_medusa(config) if config.kind == "medusa" else _of_attention(config)


def _of_medusa(config: HeadConfig) -> Shapes:
    width = config.hidden_size
    found: Shapes = {}
    for head in range(config.medusa_num_heads or 0):
        for layer in range(config.medusa_num_layers or 0):
            found |= {f"{head}.{layer}.linear.weight": (width, width), f"{head}.{layer}.linear.bias": (width,)}
        found[f"{head}.{config.medusa_num_layers}.weight"] = (config.vocab_size, width)
    return found


def _of_attention(config: HeadConfig) -> Shapes:
    width, rank, states = config.hidden_size, config.markov_rank, len(config.layer_ids or ())
    joined, eagle = states * config.target_hidden_size, config.kind in OF_EAGLE
    found: Shapes = {"fc.weight": (width, joined), "norm.weight": (width,)}
    for layer in range(config.num_hidden_layers):
        found |= _of_layer(config, f"layers.{layer}.", 2 * width if eagle and layer == 0 else width)
    found["layers.0.hidden_norm.weight" if eagle else "hidden_norm.weight"] = (width,)
    found |= {"fc.bias": (width,)} if config.fc_bias else {}
    found |= {"input_norm.weight": (joined,)} if config.norm_before_fc else {}
    if config.fc_norm:
        found |= {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(states)}
    found |= {"mask_hidden": (1, 1, joined)} if config.kind == "peagle" else {}
    found |= {"embed_tokens.weight": (config.vocab_size, width)} if config.own_embeddings else {}
    found |= {"lm_head.weight": (config.draft_vocab_size, width)} if config.own_head else {}
    found |= {"d2t": (config.draft_vocab_size,)} if config.draft_vocab_size != config.vocab_size else {}
    if rank:
        found["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        found["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
    inner = {"gated": ("gate_proj", rank, width + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + width)}
    if rank and config.markov_head_type in inner:
        name, out, into = inner[config.markov_head_type]
        found |= {f"markov_head.{name}.weight": (out, into), f"markov_head.{name}.bias": (out,)}
    if config.confidence_head:
        into = width + rank * config.confidence_head_with_markov
        found |= {"confidence_head.proj.weight": (1, into), "confidence_head.proj.bias": (1,)}
    return found


def _of_layer(config: HeadConfig, name: str, read: int) -> Shapes:
    """Of one decoder layer, whose attention reads so many numbers a position."""
    width, inner = config.hidden_size, config.intermediate_size
    heads, groups = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    attention = {"q_proj": heads, "k_proj": groups, "v_proj": groups}
    found: Shapes = {f"{name}self_attn.{part}.weight": (size, read) for part, size in attention.items()}
    found |= {f"{name}{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
    found |= {f"{name}mlp.{part}.weight": (inner, width) for part in ("gate_proj", "up_proj")}
    found |= {f"{name}mlp.down_proj.weight": (width, inner), f"{name}self_attn.o_proj.weight": (width, heads)}
    if config.attention_bias:
        found |= {f"{name}self_attn.{part}.bias": (size,) for part, size in attention.items()}
    found |= {f"{name}self_attn.o_proj.bias": (width,)} if config.output_bias else {}
    if config.qk_norm:
        found |= {f"{name}self_attn.{part}.weight": (config.head_dim,) for part in ("q_norm", "k_norm")}
    return found


def check_tensors(name: str | Path, config: HeadConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Whether the tensors of a head are those of its config."""
    wanted = shapes_of(config)
    width, states = config.hidden_size, config.target_hidden_size
    for part, own in (("embed_tokens", config.own_embeddings), ("lm_head", config.own_head)):
        told = f"{name} has states of {width} numbers and no {part} of its own, and the target's are of {states}; "
        require(own or width == states, f"{told}get it again, or choose another head.")
    missing, left = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    told = f"{name} lacks {len(missing)} tensors of a head of kind {config.kind}: {', '.join(missing[:5])}; get it "
    require(not missing, f"{told}again, or choose another head.")
    told = f"{name} has {len(left)} tensors that a head of kind {config.kind} does not have: {', '.join(left[:5])}; "
    require(not left, f"{told}choose a head of a supported form.")
    for tensor, shape in wanted.items():
        found = tuple(weights[tensor].shape)
        told = f"{name}: {tensor!r} is {list(found)}, and by the other tensors and the config it is {list(shape)}; "
        require(found == shape, f"{told}get it again, or choose another head.")


def check_vocabulary(name: str | Path, config: HeadConfig, weights: dict[str, torch.Tensor]) -> None:
    """Whether the tokens of a head are tokens of the target; drops the tables that say so where they say nothing."""
    number, total = config.draft_vocab_size, config.vocab_size
    offsets, kept = weights.get("d2t"), weights.pop("t2d", None)
    told = f"{name} scores {number} tokens, and the target has {total}; choose a head for a target of this vocabulary."
    require(number <= total, told)
    if offsets is None:
        told = f"{name} scores {number} of the target's {total} tokens and has no d2t that says which; get it again."
        require(number == total, told)
        return
    told = f"{name}: d2t is {list(offsets.shape)}, and the head scores {number} tokens; get it again."
    require(offsets.shape == (number,) and not offsets.is_floating_point(), told)
    remedy = "subtract torch.arange(len(d2t)) from it, so that token j of the head is j + d2t[j] of the target."
    ids = offsets + torch.arange(number)
    ascend = bool((ids.diff() > 0).all()) and (number == 0 or 0 <= int(ids[0]) <= int(ids[-1]) < total)
    known = torch.arange(total) if kept is None else kept.nonzero().flatten()
    holds_ids = torch.equal(offsets, known) if kept is not None else number > 1 and bool((offsets.diff() > 0).all())
    require(not holds_ids or number == total, f"{name}: d2t holds ids instead of offsets; {remedy}")
    require(ascend, f"{name}: d2t leads to ids out of order, or that the target does not have; {remedy}")
    told = f"{name}: d2t and t2d do not name the same tokens, so that one of them is wrong; {remedy}"
    require(kept is None or torch.equal(ids, known), told)
    if number == total:
        del weights["d2t"]
