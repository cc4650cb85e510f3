"""Read published draft heads: whatever their form, as one config and tensors by one set of names."""

import re
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_specx.common.checkpoints import HUB, read_config, read_weights
from hf_specx.common.errors import brief, is_int, require, similar
from hf_specx.common.wrappers import public_name, vocabulary

from .config import OF_BLOCKS, OF_DFLASH2, OF_EAGLE, OF_LAYERS, HeadConfig
from .dflash2 import dflash2_fields, is_dflash2
from .tensors import Weights, canonical, check_vocabulary, linear_layers


OF_HEADS = re.compile(
    r"(model\.)?(midlayer\.|layers\.0\.hidden_norm\.|hidden_norm\.|fc\.weight)|(medusa_head\.)?\d+\.\d+\."
)
OF_CONFIGS = {"speculators_model_type", "medusa_num_heads", "eagle_config", "dflash_config", "draft_vocab_size"}
OF_CONFIGS |= {"target_layer_ids"}
GIVE = "give layer_ids=, where 0 is the embeddings and l the output of l layers"
GEMMA = ("pre_feedforward_layernorm", "post_feedforward_layernorm", "layer_scalar", "v_norm")
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
ONLY: dict[str, tuple[Any, ...]] = {  # options that have to have one of these values where they are given
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "hidden_act": ("silu",),
    "rope_is_neox_style": (True,),
    "logit_scale": (1,),
    "projector_type": ("dflash",),
    "markov_head_type": ("vanilla", "gated", "rnn"),
}
IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_IDS = (  # where layer ids stand: in which part, by which name, and what they are less than outputs of layers
    (None, IDS, 0),
    (None, "aux_hidden_state_layer_ids", 0),
    ("eagle_config", IDS, 1),
    (None, "target_layer_ids", 1),
    ("dflash_config", "target_layer_ids", 1),
)
ATTENTION = "layers.0.self_attn."
THERE = {  # a field that says whether there is a tensor, and which
    "qk_norm": f"{ATTENTION}q_norm.weight",
    "attention_bias": f"{ATTENTION}q_proj.bias",
    "output_bias": f"{ATTENTION}o_proj.bias",
    "fc_bias": "fc.bias",
    "norm_before_fc": "input_norm.weight",
    "fc_norm": "fc_norm.0.weight",
    "confidence_head": "confidence_head.proj.weight",
    "own_embeddings": "embed_tokens.weight",
    "own_head": "lm_head.weight",
}
STATED = ("norm_before_residual", "norm_output", "sliding_window_non_causal", "markov_head_type")  # not by tensors


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
    try:
        reader = Reader(name, raw, canonical(found), target)
        return reader.config(layer_ids), reader.weights
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{name} has a value of a wrong type in its config.json ({error}); get it again.") from error


def is_head(name: str | Path, raw: dict[str, Any], **hub: Any) -> bool:
    """Whether the files of a repository or folder, with this config, are a draft head; if not, they are a model."""
    found = any(OF_HEADS.match(weight) for weight in read_weights(name, names_alone=True, **hub))
    made_for = str(raw.get("architectures"))
    said = bool(OF_CONFIGS & raw.keys()) or re.search("eagle3|dflash|dspark|medusa", made_for, re.IGNORECASE)
    told = f"{name} is ambiguous: its config.json is that of a draft head, and its tensors are none of one; load it "
    require(found or not said, f"{told}yourself, by DraftHead.from_pretrained(...) or as a model.")
    return found


class Reader:
    """The files of a draft head, with its tensors by the names of *speculators*, beside the target that it is for."""

    def __init__(self, name: str | Path, raw: dict[str, Any], weights: Weights, target: PreTrainedModel):
        self.name, self.raw, self.weights, self.target = name, raw, weights, target
        self.text, self.tokens = target.config.get_text_config(decoder=True), vocabulary(target)
        self.said = dict(raw)  # with the options of parts of it
        for part in ("transformer_layer_config", "eagle_config", "dflash_config"):
            self.said |= raw.get(part) or {}

    def need(self, ok: Any, told: str) -> None:
        """Refuse the head with its name unless `ok`."""
        require(bool(ok), f"{self.name} {told}")

    def config(self, layer_ids: Any) -> HeadConfig:
        """What the head is; with layer ids that the user gives, or None."""
        self._check_supported()
        medusa, layers = linear_layers(self.weights)
        if medusa:
            return self._medusa(medusa, layers)
        kind, qk_norm = self._kind(), THERE["qk_norm"] in self.weights
        fields = self._layer(qk_norm)
        fields |= self._shapes(fields) | {field: tensor in self.weights for field, tensor in THERE.items()}
        fields |= {field: self.said[field] for field in STATED if self.said.get(field)}
        fields |= dflash2_fields(self.raw, self.said, self.weights, self.need) if kind == "dflash2" else {}
        self._check_target(fields["vocab_size"])
        fields |= {"kind": kind, "target_hidden_size": self.text.hidden_size} | self._proposal(kind)
        config = HeadConfig(**fields, layer_ids=self._layer_ids(kind, layer_ids))
        check_vocabulary(self.name, config, self.weights)
        return config

    def _check_supported(self) -> None:
        """Refuse, by its name, what would change the head's forward and is not supported."""
        plain = "are not supported; choose an EAGLE-3, DFlash or DSpark head of plain Llama or Qwen3 layers."
        part = next((weight for weight in sorted(self.weights) if any(part in weight for part in GEMMA)), None)
        self.need(part is None, f"has blocks of Gemma ({part}), which {plain}")
        model_type = self.raw.get("model_type", "")
        self.need(not str(model_type).startswith("gemma"), f"is for {model_type}, whose blocks {plain}")
        told = "has speculators_model_type='mtp', which is not supported; use MtpDraft() for layers of the target."
        self.need(self.raw.get("speculators_model_type") != "mtp", told)
        defaults = vars(LlamaConfig()).keys() | vars(Qwen3Config()).keys()
        defaults |= set(OF_DFLASH2 if is_dflash2(self.raw, self.weights) else ())
        for option, value in sorted(self.said.items()):
            known = option in MEANT or option in defaults or OF_TRAINING.fullmatch(option)
            right = value is None or value in ONLY.get(option, (False,)) or (option not in ONLY and known)
            told = f"has {option}={brief(value)} in its config.json, which is not supported; choose another head, or "
            self.need(right, f"{told}take it out if it does not change what the head computes.")

    def _check_target(self, tokens: int) -> None:
        """Refuse a head whose config says that it was made for a target of other sizes."""
        width, layers = self.said.get("target_hidden_size"), self.said.get("num_target_layers")
        sizes = [("tokens", tokens, self.tokens), ("numbers in a state", width, self.text.hidden_size)]
        for what, size, ours in (*sizes, ("layers", layers, self.text.num_hidden_layers)):
            told = f"is for a target with {size} {what}, and {type(self.target).__name__} has {ours}; choose a head "
            self.need(size in (None, ours), f"{told}that was made for this target.")

    def _medusa(self, heads: int, layers: int) -> HeadConfig:
        """The config of Medusa, whose counts are those of its tensors."""
        width = self.text.hidden_size
        fields = {"kind": "medusa", "hidden_size": width, "target_hidden_size": width, "vocab_size": self.tokens}
        fields |= {"layer_ids": [self.text.num_hidden_layers], "draft_vocab_size": self.tokens}
        fields |= {"medusa_num_heads": heads, "medusa_num_layers": layers, "num_draft_tokens": heads}
        return HeadConfig(**fields, target=self.raw.get("base_model_name_or_path") or "")

    def _kind(self) -> str:
        """What kind of head the files have, by their tensors; where they leave it open, by the config."""
        eagle = any(weight.endswith("layers.0.hidden_norm.weight") for weight in self.weights)
        told = "has neither layers.0.hidden_norm nor hidden_norm among its tensors, so it is no draft head of a "
        self.need(eagle or "hidden_norm.weight" in self.weights, f"{told}supported form; choose another.")
        stated, made_for = self.raw.get("speculators_model_type"), str(self.raw.get("architectures")).lower()
        spark = "dspark" in made_for or "markov_rank" in self.raw or "markov_head" in str([*self.weights])
        found = "dspark" if spark or stated == "dspark" else "dflash"
        found = "dflash2" if is_dflash2(self.raw, self.weights) else found
        if eagle:
            found = "peagle" if "mask_hidden" in self.weights or stated == "peagle" else "eagle3"
        told = f"has speculators_model_type={brief(stated)} in its config.json and tensors of {found}; get it again, "
        self.need(stated in (None, found), f"{told}or choose one of {', '.join((*OF_EAGLE, *OF_BLOCKS))}.")
        return found

    def _layer(self, qk_norm: bool) -> dict[str, Any]:
        """The fields that the config of a layer has; what is absent there is the default of its architecture."""
        names = {*OF_LAYERS, "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
        given = {name: self.said[name] for name in names - {"layer_types"} if self.said.get(name) is not None}
        architecture: Any = Qwen3Config if qk_norm else LlamaConfig
        try:
            known = architecture(**given)
        except Exception as error:  # of a type that only the Hub's library has
            raise ValueError(f"{self.name} has a config of its layers that transformers refuses: {error}") from error
        rope = dict(known.rope_parameters or {})
        rope.pop("mrope_section", None)  # text has one position, and that of pictures is one of three
        if rope.get("rope_type") == "mrope":
            rope["rope_type"] = "default"
        told = f"has rope_type={brief(rope['rope_type'])} in its config.json, which is not supported; choose another."
        self.need(rope["rope_type"] in ("default", *ROPE_INIT_FUNCTIONS), told)
        return {name: getattr(known, name, None) for name in OF_LAYERS} | {"rope_parameters": rope}

    def _shapes(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields that follow from shapes of tensors; `fields` are those of the config."""
        weights, projections = self.weights, (f"{ATTENTION}q_proj.weight", f"{ATTENTION}k_proj.weight")
        needed = ("fc.weight", *projections, "layers.0.mlp.gate_proj.weight", "norm.weight")
        missing = [weight for weight in needed if weight not in weights]
        told = f"lacks {', '.join(missing)}; get it again, or choose a head that joins states of several layers."
        self.need(not missing, told)
        _, queries, keys, inner, width = (weights[weight].shape[0] for weight in needed)
        size, heads, norm = fields["head_dim"], fields["num_attention_heads"], weights.get(THERE["qk_norm"])
        size = size if norm is None else norm.numel()
        heads = heads if norm is None else queries // size
        told = f"has {heads} attention heads of {size} by its config.json, and {queries} rows in q_proj; get it again."
        self.need(queries == heads * size and keys % size == 0, told)
        layers = 1 + max(int(found[1]) for weight in weights if (found := re.match(r"layers\.(\d+)\.", weight)))
        none = weights["fc.weight"].new_zeros(0, 0)
        confidence = weights.get(THERE["confidence_head"], none)
        return self._windows(layers) | {
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": keys // size,
            "head_dim": size,
            "markov_rank": weights.get("markov_head.markov_w1.weight", none).shape[-1],
            "confidence_head_with_markov": confidence.shape[-1] > width,
            "draft_vocab_size": len(weights[THERE["own_head"]]) if THERE["own_head"] in weights else self.tokens,
            "dtype": weights["fc.weight"].dtype,
        }

    def _windows(self, layers: int) -> dict[str, Any]:
        """Which layers see a window, and its size."""
        kinds, window = (self.said.get("layer_types") or ())[:layers] or None, self.said.get("sliding_window")
        if self.said.get("use_swa") and kinds is None:
            kinds, window = ["sliding_attention"] * layers, self.said.get("swa_window_size")
        sliding = "sliding_attention" in (kinds or ())
        told = f"has layer_types={brief(kinds)} and sliding_window={brief(window)} for its {layers} layers; get it "
        self.need(kinds is None or (len(kinds) == layers and (not sliding or is_int(window))), f"{told}again.")
        return {"layer_types": kinds, "sliding_window": window if sliding else None}

    def _proposal(self, kind: str) -> dict[str, Any]:
        """How it drafts, and for whom."""
        proposal = self.raw.get("speculators_config") or {}
        methods, verifier = proposal.get("proposal_methods") or [{}], proposal.get("verifier") or {}
        default = proposal.get("default_proposal_method")
        method = next((method for method in methods if method.get("proposal_type") == default), methods[0])
        masks = (self.said.get(name) for name in ("mask_token_id", "ptd_token_id", "pard_token"))
        mask: Any = next((given for given in masks if given is not None), None)
        told = f"has mask_token_id={brief(mask)} in its config.json; it needs that of a token of the target."
        self.need(kind == "eagle3" or (is_int(mask) and 0 <= mask < self.tokens), told)
        found = {
            "mask_token_id": mask,
            "num_draft_tokens": method.get("speculative_tokens", 5),
            "target": verifier.get("name_or_path") or public_name(self.target),
            "target_architectures": verifier.get("architectures") or None,
        }
        if kind in OF_EAGLE:
            return found
        block: Any = self.said.get("block_size", 8 if "speculators_model_type" in self.raw else None)
        told = f"has block_size={brief(block)} in its config.json; it needs the positions of a block, 2 or more."
        self.need(is_int(block) and block > 1, told)
        anchor = bool(self.said.get("sample_from_anchor", kind == "dspark"))
        if not proposal:
            found["num_draft_tokens"] = block - (not anchor)
        return found | {"block_size": block, "sample_from_anchor": anchor}

    def _layer_ids(self, kind: str, given: Any) -> list[int]:
        """Which states the head reads, as they are given, or as they stand in the files."""
        depth, width, model = self.text.num_hidden_layers, self.text.hidden_size, type(self.target).__name__
        joined = self.weights["fc.weight"].shape[-1]
        told = f"reads {joined} numbers a position, and the states of {model} have {width}; choose a head that was "
        self.need(joined % width == 0, f"{told}made for this target.")
        count = joined // width
        ids = self._ids_in_files(kind, depth, count) if given is None else given
        right = isinstance(ids, list | tuple) and all(is_int(number) and number >= 0 for number in ids)
        self.need(right, f"has layer_ids={brief(ids)}, which are no list of numbers of 0 or more; {GIVE}.")
        told = f"has {len(ids)} layer ids ({ids}) and reads {count} states of {width} numbers; {GIVE}, {count} of "
        self.need(len(ids) == count, f"{told}them, or choose a head that was made for this target.")
        told = f"reads the output of layer {max(ids)}, and {model} has {depth}; choose a head that was made for this "
        self.need(max(ids) <= depth, f"{told}target, or {GIVE}.")
        told = f"reads the last state (layer id {depth}), which some mean before the final norm and others behind it; "
        self.need(given is not None or depth not in ids, f"{told}{GIVE}, {depth} for the one before the norm.")
        return list(ids)

    def _ids_in_files(self, kind: str, depth: int, count: int) -> Any:
        """The layer ids in files: where they stand says whether they count outputs of layers, or layers from 0."""
        found = []
        for part, name, more in LAYER_IDS:
            ids = ((self.raw.get(part) or {}) if part else self.raw).get(name)
            right = ids is None or (isinstance(ids, list) and all(map(is_int, ids)))
            self.need(right, f"has layer ids {brief(ids)} in its config.json, no list of numbers; {GIVE}.")
            found += [[number + more for number in ids]] if ids else []
        told = f"has layer ids in two places, which mean different states ({brief(found)}); {GIVE}."
        self.need(all(ids == found[0] for ids in found), told)
        if found or kind in OF_EAGLE:
            return found[0] if found else [2, depth // 2, depth - 3]
        if count == 1:
            return [depth // 2 + 1]
        return [round(1 + index * (depth - 4) / (count - 1)) + 1 for index in range(count)]
