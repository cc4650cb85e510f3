"""The tensors of a draft head by one set of names, and whether they are right; what is wrong is named."""

import re
from pathlib import Path

import torch

from hf_specx.common.errors import require

from .config import HeadConfig


Weights = dict[str, torch.Tensor]
NAMES = (  # how the name of a tensor begins in some form, and how it begins here
    (r"^(model|medusa_head|logit_head)\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^additional_layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + 1}."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^(layers\.[1-9]\d*)\.hidden_norm\.", r"\1.input_layernorm."),
)
NOT_READ = re.compile(r"(verifier_norm|verifier_lm_head|.*rotary_emb)\.")  # copies of the target's, or computed


def with_standard_names(weights: Weights) -> Weights:
    """Tensors by the names of the *speculators* form, without what the target has as well."""
    renamed: Weights = {}
    for name, tensor in weights.items():
        for pattern, beginning in NAMES:
            name = re.sub(pattern, beginning, name)
        require(name not in renamed, f"two tensors of the head are {name!r} by their names; keep one of them.")
        if NOT_READ.match(name) is None:
            renamed[name] = tensor
    embeddings = renamed.get("embed_tokens.weight")
    if embeddings is not None and embeddings.is_floating_point() and bool(embeddings.isnan().all()):
        del renamed["embed_tokens.weight"]  # the trainer left them out
    return renamed


def pairs_to_halves(weights: Weights, head_dim: int, rotated: int) -> None:
    """Reorder the channels of queries and keys, in each head of `head_dim`.

    The first `rotated` ones are rotated in pairs of neighbours, and here in pairs with one from each half. Attention
    does not see in which order channels are.
    """
    order = torch.arange(head_dim, device="cpu")
    order[:rotated] = torch.arange(rotated, device="cpu").view(-1, 2).T.flatten()
    for name, tensor in weights.items():
        if re.search(r"self_attn\.[qk]_(proj|norm)\.", name):
            weights[name] = tensor.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def medusa_sizes(weights: Weights) -> tuple[int, int]:
    """Of Medusa: how many heads there are, and how many layers each has before its output; (0, 0) for other heads."""
    of_heads = [re.fullmatch(r"(\d+)\.\d+\.weight", name) for name in weights]
    of_layers = [re.fullmatch(r"0\.(\d+)\.weight", name) for name in weights]
    num_heads = 1 + max((int(match[1]) for match in of_heads if match), default=-1)
    num_layers = max((int(match[1]) for match in of_layers if match), default=0)
    return num_heads, num_layers


def check_tensors(name: str | Path, kind: str, expected: Weights, weights: Weights) -> None:
    """Raise ValueError if the tensors of a head of this kind are not the expected ones, by name and shape."""
    missing = sorted(expected.keys() - weights.keys())
    require(
        not missing,
        f"{name} lacks {len(missing)} tensors of a head of kind {kind}: {', '.join(missing[:5])}; get it again, or "
        "choose another head.",
    )
    unexpected = sorted(weights.keys() - expected.keys())
    require(
        not unexpected,
        f"{name} has {len(unexpected)} tensors that a head of kind {kind} does not have: "
        f"{', '.join(unexpected[:5])}; choose a head of a supported form.",
    )
    for tensor, like in expected.items():
        shape, expected_shape = list(weights[tensor].shape), list(like.shape)
        require(
            shape == expected_shape,
            f"{name}: {tensor!r} is {shape}, and by the other tensors and the config it is {expected_shape}; get it "
            "again, or choose another head.",
        )


def check_vocabulary(name: str | Path, config: HeadConfig, weights: Weights) -> None:
    """Raise ValueError if a head has tokens that the target lacks, or an embedding or output of the target of no fit.

    Where its tokens are not all of the target's, `d2t` and `t2d`, which say which they are, are among the weights
    afterwards, and else not.
    """
    width, target_width = config.hidden_size, config.target_hidden_size
    for part, is_own in (("embed_tokens", config.own_embeddings), ("lm_head", config.own_head)):
        require(
            is_own or width == target_width,
            f"{name} has states of {width} numbers and no {part} of its own, and the target's are of {target_width}; "
            "get it again, or choose another head.",
        )
    size, target_size = config.draft_vocab_size, config.vocab_size
    offsets, mask = weights.pop("d2t", None), weights.pop("t2d", None)
    require(
        size <= target_size,
        f"{name} scores {size} tokens, and the target has {target_size}; choose a head for a target of this "
        "vocabulary.",
    )
    if offsets is None:
        require(
            size == target_size,
            f"{name} scores {size} of the target's {target_size} tokens and has no d2t that says which; get it again.",
        )
        return
    require(
        offsets.shape == (size,) and not offsets.is_floating_point(),
        f"{name}: d2t is {list(offsets.shape)}, and the head scores {size} tokens; get it again.",
    )
    _check_offsets(name, offsets, mask, target_size)
    if size != target_size:
        ids = offsets + torch.arange(size, device=offsets.device)
        weights |= {"d2t": offsets, "t2d": torch.isin(torch.arange(target_size, device=offsets.device), ids)}


def _check_offsets(name: str | Path, offsets: torch.Tensor, mask: torch.Tensor | None, target_size: int) -> None:
    """Raise ValueError if `d2t` has ids in place of offsets, or leads to other ids than `t2d` marks, if it is there.

    Args:
        name: of the head.
        offsets: [V_d], `d2t`: token j of the head is j + d2t[j] of the target.
        mask: [V], `t2d`: whether the head has a token of the target.
        target_size: V.
    """
    size = len(offsets)
    remedy = "subtract torch.arange(len(d2t)) from it, so that token j of the head is j + d2t[j] of the target."
    ids = offsets + torch.arange(size, device=offsets.device)
    in_range = size == 0 or 0 <= int(ids[0]) <= int(ids[-1]) < target_size
    ascending = bool((ids.diff() > 0).all())
    if mask is None:
        marked = ids
        holds_ids = size > 1 and bool((offsets.diff() > 0).all())
    else:
        marked = mask.nonzero().flatten()
        holds_ids = torch.equal(offsets, marked)
    require(
        not holds_ids or size == target_size,
        f"{name}: d2t holds ids instead of offsets; {remedy}",
    )
    require(
        ascending and in_range,
        f"{name}: d2t leads to ids out of order, or that the target does not have; {remedy}",
    )
    require(
        torch.equal(ids, marked),
        f"{name}: d2t and t2d do not name the same tokens, so that one of them is wrong; {remedy}",
    )
