"""Tiny random draft heads, and their files in every form in which heads are published."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


HEADS, GROUPS, HEAD_DIM, INNER = 4, 2, 8, 48
THETA, EPS = 500000.0, 1e-5


@dataclass
class TinyHead:
    """A head in the words of the papers; `weights` by the names of the *speculators* form.

    `layer_ids` are indices of transformers' hidden states, except that the number of layers is the output of the last
    one before the final norm.
    """

    kind: str
    weights: dict[str, Tensor]
    layer_ids: list[int]
    vocab: int
    layers: int = 1
    theta: float = THETA
    rotary_factor: float = 1.0  # as configs say it; layers ignore it unless positions are scaled
    scaling: dict | None = None  # of positions, as configs say it
    turning: int | None = None  # channels that turn; None is all
    in_pairs: bool = False  # whether neighbours turn together
    norm_before_residual: bool = False
    norm_output: bool = False
    last_norm: bool = True  # whether scores are of the normed state
    mask_token: int | None = None
    block: int = 0
    from_anchor: bool = False
    markov: str | None = None
    layer_types: list[str] | None = None
    window: int | None = None
    window_non_causal: bool = False
    causal: bool = False
    parts: dict = field(default_factory=dict)  # more entries of the config's dflash_config
    top_k: int = 4  # tokens that DFlash2 selects from
    multiplier: float = 1.0
    softcap: float = 0.0
    embedding_scale: float = 1.0
    pure: int = 1  # places that Domino does not correct
    form: str = "speculators"  # of its files, one of the `FORMS`
    extra: dict = field(default_factory=dict)  # more entries of config.json

    @property
    def width(self) -> int:
        return self.weights["layers.0.input_layernorm.weight"].numel()

    @property
    def draft_vocab(self) -> int:
        return self.weights["lm_head.weight"].shape[0] if "lm_head.weight" in self.weights else self.vocab


def random_head(
    kind: str = "eagle3",
    *,
    vocab: int = 48,
    draft_vocab: int | None = None,
    width: int = 32,
    states: int = 32,
    layers: int = 1,
    layer_ids: tuple[int, ...] = (2, 4, 5),
    qk_norm: bool | None = None,
    biases: bool = False,
    norms: str = "",
    own_embeddings: bool | None = None,
    own_head: bool | None = None,
    confidence: bool = False,
    heads: int = 3,
    rank: int = 6,
    taps: int = 2,
    group: int = 8,
    mask_vector: bool = False,
    seed: int = 0,
    **settings,
) -> TinyHead:
    """A head with random weights.

    Args:
        draft_vocab: tokens that it scores; None is all.
        width, states: of the head, and of the target's states.
        norms: "one" norm before `fc`, or one for "each" state.
        mask_vector: whether masks have a vector of their own.
        heads, rank: of Medusa, and of DSpark's and DFlash2's part that looks at the token before.
        taps, group: of DFlash2's convolutions, positions and channels.
        **settings: fields of `TinyHead`.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return 1.2 * torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    if kind == "medusa":
        found = {}
        for head in range(heads):
            for layer in range(layers):
                found[f"{head}.{layer}.linear.weight"] = matrix(states, states)
                found[f"{head}.{layer}.linear.bias"] = 0.3 * matrix(states)
            found[f"{head}.{layers}.weight"] = matrix(vocab, states)
        return TinyHead(kind, found, list(layer_ids[:0]), vocab, layers, **{"form": "medusa"} | settings)
    eagle, joined = kind in ("eagle3", "peagle"), len(layer_ids) * states
    qk_norm = (not eagle) if qk_norm is None else qk_norm
    found = {"fc.weight": matrix(width, joined), "norm.weight": norm(width)}
    for layer in range(layers):
        name, into = f"layers.{layer}.", 2 * width if eagle and layer == 0 else width
        sizes = {"q": HEADS * HEAD_DIM, "k": GROUPS * HEAD_DIM, "v": GROUPS * HEAD_DIM}
        for part, size in sizes.items():
            found[f"{name}self_attn.{part}_proj.weight"] = 2 * matrix(size, into)
            if biases:
                found[f"{name}self_attn.{part}_proj.bias"] = matrix(size)
        found[f"{name}self_attn.o_proj.weight"] = matrix(width, HEADS * HEAD_DIM)
        if biases:
            found[f"{name}self_attn.o_proj.bias"] = matrix(width)
        if qk_norm:
            found |= {f"{name}self_attn.{part}_norm.weight": norm(HEAD_DIM) for part in "qk"}
        found |= {f"{name}mlp.{part}_proj.weight": matrix(INNER, width) for part in ("gate", "up")}
        found[f"{name}mlp.down_proj.weight"] = matrix(width, INNER)
        found |= {f"{name}{which}_layernorm.weight": norm(width) for which in ("input", "post_attention")}
    found["layers.0.hidden_norm.weight" if eagle else "hidden_norm.weight"] = norm(width)
    if norms == "one":
        found["input_norm.weight"] = norm(joined)
    if norms == "each":
        found |= {f"fc_norm.{index}.weight": norm(states) for index in range(len(layer_ids))}
    if kind == "peagle":
        found["mask_hidden"] = matrix(1, 1, joined) * joined**0.5
    if width != states if own_embeddings is None else own_embeddings:
        found["embed_tokens.weight"] = matrix(vocab, width) * width**0.5
    scored = vocab if draft_vocab is None else draft_vocab
    if (scored != vocab or width != states) if own_head is None else own_head:
        found["lm_head.weight"] = matrix(scored, width)
    if scored != vocab:
        kept = torch.randperm(vocab, generator=generator)[:scored].sort().values
        found |= {"d2t": kept - torch.arange(scored), "t2d": torch.isin(torch.arange(vocab), kept)}
    if kind == "dspark":
        settings = {"markov": "vanilla"} | settings
        found |= {"markov_head.markov_w1.weight": matrix(vocab, rank) * rank**0.5}
        found |= {"markov_head.markov_w2.weight": matrix(scored, rank)}
        inner = {"gated": ("gate_proj", rank, width + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + width)}
        if settings["markov"] in inner:
            name, out, into = inner[settings["markov"]]
            found |= {f"markov_head.{name}.weight": matrix(out, into), f"markov_head.{name}.bias": matrix(out)}
        if confidence:
            found["confidence_head.proj.weight"] = matrix(1, width + rank)
            found["confidence_head.proj.bias"] = matrix(1)
    if mask_vector:
        found["mask_embedding"] = 3 * matrix(width) * width**0.5
    if kind == "domino":
        found |= {
            "prefix_gru.weight_ih_l0": 2 * matrix(3 * rank, width),
            "prefix_gru.weight_hh_l0": 2 * matrix(3 * rank, rank),
        }
        found |= {"embed_proj.0.weight": 2 * matrix(7, width + rank), "embed_proj.2.weight": 2 * matrix(scored, 7)}
    if kind == "dflash2":
        for name in (f"layers.{layer}.{part}_conv." for layer in range(layers) for part in ("attention", "mlp")):
            found[f"{name}base_kernel"] = 0.6 * torch.randn(2, taps, width, generator=generator)
            found[f"{name}kernel_projection.weight"] = matrix(2 * taps * width // group, width)
        for part in ("predecessor", "successor"):
            found[f"candidate_selector.{part}_codebook"] = matrix(vocab, rank) * rank**0.5
        found["candidate_selector.hidden_projection.weight"] = matrix(rank, width)
        settings = {"window_non_causal": True} | settings
    if not eagle:
        settings = {"block": 5, "from_anchor": kind == "dspark"} | settings
    if kind != "eagle3":
        settings = {"mask_token": vocab - 1} | settings
    return TinyHead(kind, found, list(layer_ids), vocab, layers, **settings)


def write(head: TinyHead, folder: Path, form: str = "") -> Path:
    """Write the files of a head in its own form or in another; returns the folder."""
    form = form or head.form
    folder.mkdir(parents=True, exist_ok=True)
    config, weights = FORMS[form](head)
    (folder / "config.json").write_text(json.dumps(config | head.extra))
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    if "mask_embedding" in weights:
        vector = weights.pop("mask_embedding")
        stored = vector[None] if head.kind == "peagle" else {"mask_token_id": head.mask_token, "embedding": vector}
        torch.save(stored, folder / "mask_embedding.pt")
    if form in ("safeailab", "medusa"):
        torch.save(weights, folder / ("pytorch_model.bin" if form == "safeailab" else "medusa_lm_head.pt"))
    else:
        file = "medusa_lm_head.safetensors" if form == "medusa safetensors" else "model.safetensors"
        save_file(weights, folder / file)
    return folder


def _layer(head: TinyHead) -> dict:
    """The config of a decoder layer."""
    qk_norm = "layers.0.self_attn.q_norm.weight" in head.weights
    found = {"model_type": "qwen3" if qk_norm else "llama", "hidden_size": head.width, "intermediate_size": INNER}
    found |= {"num_hidden_layers": head.layers, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
    found |= {"head_dim": HEAD_DIM, "vocab_size": head.vocab, "rms_norm_eps": EPS, "rope_theta": head.theta}
    found |= {"attention_bias": "layers.0.self_attn.q_proj.bias" in head.weights}
    if head.rotary_factor != 1:
        found["partial_rotary_factor"] = head.rotary_factor
    if head.scaling or head.turning:
        found["rope_scaling"] = {"rope_type": "default"} | (head.scaling or {})
    if head.turning:
        found["rope_scaling"]["rope_dim"] = head.turning
    if head.in_pairs:
        found["is_neox_style"] = False
    if head.layer_types:
        found |= {"layer_types": head.layer_types, "sliding_window": head.window, "use_sliding_window": True}
    return found


def _speculators(head: TinyHead) -> tuple[dict, dict]:
    eagle = head.kind in ("eagle3", "peagle")
    number = head.block - (not head.from_anchor) if head.block else 3
    greedy = {"proposal_type": "greedy", "speculative_tokens": number, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    proposal = {"algorithm": head.kind, "default_proposal_method": "greedy", "proposal_methods": [greedy]}
    proposal["verifier"] = {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    names = {"eagle3": "Eagle3Speculator", "peagle": "Eagle3Speculator", "dflash2": "DFlash2DraftModel"}
    config = {"architectures": [names.get(head.kind, "DFlashSpeculator")]}
    config |= {"speculators_model_type": head.kind, "speculators_version": "0.9.0", "speculators_config": proposal}
    config |= {"draft_vocab_size": head.draft_vocab, "target_hidden_size": None}
    config["transformer_layer_config"] = _layer(head)
    if eagle:
        config |= {"norm_before_residual": head.norm_before_residual, "norm_output": head.norm_output}
        config |= {"norm_before_fc": "input_norm.weight" in head.weights, "embed_requires_grad": head.kind == "peagle"}
        config |= {"fc_norm": "fc_norm.0.weight" in head.weights, "eagle_aux_hidden_state_layer_ids": head.layer_ids}
    else:
        config |= {"block_size": head.block, "aux_hidden_state_layer_ids": head.layer_ids}
        config |= {"sliding_window_non_causal": head.window_non_causal, "sample_from_anchor": head.from_anchor}
    if head.mask_token is not None:
        config["mask_token_id"] = head.mask_token
    if not head.last_norm:
        config["use_last_layernorm"] = False
    return config | _markov(head) | _selector(head) | _recurrent(head), head.weights


def _old_speculators(head: TinyHead) -> tuple[dict, dict]:
    """Before there was a layout from the anchor; the number of candidates is all of a block."""
    config, weights = _speculators(head)
    del config["sample_from_anchor"]
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = head.block - 1
    return config, weights


def _markov(head: TinyHead) -> dict:
    """Of DSpark's part that looks at the token before."""
    if head.kind != "dspark":
        return {}
    sure = "confidence_head.proj.weight" in head.weights
    config = {"markov_rank": head.weights["markov_head.markov_w1.weight"].shape[1], "markov_head_type": head.markov}
    return config | {"enable_confidence_head": sure, "confidence_head_with_markov": sure}


def _selector(head: TinyHead) -> dict:
    """What DFlash2 has beside DFlash."""
    if head.kind != "dflash2":
        return {}
    taps, width = head.weights["layers.0.attention_conv.base_kernel"].shape[1:]
    groups = len(head.weights["layers.0.attention_conv.kernel_projection.weight"]) // (2 * taps)
    rank = head.weights["candidate_selector.predecessor_codebook"].shape[1]
    config = {"conv_kernel_size": taps, "conv_group_size": width // groups, "selector_rank": rank}
    config |= {"selector_top_k": head.top_k, "output_multiplier": head.multiplier}
    return config | {"final_logit_softcapping": head.softcap or None, "input_embedding_scale": head.embedding_scale}


def _flat(head: TinyHead) -> dict:
    return _layer(head) | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": head.draft_vocab}


def _midlayer(head: TinyHead) -> dict[str, Tensor]:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in head.weights.items()}


def _safeailab(head: TinyHead) -> tuple[dict, dict]:
    """Its layers are always the default ones, and rope_theta is left out at 10000."""
    config = _flat(head)
    if config["rope_theta"] == 10000.0:
        del config["rope_theta"]
    return config | {"num_hidden_layers": 40}, _midlayer(head)


def _specforge(head: TinyHead) -> tuple[dict, dict]:
    ids = {"eagle_aux_hidden_state_layer_ids": [number - 1 for number in head.layer_ids], "use_aux_hidden_state": True}
    config = _flat(head) | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": ids}
    names = {f"fc_norm.{index}.": f"aux_norm_{place}." for index, place in enumerate(("low", "mid", "high"))}
    weights = {}
    for name, tensor in _midlayer(head).items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        weights[name] = tensor
    return config, weights


def _angelslim(head: TinyHead) -> tuple[dict, dict]:
    config, weights = _specforge(head)
    more = {"architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "llama", "modal_type": "LLM"}
    return config | more, weights


def _deepspec(head: TinyHead) -> tuple[dict, dict]:
    names = {"eagle3": "Qwen3Eagle3Model", "dflash": "Qwen3DSparkModel", "dspark": "Qwen3DSparkModel"}
    config = _layer(head) | {"architectures": [names[head.kind]], "num_target_layers": 8, "tie_word_embeddings": False}
    config |= {"target_layer_ids": [number - 1 for number in head.layer_ids], "draft_num_hidden_layers": head.layers}
    if head.kind == "eagle3":
        return config | {"ttt_length": 7}, head.weights
    config |= {"block_size": head.block, "mask_token_id": head.mask_token, "num_anchors": 512, "markov_rank": 0}
    return config | _markov(head), head.weights


def _zlab(head: TinyHead) -> tuple[dict, dict]:
    parts = {"target_layer_ids": [number - 1 for number in head.layer_ids], "mask_token_id": head.mask_token}
    config = _layer(head) | {"architectures": ["DFlashDraftModel"]}
    config["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    config |= {"block_size": head.block, "num_target_layers": 8, "dflash_config": parts | head.parts}
    return config, head.weights


def _specforge_dspark(head: TinyHead) -> tuple[dict, dict]:
    """All that is DSpark's stands in a part of the config."""
    config, weights = _zlab(head)
    more = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0, **_markov(head)}
    config["dflash_config"] |= more
    return config | {"architectures": ["DSparkDraftModel"]}, weights


def _early_specforge_dspark(head: TinyHead) -> tuple[dict, dict]:
    config, weights = _specforge_dspark(head)
    own = ("markov_head.", "confidence_head.")
    return config, {f"{'logit_head.' * name.startswith(own)}{name}": tensor for name, tensor in weights.items()}


def _zlab2(head: TinyHead) -> tuple[dict, dict]:
    """The options of DFlash2 all stand in a part of its config; in published files layers with a window see all."""
    config, weights = _zlab(head)
    config["dflash_config"] |= {"block_size": config.pop("block_size")} | _selector(head)
    causal = {"is_causal": False} if head.window_non_causal else {}
    return config | {"architectures": ["DFlash2DraftModel"], "auto_map": None} | causal, weights


def _recurrent(head: TinyHead) -> dict:
    """What Domino has beside DFlash."""
    if head.kind != "domino":
        return {}
    size, inner = (head.weights[name].shape[-1] for name in ("prefix_gru.weight_hh_l0", "embed_proj.2.weight"))
    return {"gru_hidden_dim": size, "emb_dim": inner, "pure_draft_prefix_len": head.pure}


def _domino(head: TinyHead) -> tuple[dict, dict]:
    """By SpecForge; its architecture is that of DFlash."""
    config, weights = _zlab(head)
    more = {"projector_type": "domino", "shift_label": head.from_anchor}
    config["dflash_config"] |= more | _recurrent(head)
    return config, weights


def _early_domino(head: TinyHead) -> tuple[dict, dict]:
    config, weights = _domino(head)
    inside = ("prefix_gru.", "embed_proj.")
    return config, {f"{'logit_head.' * name.startswith(inside)}{name}": tensor for name, tensor in weights.items()}


def _medusa(head: TinyHead) -> tuple[dict, dict]:
    """Counts in configs can be wrong: the weights have the last word."""
    return {"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}, head.weights


FORMS = {
    "speculators": _speculators,
    "safeailab": _safeailab,
    "specforge": _specforge,
    "angelslim": _angelslim,
    "deepspec": _deepspec,
    "z-lab": _zlab,
    "z-lab 2": _zlab2,
    "domino": _domino,
    "early domino": _early_domino,
    "old speculators": _old_speculators,
    "specforge dspark": _specforge_dspark,
    "early specforge dspark": _early_specforge_dspark,
    "medusa": _medusa,
    "medusa safetensors": _medusa,
}
