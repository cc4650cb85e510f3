"""Read published draft heads: whatever their form, as one config and tensors by one set of names."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from hf_specx.common.checkpoints import HUB, find_file, read_config, read_pickle, read_weights
from hf_specx.common.errors import brief, is_int, require, similar
from hf_specx.common.wrappers import public_name, vocabulary

from .config import OF_BLOCKS, OF_DFLASH2, OF_EAGLE, OF_LAYERS, HeadConfig
from .dflash2 import dflash2_fields, is_dflash2
from .domino import domino_fields
from .tensors import Weights, canonical, check_vocabulary, linear_layers, pairs_to_halves


OF_HEADS = re.compile(
    r"(model\.)?(midlayer\.|layers\.0\.hidden_norm\.|hidden_norm\.|fc\.weight)|(medusa_head\.)?\d+\.\d+\."
)
OF_CONFIGS = {"speculators_model_type", "medusa_num_heads", "eagle_config", "dflash_config", "draft_vocab_size"}
OF_CONFIGS |= {"target_layer_ids", "dspark_config"}
GIVE = "give layer_ids=, where 0 is the embeddings and l the output of l layers"
PLAIN = "choose an EAGLE-3, DFlash or DSpark head of plain Llama or Qwen3 layers"
UNREAD = (  # parts of names of tensors that are not read, what has them, and what to do
    (("pre_feedforward_layernorm", "post_feedforward_layernorm", "layer_scalar", "v_norm"), "blocks of Gemma", PLAIN),
    (("lilicorr.",), "the correction of LiLiCorr", PLAIN),
    (("causal_gru.", "correction_w"), "the correction of TorchSpec", PLAIN),
    (("kv_a_proj_with_mqa",), "the latent attention (MLA) of DeepSeek", PLAIN),
    (("attention_sink",), "attention sinks", PLAIN),
    (("mtp.0.main_proj", "mtp_dspark.", "dspark.layers."), "a DSpark head inside of a target's own files", PLAIN),
    (("mtp_layers.",), "the layers of an mtp speculator", "use MtpDraft() for multi-token layers of the target"),
    (("weight_scale", "weight_packed", "input_scale"), "quantised weights", "choose the same head in bfloat16"),
)
MEANT = """
    speculators_model_type speculators_version speculators_config transformer_layer_config auto_map draft_vocab_size
    truncated_vocab_size target_hidden_size eagle_config dflash_config target_layer_ids num_target_layers
    eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids num_aux_hidden_states use_aux_norm norm_before_residual
    norm_before_fc fc_norm norm_output bias mask_token_id ptd_token_id pard_token block_size sample_from_anchor use_swa
    swa_window_size sliding_window_non_causal markov_rank markov_head_type enable_confidence_head
    confidence_head_with_markov medusa_num_heads medusa_num_layers base_model_name_or_path partial_rotary_factor
    rope_theta rope_scaling mrope_section layer_types model_type torch_dtype query_zero_predicts_next shift_label
    is_causal causal causal_head dspark_config attention_mode use_confidence_head rope_is_neox_style is_neox_style
    use_last_layernorm rope_parameters
""".split()  # noqa: SIM905
NEUTRAL = """
    draft_shift attention_sink_bias add_swa_attention_sink_bias add_full_attention_sink_bias has_embed_tokens
    has_lm_head output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss tie_encoder_decoder
    is_encoder_decoder is_decoder add_cross_attention do_sample early_stopping output_scores return_dict_in_generate
    remove_invalid_values output_router_logits
""".split()  # noqa: SIM905  # options that change nothing where they are false; any other that is not known is refused
OF_TRAINING = re.compile(
    "num_anchors|max_anchors|ttt_length|embed_requires_grad|draft_num_hidden_layers|target_model_type|modal_type|auf|"
    "enable_sp_ulysses|emb_dim|gru_hidden_dim|pure_draft_prefix_len|loss_.*|lambda_.*|.*_alpha|.*_gamma|_.*"
)
ONLY: dict[str, tuple[Any, ...]] = {  # options that have to have one of these values where they are given
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "hidden_act": ("silu",),
    "logit_scale": (1,),
    "projector_type": ("dflash", "dspark", "domino"),
    "attention_mode": ("gqa", "mha"),
    "markov_head_type": ("vanilla", "gated", "rnn"),
}
MASKS = ("mask_token_id", "ptd_token_id", "pard_token")
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
    "mask_embedding": "mask_embedding",
    "own_embeddings": "embed_tokens.weight",
    "own_head": "lm_head.weight",
}
MARKOV = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
STATED = ("norm_before_residual", "markov_head_type")  # not by tensors
LAYOUT = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")  # the same by other producers
CAUSAL = ("is_causal", "causal", "causal_head")
INTERLEAVED = ("rope_is_neox_style", "is_neox_style")  # false: channels turn in pairs of neighbours
LAYOUTS = {"anchor": True, "fill-in": False}  # whether the first place of a block proposes a token too
OVERRIDES = ("layer_ids", "layout", "norm_output", "use_last_layernorm", "is_causal", "partial_rotary_factor")
SCALINGS = ("default", "linear", "llama3", "yarn")  # of positions; others go by the length of the text


def read_head(name: str | Path, target: PreTrainedModel, **loading: Any) -> tuple[HeadConfig, Weights]:
    """The config of a draft head, and its tensors in the precision of its files.

    What can be told from the names and shapes of tensors is told from them.

    Args:
        name: a folder, or an id on the Hub.
        target: the model whose states it reads.
        **loading: `HUB`, and what is to hold in place of what the files say, or leave open:
            layer_ids: 0 is the embeddings, l the output of l layers.
            layout: "anchor" if the first place of a block proposes the next token, "fill-in" if each proposes its own.
            is_causal: whether a place of a block sees none behind itself.
            norm_output: whether the state that EAGLE-3 feeds back is the normed one.
            use_last_layernorm: whether its scores are of the normed one.
            partial_rotary_factor: which part of the channels turns.

    Raises:
        ValueError: the files are no head, or none for this target; it says what is wrong.
    """
    known = (*HUB, *OVERRIDES)
    unknown = min(loading.keys() - set(known), default="")
    told = f"unknown option {unknown!r} for a draft head; {similar(unknown, known)}it takes {', '.join(known)}."
    require(not unknown, told)
    overrides = {option: value for option in OVERRIDES if (value := loading.pop(option, None)) is not None}
    _check_overrides(overrides)
    raw, found = read_config(name, **loading), read_weights(name, **loading)
    mask = find_file(name, "mask_embedding.pt", **loading)
    try:
        reader = Reader(name, raw, canonical(found), target, overrides)
        if mask is not None:
            reader.read_mask_embedding(read_pickle(mask))
        return reader.config(), reader.weights
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{name} has a value of a wrong type in its config.json ({error}); get it again.") from error


def _check_overrides(overrides: dict[str, Any]) -> None:
    """Raise ValueError if an option of loading has a value that it cannot have."""
    layout, factor = overrides.get("layout", "anchor"), overrides.get("partial_rotary_factor", 1.0)
    require(layout in LAYOUTS, f"layout={layout!r}: give one of {', '.join(map(repr, LAYOUTS))}.")
    for option in ("norm_output", "use_last_layernorm", "is_causal"):
        value = overrides.get(option, True)
        require(isinstance(value, bool), f"{option}={value!r}: give True or False.")
    right = isinstance(factor, int | float) and 0 < factor <= 1
    require(right, f"partial_rotary_factor={factor!r}: give a number above 0, at most 1.")


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

    def __init__(
        self,
        name: str | Path,
        raw: dict[str, Any],
        weights: Weights,
        target: PreTrainedModel,
        overrides: dict[str, Any],
    ):
        self.name, self.raw, self.weights, self.target, self.overrides = name, raw, weights, target, overrides
        self.text, self.tokens = target.config.get_text_config(decoder=True), vocabulary(target)
        self.said = dict(raw)  # with the options of parts of it
        for part in ("transformer_layer_config", "eagle_config", "dflash_config", "dspark_config"):
            self.said |= raw.get(part) or {}

    def need(self, ok: Any, told: str) -> None:
        """Refuse the head with its name unless `ok`."""
        require(bool(ok), f"{self.name} {told}")

    def first(self, options: tuple[str, ...]) -> Any:
        """The value of the first of these options that the config has; None if it has none."""
        return next((self.said[option] for option in options if self.said.get(option) is not None), None)

    def read_mask_embedding(self, stored: Any) -> None:
        """Take up a vector for the mask token that lies beside the weights."""
        form = stored if isinstance(stored, dict) else {"embedding": stored}
        vector: Any = form.get("embedding")
        token = form.get("mask_token_id")
        self.need(not form.get("per_position"), "has a mask_embedding.pt with a vector for each position; " + PLAIN)
        right = isinstance(vector, torch.Tensor) and vector.ndim in (1, 2) and vector.numel() == vector.shape[-1]
        self.need(right, "has a mask_embedding.pt that is no vector; get it again.")
        mask = self.first(MASKS)
        told = f"has mask_token_id={brief(token)} in its mask_embedding.pt and {brief(mask)} in its config.json; "
        self.need(token in (None, mask), f"{told}get it again.")
        self.weights["mask_embedding"] = vector.flatten()

    def config(self) -> HeadConfig:
        """What the head is."""
        self._check_supported()
        medusa, layers = linear_layers(self.weights)
        if medusa:
            self._check_applies("medusa", ())
            return self._medusa(medusa, layers)
        kind, qk_norm = self._kind(), THERE["qk_norm"] in self.weights
        fields = self._layer(qk_norm)
        fields |= self._shapes(fields) | {field: tensor in self.weights for field, tensor in THERE.items()}
        fields |= {field: self.said[field] for field in STATED if self.said.get(field)}
        for tensor in MARKOV.keys() & self.weights.keys():
            fields["markov_head_type"] = MARKOV[tensor]
        fields |= self._rope(fields) | (self._norms() if kind in OF_EAGLE else self._causality(kind))
        fields |= dflash2_fields(self.raw, self.said, self.weights, self.need) if kind == "dflash2" else {}
        fields |= domino_fields(self.said, self.weights, self.need) if kind == "domino" else {}
        self._check_target(fields["vocab_size"])
        fields |= {"kind": kind, "target_hidden_size": self.text.hidden_size} | self._proposal(kind)
        config = HeadConfig(**fields, layer_ids=self._layer_ids(kind))
        check_vocabulary(self.name, config, self.weights)
        return config

    def _check_applies(self, kind: str, options: tuple[str, ...]) -> None:
        """Raise ValueError if something is to be overridden that a head of this kind does not have."""
        other = next((option for option in self.overrides if option not in options), None)
        told = f"is of kind {kind}, for which {other}= says nothing; leave it out."
        self.need(other is None, told)

    def _norms(self) -> dict[str, Any]:
        """What EAGLE-3 feeds back and scores. SpecForge wrote norm_output=true for a while into heads that were fed
        the state without a norm; those that really are fed the normed one have norms of each state as well.
        """
        self._check_applies("EAGLE", ("layer_ids", "norm_output", "use_last_layernorm", "partial_rotary_factor"))
        normed, causal = bool(self.said.get("norm_output")), self.first(CAUSAL)
        self.need(causal in (None, True), f"has is_causal={brief(causal)} in its config.json; EAGLE heads are causal.")
        if "speculators_model_type" not in self.raw and THERE["fc_norm"] not in self.weights:
            normed = False
        last = self.said.get("use_last_layernorm")
        stated = {"norm_output": normed, "use_last_layernorm": last is None or bool(last)}
        return stated | {option: value for option, value in self.overrides.items() if option in stated}

    def _causality(self, kind: str) -> dict[str, bool]:
        """What a place of a block sees: if nothing is said, all of it, in layers with a window what is before it.

        In DFlash2 of speculators it is all of it there too.
        """
        self._check_applies("DFlash", ("layer_ids", "layout", "is_causal", "partial_rotary_factor"))
        signs = {option: self.said[option] for option in CAUSAL if self.said.get(option) is not None}
        usual = kind == "dflash2" and "speculators_model_type" in self.raw and not signs
        if self.said.get("sliding_window_non_causal", usual):
            signs["sliding_window_non_causal"] = False
        if "is_causal" in self.overrides:
            signs = {"is_causal": self.overrides["is_causal"]}
        told = f"has options that contradict in its config.json ({brief(signs)}); give is_causal=True or False."
        self.need(len(set(signs.values())) < 2, told)
        causal = next(iter(signs.values()), None)
        return {"is_causal": causal is True, "sliding_window_non_causal": causal is False}

    def _rope(self, fields: dict[str, Any]) -> dict[str, Any]:
        """How positions turn channels: a part of these only if rope_dim says so, or the user, since the layers that
        heads are trained with ignore partial_rotary_factor beside unscaled positions.
        """
        rope, size = dict(fields["rope_parameters"]), fields["head_dim"]
        turning, factor = rope.pop("rope_dim", None), self.overrides.get("partial_rotary_factor")
        if factor is not None:
            turning = int(size * factor)
        if turning is not None or rope["rope_type"] == "default":
            rope.pop("partial_rotary_factor", None)
        turning = size if turning is None else turning
        right = is_int(turning) and 0 < turning <= size and turning % 2 == 0
        self.need(right, f"turns {brief(turning)} of the {size} channels of a head; it needs an even number of them.")
        if self.first(INTERLEAVED) is False:
            pairs_to_halves(self.weights, size, int(turning * rope.get("partial_rotary_factor", 1)))
        return {"rope_parameters": rope if turning == size else rope | {"rope_dim": turning}}

    def _check_supported(self) -> None:
        """Refuse, by its name, what would change the head's forward and is not supported."""
        for parts, what, remedy in UNREAD:
            tensor = next((weight for weight in sorted(self.weights) if any(part in weight for part in parts)), None)
            self.need(tensor is None, f"has {what} ({tensor}), which are not supported; {remedy}.")
        model_type = self.raw.get("model_type", "")
        told = f"is for {model_type}, whose blocks are not supported; {PLAIN}."
        self.need(not str(model_type).startswith("gemma"), told)
        norms = self.weights.keys() & {"hidden_norm.weight", "layers.0.hidden_norm.weight", "norm.weight"}
        told = f"has fc and neither hidden_norm nor norm: it is an EAGLE-1 or EAGLE-2 head, not supported; {PLAIN}."
        self.need(norms or "fc.weight" not in self.weights, told)
        told = "has speculators_model_type='mtp', which is not supported; use MtpDraft() for layers of the target."
        self.need(self.raw.get("speculators_model_type") != "mtp", told)
        defaults = vars(LlamaConfig()).keys() | vars(Qwen3Config()).keys()
        defaults |= set(OF_DFLASH2 if is_dflash2(self.raw, self.weights) else ())
        for option, value in sorted(self.said.items()):
            known = option in MEANT or option in defaults or bool(OF_TRAINING.fullmatch(option))
            known = known or (option in NEUTRAL and value is False)
            right = value is None or (value in ONLY[option] if option in ONLY else known)
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
        of_files = "dspark" in made_for or "markov_rank" in self.raw or "markov_head" in str([*self.weights])
        in_words = "dspark" in (stated, self.said.get("projector_type"))
        found = "dspark" if of_files or in_words else "dflash"
        found = "dflash2" if is_dflash2(self.raw, self.weights) else found
        domino = self.said.get("projector_type") == "domino" or "prefix_gru." in str([*self.weights])
        found = "domino" if domino or stated == "domino" else found
        if eagle:
            found = "peagle" if "mask_hidden" in self.weights or stated == "peagle" else "eagle3"
        told = f"has speculators_model_type={brief(stated)} in its config.json and tensors of {found}; get it again, "
        self.need(stated in (None, found), f"{told}or choose one of {', '.join((*OF_EAGLE, *OF_BLOCKS))}.")
        return found

    def _layer(self, qk_norm: bool) -> dict[str, Any]:
        """The fields that the config of a layer has; what is absent there is the default of its architecture."""
        names = {*OF_LAYERS, "rope_theta", "partial_rotary_factor"} - {"layer_types"}
        given = {name: self.said[name] for name in names if self.said.get(name) is not None}
        rope_dim, given["rope_parameters"] = self._scaling()
        architecture: Any = Qwen3Config if qk_norm else LlamaConfig
        try:
            known = architecture(**given)
        except Exception as error:  # of a type that only the Hub's library has
            raise ValueError(f"{self.name} has a config of its layers that transformers refuses: {error}") from error
        rope = dict(known.rope_parameters or {})
        if rope_dim is not None:
            rope["rope_dim"] = rope_dim
        return {name: getattr(known, name, None) for name in OF_LAYERS} | {"rope_parameters": rope}

    def _scaling(self) -> tuple[Any, dict[str, Any]]:
        """How many channels turn, if it is said, and how positions are scaled, from where either may stand."""
        places = [dict(self.said[name]) for name in ("rope_scaling", "rope_parameters") if self.said.get(name)]
        turning = [place.pop("rope_dim") for place in places if place.get("rope_dim") is not None]
        for place in places:
            old = place.pop("type", None)
            place["rope_type"] = place.get("rope_type") or old or "default"
            for option in ("mrope_section", "mrope_interleaved"):
                place.pop(option, None)
            if place["rope_type"] == "mrope":  # text has one position, and that of pictures is one of three
                place["rope_type"] = "default"
            told = f"has rope_type={brief(place['rope_type'])} in its config.json, which is not supported; choose "
            told += "another head, or take it out if no text is longer than max_position_embeddings."
            self.need(place["rope_type"] in SCALINGS, told)
        without = [{key: value for key, value in place.items() if key != "rope_theta"} for place in places]
        told = f"has rope_scaling and rope_parameters in its config.json that differ ({brief(without)}); get it again."
        self.need(all(place == without[0] for place in without), told)
        merged: dict[str, Any] = {}
        for place in places:
            merged |= place
        return next(iter(turning), None), merged

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
        if self.said.get("use_sliding_window") and kinds is None and is_int(window):
            full = self.said.get("max_window_layers", 28)  # as the config of Qwen3 says which layers see all
            kinds = ["sliding_attention" if layer >= full else "full_attention" for layer in range(layers)]
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
        mask: Any = self.first(MASKS)
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
        anchor = self._anchor(kind, block, method.get("speculative_tokens"))
        if not proposal:
            found["num_draft_tokens"] = block - (not anchor)
        return found | {"block_size": block, "sample_from_anchor": anchor}

    def _anchor(self, kind: str, block: int, proposed: Any) -> bool:
        """Whether the first place of a block proposes a token too: as it is said, or as its producer means it.

        Files of speculators without the key are older than the layout from the anchor; DSpark of all others has it.
        """
        if "layout" in self.overrides:
            return LAYOUTS[self.overrides["layout"]]
        stated, of_speculators = self.first(LAYOUT), "speculators_model_type" in self.raw
        anchor = kind == "dspark" and not of_speculators if stated is None else bool(stated)
        told = f"proposes {proposed} tokens a block of {block} by speculative_tokens, and its places are those of "
        told += f"layout={'anchor' if anchor else 'fill-in'!r} ({brief(stated)}); give layout='anchor' or 'fill-in'."
        self.need(proposed != (block - 1 if anchor else block), told)
        return anchor

    def _layer_ids(self, kind: str) -> list[int]:
        """Which states the head reads, as they are given, or as they stand in the files."""
        given = self.overrides.get("layer_ids")
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
