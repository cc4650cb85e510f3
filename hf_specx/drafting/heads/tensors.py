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
    (r"^additional_layers\.(\d+)\.", lambda found: f"layers.{int(found[1]) + 1}."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^(layers\.[1-9]\d*)\.hidden_norm\.", r"\1.input_layernorm."),
)
NOT_READ = re.compile(r"(verifier_norm|verifier_lm_head|.*rotary_emb)\.")  # copies of the target's, or computed


def canonical(weights: Weights) -> Weights:
    """Tensors by the names of the *speculators* form, without what the target has as well."""
    found: Weights = {}
    for name, tensor in weights.items():
        for pattern, beginning in NAMES:
            name = re.sub(pattern, beginning, name)
        require(name not in found, f"two tensors of the head are {name!r} by their names; keep one of them.")
        if NOT_READ.match(name) is None:
            found[name] = tensor
    embeddings = found.get("embed_tokens.weight")
    if embeddings is not None and embeddings.is_floating_point() and bool(embeddings.isnan().all()):
        del found["embed_tokens.weight"]  # the trainer left them out
    return found


def pairs_to_halves(weights: Weights, size: int, turning: int) -> None:
    """Reorder the channels of queries and keys: of each head of `size` the first `turning` ones turn in pairs of
    neighbours, and here one from each half. Attention does not see in which order channels are.
    """
    order = torch.arange(size, device="cpu")
    order[:turning] = torch.arange(turning, device="cpu").view(-1, 2).T.flatten()
    for name, tensor in weights.items():
        if re.search(r"self_attn\.[qk]_(proj|norm)\.", name):
            weights[name] = tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1)


def linear_layers(weights: Weights) -> tuple[int, int]:
    """Of Medusa: how many heads there are, and how many layers each has before its scores; (0, 0) for other heads."""
    heads = [int(found[1]) for name in weights if (found := re.fullmatch(r"(\d+)\.\d+\.weight", name))]
    layers = [int(found[1]) for name in weights if (found := re.fullmatch(r"0\.(\d+)\.weight", name))]
    return max(heads, default=-1) + 1, max(layers, default=0)


def check_tensors(name: str | Path, kind: str, wanted: Weights, weights: Weights) -> None:
    """Whether the tensors of a head of this kind are those that are `wanted`, by name and shape."""
    missing, left = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    told = f"{name} lacks {len(missing)} tensors of a head of kind {kind}: {', '.join(missing[:5])}; get it again, or "
    require(not missing, f"{told}choose another head.")
    told = f"{name} has {len(left)} tensors that a head of kind {kind} does not have: {', '.join(left[:5])}; choose a "
    require(not left, f"{told}head of a supported form.")
    for tensor, like in wanted.items():
        found, shape = list(weights[tensor].shape), list(like.shape)
        told = f"{name}: {tensor!r} is {found}, and by the other tensors and the config it is {shape}; get it again, "
        require(found == shape, f"{told}or choose another head.")


def check_vocabulary(name: str | Path, config: HeadConfig, weights: Weights) -> None:
    """Whether the tokens of a head are tokens of the target, and its states can be those that it has no tables for.

    The tables that say which tokens it has are there afterwards where these are not all.
    """
    width, states = config.hidden_size, config.target_hidden_size
    for part, own in (("embed_tokens", config.own_embeddings), ("lm_head", config.own_head)):
        told = f"{name} has states of {width} numbers and no {part} of its own, and the target's are of {states}; "
        require(own or width == states, f"{told}get it again, or choose another head.")
    number, total = config.draft_vocab_size, config.vocab_size
    offsets, kept = weights.pop("d2t", None), weights.pop("t2d", None)
    told = f"{name} scores {number} tokens, and the target has {total}; choose a head for a target of this vocabulary."
    require(number <= total, told)
    if offsets is None:
        told = f"{name} scores {number} of the target's {total} tokens and has no d2t that says which; get it again."
        require(number == total, told)
        return
    told = f"{name}: d2t is {list(offsets.shape)}, and the head scores {number} tokens; get it again."
    require(offsets.shape == (number,) and not offsets.is_floating_point(), told)
    remedy = "subtract torch.arange(len(d2t)) from it, so that token j of the head is j + d2t[j] of the target."
    ids = offsets + torch.arange(number, device=offsets.device)
    ascend = bool((ids.diff() > 0).all()) and (number == 0 or 0 <= int(ids[0]) <= int(ids[-1]) < total)
    every = torch.arange(total, device=offsets.device)
    known = every if kept is None else kept.nonzero().flatten()
    holds_ids = torch.equal(offsets, known) if kept is not None else number > 1 and bool((offsets.diff() > 0).all())
    require(not holds_ids or number == total, f"{name}: d2t holds ids instead of offsets; {remedy}")
    require(ascend, f"{name}: d2t leads to ids out of order, or that the target does not have; {remedy}")
    told = f"{name}: d2t and t2d do not name the same tokens, so that one of them is wrong; {remedy}"
    require(kept is None or torch.equal(ids, known), told)
    if number != total:
        weights |= {"d2t": offsets, "t2d": torch.isin(every, ids)}
