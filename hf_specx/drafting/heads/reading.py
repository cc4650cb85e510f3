"""Read published draft heads: whatever their form, as one config and tensors by one set of names."""

import re
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from hf_specx.common.errors import brief, is_int, require, similar
from hf_specx.common.wrappers import vocabulary

from .config import OF_BLOCKS, OF_EAGLE, HeadConfig, fields_of, layer_fields
from .files import HUB, read_config, read_weights
from .tensors import Weights, check_vocabulary, linear_layers


NAMES = (  # how the name of a tensor begins in some form, and how it begins here
    (r"^(model|medusa_head)\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^additional_layers\.(\d+)\.", lambda found: f"layers.{int(found[1]) + 1}."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^(layers\.[1-9]\d*)\.hidden_norm\.", r"\1.input_layernorm."),
)
OF_HEADS = re.compile(
    r"(model\.)?(midlayer\.|layers\.0\.hidden_norm\.|hidden_norm\.|fc\.weight)|(medusa_head\.)?\d+\.\d+\."
)
NOT_READ = re.compile(r"(verifier_norm|verifier_lm_head|.*rotary_emb)\.")  # copies of the target's, or computed
GIVE = "give layer_ids=, where 0 is the embeddings and l the output of l layers"
GEMMA = ("pre_feedforward_layernorm", "post_feedforward_layernorm", "layer_scalar", "v_norm")
CONVOLUTIONS = ("attention_conv", "mlp_conv", "candidate_selector")
MEANT = """
    speculators_model_type speculators_version speculators_config transformer_layer_config auto_map draft_vocab_size
    truncated_vocab_size target_hidden_size eagle_config dflash_config target_layer_ids num_target_layers
    eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids num_aux_hidden_states use_aux_norm norm_before_residual
    norm_before_fc fc_norm norm_output bias mask_token_id ptd_token_id pard_token block_size sample_from_anchor use_swa
    swa_window_size sliding_window_non_causal markov_rank markov_head_type enable_confidence_head
    confidence_head_with_markov medusa_num_heads medusa_num_layers base_model_name_or_path partial_rotary_factor
    rope_theta rope_scaling mrope_section layer_types model_type torch_dtype
""".split()  # noqa: SIM905
OF_TRAINING = re.compile(
    "num_anchors|max_anchors|ttt_length|embed_requires_grad|draft_num_hidden_layers|target_model_type|modal_type|auf|"
    "enable_sp_ulysses|emb_dim|gru_hidden_dim|pure_draft_prefix_len|loss_.*|lambda_.*|.*_alpha|.*_gamma|_.*"
)
ONLY = {  # options that have to have this value where they are given
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "rope_is_neox_style": True,
    "logit_scale": 1,
    "projector_type": "dflash",
}


def read_head(name: str | Path, target: PreTrainedModel, **loading: Any) -> tuple[HeadConfig, Weights]:
    """The config of a draft head, and its tensors in the precision of its files.

    What can be told from the names and shapes of tensors is told from them.

    Args:
        name: a folder, or an id on the Hub.
        target: the model whose states it reads.
        **loading: `HUB`, and `layer_ids`, in place of those in the files: 0 is the embeddings, l the output of l
            layers.

    Raises:
        ValueError: the files are no head, or none for this target; it says what is wrong.
    """
    known = (*HUB, "layer_ids")
    unknown = min(loading.keys() - set(known), default="")
    told = f"unknown option {unknown!r} for a draft head; {similar(unknown, known)}it takes {', '.join(known)}."
    require(not unknown, told)
    layer_ids = loading.pop("layer_ids", None)
    raw, found = read_config(name, **loading), read_weights(name, **loading)
    said = raw | (raw.get("eagle_config") or {}) | (raw.get("dflash_config") or {})
    weights = canonical(found)
    _check_supported(name, raw, said, weights)
    config = _config(name, raw, said, weights, target)
    if config.kind != "medusa":
        _read_ids(name, raw, config, weights, target, layer_ids)
        check_vocabulary(name, config, weights)
    return config, weights


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


def describes_head(raw: dict[str, Any]) -> bool:
    """Whether a config says that it is a draft head's; some say nothing of it."""
    keys = ("speculators_model_type", "medusa_num_heads", "eagle_config", "dflash_config", "draft_vocab_size")
    made_for = " ".join(map(str, raw.get("architectures") or ()))
    says = re.search("eagle3|dflash|dspark|medusa", made_for, re.IGNORECASE) is not None
    return says or any(key in raw for key in (*keys, "target_layer_ids"))


def is_head(name: str | Path, raw: dict[str, Any]) -> bool:
    """Whether the files of a repository or folder, with this config, are a draft head; if not, they are a model."""
    found = any(OF_HEADS.match(weight) for weight in read_weights(name, names_alone=True))
    told = f"{name} is ambiguous: its config.json is that of a draft head, and its tensors are none of one; load it "
    require(found or not describes_head(raw), f"{told}yourself, by DraftHead.from_pretrained(...) or as a model.")
    return found


def _check_supported(name: str | Path, raw: dict[str, Any], said: dict[str, Any], weights: Weights) -> None:
    """Refuse, by its name, what would change the head's forward and is not supported."""
    for parts, what in ((GEMMA, "blocks of Gemma"), (CONVOLUTIONS, "the convolutions of DFlash2")):
        part = next((weight for weight in sorted(weights) if any(part in weight for part in parts)), None)
        told = (
            f"{name} has {what} ({part}), which are not supported; choose an EAGLE-3, DFlash or DSpark head of plain"
        )
        require(part is None, f"{told} Llama or Qwen3 layers.")
    told = f"{name} is for {raw.get('model_type')}, whose blocks are not supported; choose a head of plain Llama or "
    require(not str(raw.get("model_type", "")).startswith("gemma"), f"{told}Qwen3 layers.")
    kind = raw.get("speculators_model_type", "eagle3")
    remedy = "use MtpDraft() for layers of the target." if kind == "mtp" else f"choose one of {', '.join(OF_EAGLE)}, "
    told = f"{name} has speculators_model_type={brief(kind)}, which is not supported; {remedy}"
    require(kind in (*OF_EAGLE, *OF_BLOCKS), told if kind == "mtp" else f"{told}{', '.join(OF_BLOCKS)}.")
    defaults = vars(LlamaConfig()).keys() | vars(Qwen3Config()).keys()
    for option, value in sorted(said.items()):
        known = option in MEANT or option in defaults or OF_TRAINING.fullmatch(option)
        right = value is None or value == ONLY.get(option, False) or (option not in ONLY and known)
        told = f"{name} has {option}={brief(value)} in its config.json, which is not supported; choose another head, "
        require(bool(right), f"{told}or take it out if it does not change what the head computes.")


def _config(
    name: str | Path, raw: dict[str, Any], said: dict[str, Any], weights: Weights, target: PreTrainedModel
) -> HeadConfig:
    """All of the config but which states the head reads."""
    text, tokens = target.config.get_text_config(decoder=True), vocabulary(target)
    medusa, layers = linear_layers(weights)
    if medusa:
        width = text.hidden_size
        fields = {"kind": "medusa", "hidden_size": width, "target_hidden_size": width, "vocab_size": tokens}
        fields |= {"layer_ids": [text.num_hidden_layers], "draft_vocab_size": tokens}
        fields |= {"medusa_num_heads": medusa, "medusa_num_layers": layers, "num_draft_tokens": medusa}
        return HeadConfig(**fields, target=raw.get("base_model_name_or_path") or "")
    kind = _kind(name, raw, weights)
    fields = fields_of(raw)
    if fields is raw:
        fields = layer_fields(said, "layers.0.self_attn.q_norm.weight" in weights)
    fields |= _shapes(name, said, fields, weights, tokens)
    made_for = {"tokens": fields["vocab_size"], "numbers in a state": said.get("target_hidden_size")}
    made_for |= {"layers": said.get("num_target_layers")}
    for what, ours in zip(made_for, (tokens, text.hidden_size, text.num_hidden_layers), strict=True):
        told = f"{name} is for a target with {made_for[what]} {what}, and {type(target).__name__} has {ours}; choose "
        require(made_for[what] in (None, ours), f"{told}a head that was made for this target.")
    fields |= {
        "kind": kind,
        "target_hidden_size": text.hidden_size,
        "norm_before_residual": bool(said.get("norm_before_residual")),
        "norm_output": bool(said.get("norm_output")),
        "markov_head_type": said.get("markov_head_type", "vanilla"),
        "target": fields.get("target") or target.name_or_path,
    }
    return HeadConfig(**fields | _block(name, raw, said, kind, tokens))


def _kind(name: str | Path, raw: dict[str, Any], weights: Weights) -> str:
    """What kind of head the files have, by their tensors; where they leave it open, by the config."""
    eagle = any(weight.endswith("layers.0.hidden_norm.weight") for weight in weights)
    told = f"{name} has neither layers.0.hidden_norm nor hidden_norm among its tensors, so it is no draft head of a "
    require(eagle or "hidden_norm.weight" in weights, f"{told}supported form; choose another.")
    stated = raw.get("speculators_model_type")
    spark = (
        "dspark" in str(raw.get("architectures")).lower() or "markov_rank" in raw or "markov_head" in str([*weights])
    )
    found = "dspark" if spark or stated == "dspark" else "dflash"
    if eagle:
        found = "peagle" if "mask_hidden" in weights or stated == "peagle" else "eagle3"
    told = f"{name} has speculators_model_type={stated!r} in its config.json and tensors of {found}; get it again."
    require(stated in (None, found), told)
    return found


def _shapes(
    name: str | Path, said: dict[str, Any], fields: dict[str, Any], weights: Weights, tokens: int
) -> dict[str, Any]:
    """The fields that follow from the tensors; `fields` are those of the config."""
    first = "layers.0.self_attn."
    needed = (f"{first}q_proj.weight", f"{first}k_proj.weight", "layers.0.mlp.gate_proj.weight", "norm.weight")
    missing = [weight for weight in ("fc.weight", *needed) if weight not in weights]
    told = f"{name} lacks {', '.join(missing)}; get it again, or choose a head that joins states of several layers."
    require(not missing, told)
    queries, keys, inner, width = (weights[weight].shape[0] for weight in needed)
    size, heads, norm = fields["head_dim"], fields["num_attention_heads"], weights.get(f"{first}q_norm.weight")
    size = size if norm is None else norm.numel()
    heads = heads if norm is None else queries // size
    told = (
        f"{name} has {heads} attention heads of {size} by its config.json, and {queries} rows in q_proj; get it again."
    )
    require(queries == heads * size and keys % size == 0, told)
    layers = 1 + max(int(found[1]) for weight in weights if (found := re.match(r"layers\.(\d+)\.", weight)))
    kinds, window = (fields["layer_types"] or ())[:layers] or None, fields["sliding_window"]
    if said.get("use_swa") and kinds is None:
        kinds, window = ["sliding_attention"] * layers, said.get("swa_window_size")
    sliding = "sliding_attention" in (kinds or ())
    told = f"{name} has layer_types={brief(kinds)} and sliding_window={brief(window)} for its {layers} layers; get it "
    require(kinds is None or (len(kinds) == layers and (not sliding or is_int(window))), f"{told}again.")
    confidence, markov = weights.get("confidence_head.proj.weight"), weights.get("markov_head.markov_w1.weight")
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys // size,
        "head_dim": size,
        "qk_norm": norm is not None,
        "attention_bias": f"{first}q_proj.bias" in weights,
        "output_bias": f"{first}o_proj.bias" in weights,
        "fc_bias": "fc.bias" in weights,
        "norm_before_fc": "input_norm.weight" in weights,
        "fc_norm": "fc_norm.0.weight" in weights,
        "layer_types": kinds,
        "sliding_window": window if sliding else None,
        "markov_rank": 0 if markov is None else markov.shape[-1],
        "confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None and confidence.shape[-1] > width,
        "own_embeddings": "embed_tokens.weight" in weights,
        "own_head": "lm_head.weight" in weights,
        "draft_vocab_size": weights["lm_head.weight"].shape[0] if "lm_head.weight" in weights else tokens,
        "dtype": weights["fc.weight"].dtype,
    }


def _block(name: str | Path, raw: dict[str, Any], said: dict[str, Any], kind: str, tokens: int) -> dict[str, Any]:
    """The fields of heads that propose a block at once."""
    block: Any = said.get("block_size", 8 if "speculators_model_type" in raw else None)
    told = f"{name} has block_size={brief(block)} in its config.json; it needs the positions of a block, 2 or more."
    require(kind not in OF_BLOCKS or (is_int(block) and block > 1), told)
    names = ("mask_token_id", "ptd_token_id", "pard_token")
    mask: Any = next((said[option] for option in names if said.get(option) is not None), None)
    told = f"{name} has mask_token_id={brief(mask)} in its config.json; it needs that of a token of the target."
    require(kind == "eagle3" or (is_int(mask) and 0 <= mask < tokens), told)
    anchor = bool(said.get("sample_from_anchor", kind == "dspark"))
    sizes = {"block_size": block, "sample_from_anchor": anchor} if kind in OF_BLOCKS else {}
    if sizes and "speculators_config" not in raw:
        sizes["num_draft_tokens"] = block - (not anchor)
    return sizes | {"mask_token_id": mask, "sliding_window_non_causal": bool(said.get("sliding_window_non_causal"))}


def _read_ids(
    name: str | Path, raw: dict[str, Any], config: HeadConfig, weights: Weights, target: PreTrainedModel, given: Any
) -> None:
    """Which states the head reads, as they are given, or as they stand in the files."""
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    joined, width = weights["fc.weight"].shape[-1], config.target_hidden_size
    told = f"{name} reads {joined} numbers a position, and the states of {type(target).__name__} have {width}; "
    require(joined % width == 0, f"{told}choose a head that was made for this target.")
    count = joined // width
    ids = _ids_in(name, raw, config.kind, depth, count) if given is None else given
    told = f"layer_ids={brief(ids)} of {name} are no list of numbers of 0 or more; {GIVE}."
    require(isinstance(ids, list | tuple) and all(is_int(number) and number >= 0 for number in ids), told)
    told = f"{name} has {len(ids)} layer ids ({ids}) and reads {count} states of {width} numbers; {GIVE}, {count} of "
    require(len(ids) == count, f"{told}them, or choose a head that was made for this target.")
    told = f"{name} reads the output of layer {max(ids)}, and {type(target).__name__} has {depth}; choose a head that "
    require(max(ids) <= depth, f"{told}was made for this target, or {GIVE}.")
    told = f"{name} reads the last state (layer id {depth}), which some mean before the final norm and others "
    require(given is not None or depth not in ids, f"{told}behind it; {GIVE}, {depth} for the one before the norm.")
    config.layer_ids = list(ids)


def _ids_in(name: str | Path, raw: dict[str, Any], kind: str, depth: int, count: int) -> Any:
    """The layer ids in files: where they stand says whether they count outputs of layers, or layers from 0."""
    key = "eagle_aux_hidden_state_layer_ids"
    nested, parts = raw.get("eagle_config") or {}, raw.get("dflash_config") or {}
    outputs = [raw.get(key), raw.get("aux_hidden_state_layer_ids")]
    layers = [nested.get(key), raw.get("target_layer_ids"), parts.get("target_layer_ids")]
    for ids in (*outputs, *layers):
        told = f"{name} has layer ids {brief(ids)} in its config.json, which is no list of numbers; {GIVE}."
        require(ids is None or (isinstance(ids, list) and all(map(is_int, ids))), told)
    found = [ids for ids in outputs if ids is not None] + [[number + 1 for number in ids] for ids in layers if ids]
    told = f"{name} has layer ids in two places, which mean different states ({brief(found)}); {GIVE}."
    require(all(ids == found[0] for ids in found), told)
    if found:
        return found[0]
    if kind in OF_EAGLE:
        return [2, depth // 2, depth - 3]
    spread = [round(1 + index * (depth - 4) / (count - 1)) for index in range(count)] if count > 1 else [depth // 2]
    return [number + 1 for number in spread]
