"""The published formats of draft heads: whatever the form of their files, as one config and one set of tensors.

A new format is an entry in one of the constants here, or in `tensors.NAMES`; one with layers of its own is a
`HeadNetwork` too.
"""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from hf_specx.common.checkpoints import HUB, find_file, read_config, read_pickle, read_weights
from hf_specx.common.errors import brief, is_int, require, similar
from hf_specx.common.wrappers import public_name, vocabulary

from .config import BLOCK_KINDS, EAGLE_KINDS, FIELDS_OF_KIND, LAYER_FIELDS, HeadConfig
from .detect_head import ASSISTANTS
from .dflash2 import dflash2_fields, is_dflash2
from .domino import domino_fields
from .tensors import Weights, check_vocabulary, medusa_sizes, pairs_to_halves, with_standard_names


CONFIG_PARTS = ("transformer_layer_config", "eagle_config", "dflash_config", "dspark_config")
GIVE_LAYER_IDS = "give layer_ids=, where 0 is the embeddings and l the output of l layers"
CHOOSE_PLAIN = "choose an EAGLE-3, DFlash or DSpark head of plain Llama or Qwen3 layers"
GEMMA_TENSORS = ("pre_feedforward_layernorm", "post_feedforward_layernorm", "layer_scalar", "v_norm")
UNSUPPORTED_TENSORS = (  # parts of names of tensors that are not read, what has them, and what to do
    (GEMMA_TENSORS, "blocks of Gemma", CHOOSE_PLAIN),
    (("lilicorr.",), "the correction of LiLiCorr", CHOOSE_PLAIN),
    (("causal_gru.", "correction_w"), "the correction of TorchSpec", CHOOSE_PLAIN),
    (("kv_a_proj_with_mqa",), "the latent attention (MLA) of DeepSeek", CHOOSE_PLAIN),
    (("attention_sink",), "attention sinks", CHOOSE_PLAIN),
    (
        ("mtp.0.main_proj", "mtp_dspark.", "dspark.layers."),
        "a DSpark head inside of a target's own files",
        CHOOSE_PLAIN,
    ),
    (("mtp_layers.",), "the layers of an mtp speculator", "use MtpDraft() for multi-token layers of the target"),
    (("weight_scale", "weight_packed", "input_scale"), "quantised weights", "choose the same head in bfloat16"),
)
READ_OPTIONS = """
    speculators_model_type speculators_version speculators_config transformer_layer_config auto_map draft_vocab_size
    truncated_vocab_size target_hidden_size eagle_config dflash_config target_layer_ids num_target_layers
    eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids num_aux_hidden_states use_aux_norm norm_before_residual
    norm_before_fc fc_norm norm_output bias mask_token_id ptd_token_id pard_token block_size sample_from_anchor use_swa
    swa_window_size sliding_window_non_causal markov_rank markov_head_type enable_confidence_head
    confidence_head_with_markov medusa_num_heads medusa_num_layers base_model_name_or_path partial_rotary_factor
    rope_theta rope_scaling mrope_section layer_types model_type torch_dtype query_zero_predicts_next shift_label
    is_causal causal causal_head dspark_config attention_mode use_confidence_head rope_is_neox_style is_neox_style
    use_last_layernorm rope_parameters
""".split()  # noqa: SIM905  # options that are read, or that say what tensors say as well
NO_EFFECT_IF_FALSE = """
    draft_shift attention_sink_bias add_swa_attention_sink_bias add_full_attention_sink_bias has_embed_tokens
    has_lm_head output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss tie_encoder_decoder
    is_encoder_decoder is_decoder add_cross_attention do_sample early_stopping output_scores return_dict_in_generate
    remove_invalid_values output_router_logits
""".split()  # noqa: SIM905  # any other option that is not known is refused
TRAINING_OPTIONS = re.compile(
    "num_anchors|max_anchors|ttt_length|embed_requires_grad|draft_num_hidden_layers|target_model_type|modal_type|auf|"
    "enable_sp_ulysses|emb_dim|gru_hidden_dim|pure_draft_prefix_len|loss_.*|lambda_.*|.*_alpha|.*_gamma|_.*"
)
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {  # options that have to have one of these values where they are given
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "hidden_act": ("silu",),
    "logit_scale": (1,),
    "projector_type": ("dflash", "dspark", "domino"),
    "attention_mode": ("gqa", "mha"),
    "markov_head_type": ("vanilla", "gated", "rnn"),
}
# the same option by different producers
MASK_TOKEN_OPTIONS = ("mask_token_id", "ptd_token_id", "pard_token")
ANCHOR_OPTIONS = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
CAUSAL_OPTIONS = ("is_causal", "causal", "causal_head")
ROPE_HALVES_OPTIONS = ("rope_is_neox_style", "is_neox_style")  # false: channels are rotated in pairs of neighbours
EAGLE_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_ID_OPTIONS = (  # in which part of a config, by which name, and what they are less than outputs of layers
    (None, EAGLE_LAYER_IDS, 0),
    (None, "aux_hidden_state_layer_ids", 0),
    ("eagle_config", EAGLE_LAYER_IDS, 1),
    (None, "target_layer_ids", 1),
    ("dflash_config", "target_layer_ids", 1),
)
ATTENTION = "layers.0.self_attn."
TENSOR_OF_FIELD = {  # fields that say whether there is a tensor
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
MARKOV_TYPE_OF_TENSOR = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
FIELDS_OF_CONFIG = ("norm_before_residual", "markov_head_type")  # which tensors do not show
# values of the option layout=: whether the anchor, the last token in front of the masks of a block, proposes too
SAMPLES_FROM_ANCHOR = {"anchor": True, "fill-in": False}
OVERRIDES = ("layer_ids", "layout", "norm_output", "use_last_layernorm", "is_causal", "partial_rotary_factor")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # others depend on the length of the text


def read_head(name: str | Path, target: PreTrainedModel, **loading: Any) -> tuple[HeadConfig, Weights]:
    """The config of a draft head, and its tensors in the precision of its files.

    What can be told from the names and shapes of tensors is told from them.

    Args:
        name: a folder, or an id on the Hub.
        target: the model whose states it reads.
        **loading: `HUB`, and what is to hold in place of what the files say, or leave open:
            layer_ids: the states of the target that it reads; 0 is the embeddings, l the output of l layers.
            layout: which positions of a block propose. With "fill-in" each mask proposes the token in its own
                position; with "anchor" the last token in front of them (the anchor) and each mask propose the token
                behind theirs, one more in all.
            is_causal: whether a position of a block sees none behind itself.
            norm_output: whether the state that EAGLE-3 feeds back is the normed one.
            use_last_layernorm: whether its logits are computed of the normed one.
            partial_rotary_factor: the part of each attention head's channels that is rotated.

    Raises:
        ValueError: the files are no head, or none for this target; it says what is wrong.
    """
    options = (*HUB, *OVERRIDES)
    unknown = min(loading.keys() - set(options), default="")
    require(
        not unknown,
        f"unknown option {unknown!r} for a draft head; {similar(unknown, options)}it takes {', '.join(options)}.",
    )
    overrides = {option: loading.pop(option) for option in OVERRIDES if option in loading}
    overrides = {option: value for option, value in overrides.items() if value is not None}
    _check_overrides(overrides)
    raw, tensors = read_config(name, **loading), read_weights(name, **loading)
    mask_file = find_file(name, "mask_embedding.pt", **loading)
    try:
        reader = FormatReader(name, raw, with_standard_names(tensors), target, overrides)
        if mask_file is not None:
            reader.read_mask_embedding(read_pickle(mask_file))
        return reader.config(), reader.weights
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{name} has a value of a wrong type in its config.json ({error}); get it again.") from error


def _check_overrides(overrides: dict[str, Any]) -> None:
    """Raise ValueError if an option of loading has a value that it cannot have."""
    layout, factor = overrides.get("layout", "anchor"), overrides.get("partial_rotary_factor", 1.0)
    layouts = ", ".join(map(repr, SAMPLES_FROM_ANCHOR))
    require(layout in SAMPLES_FROM_ANCHOR, f"layout={layout!r}: give one of {layouts}.")
    for option in ("norm_output", "use_last_layernorm", "is_causal"):
        value = overrides.get(option, True)
        require(isinstance(value, bool), f"{option}={value!r}: give True or False.")
    require(
        isinstance(factor, int | float) and 0 < factor <= 1,
        f"partial_rotary_factor={factor!r}: give a number above 0, at most 1.",
    )


class FormatReader:
    """Reads the config of a draft head in any format, with its tensors, beside the target that it is for.

    Attributes:
        raw: the config.
        options: the same, with the options of its parts.
        weights: the tensors by the names of *speculators*.
        target_config: of the target's text model.
        vocab_size: of the target.
        overrides: options of loading, which have the last word.
    """

    def __init__(
        self,
        name: str | Path,
        raw: dict[str, Any],
        weights: Weights,
        target: PreTrainedModel,
        overrides: dict[str, Any],
    ):
        self.name, self.raw, self.weights, self.target, self.overrides = name, raw, weights, target, overrides
        self.target_config = target.config.get_text_config(decoder=True)
        self.vocab_size = vocabulary(target)
        self.options = dict(raw)
        for part in CONFIG_PARTS:
            self.options |= raw.get(part) or {}

    def need(self, condition: Any, message: str) -> None:
        """Raise ValueError with the head's name and a message unless the condition holds."""
        require(bool(condition), f"{self.name} {message}")

    def first_value(self, options: tuple[str, ...]) -> Any:
        """The value of the first of these options that the config has; None if it has none."""
        return next((self.options[option] for option in options if self.options.get(option) is not None), None)

    @property
    def is_of_speculators(self) -> bool:
        return "speculators_model_type" in self.raw

    def read_mask_embedding(self, stored: Any) -> None:
        """Take a vector for the mask token, which lies beside the weights, as one of them."""
        content = stored if isinstance(stored, dict) else {"embedding": stored}
        vector: Any = content.get("embedding")
        token = content.get("mask_token_id")
        self.need(
            not content.get("per_position"),
            f"has a mask_embedding.pt with a vector for each position; {CHOOSE_PLAIN}",
        )
        is_vector = isinstance(vector, torch.Tensor) and vector.ndim in (1, 2) and vector.numel() == vector.shape[-1]
        self.need(is_vector, "has a mask_embedding.pt that is no vector; get it again.")
        mask_token = self.first_value(MASK_TOKEN_OPTIONS)
        self.need(
            token in (None, mask_token),
            f"has mask_token_id={brief(token)} in its mask_embedding.pt and {brief(mask_token)} in its config.json; "
            "get it again.",
        )
        self.weights["mask_embedding"] = vector.flatten()

    def config(self) -> HeadConfig:
        """The head's `HeadConfig`."""
        self._check_supported()
        num_heads, num_layers = medusa_sizes(self.weights)
        if num_heads:
            self._check_overrides_apply("medusa", ())
            return self._medusa_config(num_heads, num_layers)
        kind = self._kind()
        fields = self._layer_fields(qk_norm=TENSOR_OF_FIELD["qk_norm"] in self.weights)
        fields |= self._fields_by_shapes(fields)
        fields |= {field: tensor in self.weights for field, tensor in TENSOR_OF_FIELD.items()}
        fields |= {field: self.options[field] for field in FIELDS_OF_CONFIG if self.options.get(field)}
        for tensor in MARKOV_TYPE_OF_TENSOR.keys() & self.weights.keys():
            fields["markov_head_type"] = MARKOV_TYPE_OF_TENSOR[tensor]
        fields |= self._rope_fields(fields)
        fields |= self._norm_fields() if kind in EAGLE_KINDS else self._causality_fields(kind)
        if kind == "dflash2":
            fields |= dflash2_fields(self.raw, self.options, self.weights, self.need)
        if kind == "domino":
            fields |= domino_fields(self.options, self.weights, self.need)
        self._check_target_sizes(fields["vocab_size"])
        fields |= {"kind": kind, "target_hidden_size": self.target_config.hidden_size}
        fields |= self._proposal_fields(kind)
        config = HeadConfig(**fields, layer_ids=self._layer_ids(kind))
        check_vocabulary(self.name, config, self.weights)
        return config

    def _check_overrides_apply(self, kind: str, options: tuple[str, ...]) -> None:
        """Raise ValueError if something is to be overridden that a head of this kind does not have."""
        other = next((option for option in self.overrides if option not in options), None)
        self.need(other is None, f"is of kind {kind}, for which {other}= says nothing; leave it out.")

    def _norm_fields(self) -> dict[str, Any]:
        """Which states EAGLE-3 feeds back and scores.

        SpecForge wrote norm_output=true for a while into heads that were fed the state without a norm; those that
        really are fed the normed one have norms of each state as well.
        """
        self._check_overrides_apply(
            "EAGLE", ("layer_ids", "norm_output", "use_last_layernorm", "partial_rotary_factor")
        )
        causal = self.first_value(CAUSAL_OPTIONS)
        self.need(causal in (None, True), f"has is_causal={brief(causal)} in its config.json; EAGLE heads are causal.")
        norm_output = bool(self.options.get("norm_output"))
        if not self.is_of_speculators and TENSOR_OF_FIELD["fc_norm"] not in self.weights:
            norm_output = False
        use_last = self.options.get("use_last_layernorm")
        fields = {"norm_output": norm_output, "use_last_layernorm": use_last is None or bool(use_last)}
        return fields | {option: value for option, value in self.overrides.items() if option in fields}

    def _causality_fields(self, kind: str) -> dict[str, bool]:
        """What a position of a block sees: if nothing is said, all of it, in layers with a window what is before it.

        In DFlash2 of speculators it is all of it there too.
        """
        self._check_overrides_apply("DFlash", ("layer_ids", "layout", "is_causal", "partial_rotary_factor"))
        stated = {option: self.options[option] for option in CAUSAL_OPTIONS if self.options.get(option) is not None}
        default = kind == "dflash2" and self.is_of_speculators and not stated
        if self.options.get("sliding_window_non_causal", default):
            stated["sliding_window_non_causal"] = False
        if "is_causal" in self.overrides:
            stated = {"is_causal": self.overrides["is_causal"]}
        self.need(
            len(set(stated.values())) < 2,
            f"has options that contradict in its config.json ({brief(stated)}); give is_causal=True or False.",
        )
        causal = next(iter(stated.values()), None)
        return {"is_causal": causal is True, "sliding_window_non_causal": causal is False}

    def _rope_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields on rotary positions: a part of the channels is rotated only if rope_dim says so, or the user.

        The layers that heads are trained with ignore partial_rotary_factor beside unscaled positions.
        """
        rope, head_dim = dict(fields["rope_parameters"]), fields["head_dim"]
        rope_dim, factor = rope.pop("rope_dim", None), self.overrides.get("partial_rotary_factor")
        if factor is not None:
            rope_dim = int(head_dim * factor)
        if rope_dim is not None or rope["rope_type"] == "default":
            rope.pop("partial_rotary_factor", None)
        rope_dim = head_dim if rope_dim is None else rope_dim
        self.need(
            is_int(rope_dim) and 0 < rope_dim <= head_dim and rope_dim % 2 == 0,
            f"rotates {brief(rope_dim)} of the {head_dim} channels of an attention head; it needs an even number.",
        )
        if self.first_value(ROPE_HALVES_OPTIONS) is False:
            pairs_to_halves(self.weights, head_dim, int(rope_dim * rope.get("partial_rotary_factor", 1)))
        return {"rope_parameters": rope if rope_dim == head_dim else rope | {"rope_dim": rope_dim}}

    def _check_supported(self) -> None:
        """Raise ValueError for what would change the head's forward and is not supported, by its name."""
        model_type = self.raw.get("model_type", "")
        self.need(
            model_type not in ASSISTANTS,
            f"is of type {model_type}, a model that drafts and no head; give its name, or the model that "
            "AutoModelForCausalLM.from_pretrained loads, to SpeculativeDecoding as draft_model.",
        )
        for parts, feature, remedy in UNSUPPORTED_TENSORS:
            tensor = next((weight for weight in sorted(self.weights) if any(part in weight for part in parts)), None)
            self.need(tensor is None, f"has {feature} ({tensor}), which are not supported; {remedy}.")
        self.need(
            not str(model_type).startswith("gemma"),
            f"is for {model_type}, whose blocks are not supported; {CHOOSE_PLAIN}.",
        )
        norms = self.weights.keys() & {"hidden_norm.weight", "layers.0.hidden_norm.weight", "norm.weight"}
        self.need(
            norms or "fc.weight" not in self.weights,
            "has fc and neither hidden_norm nor norm: it is an EAGLE-1 or EAGLE-2 head, not supported; "
            f"{CHOOSE_PLAIN}.",
        )
        self.need(
            self.raw.get("speculators_model_type") != "mtp",
            "has speculators_model_type='mtp', which is not supported; use MtpDraft() for layers of the target.",
        )
        self._check_options()

    def _check_options(self) -> None:
        """Raise ValueError for an option that is not known, or whose value is not supported."""
        known_options = set(READ_OPTIONS) | vars(LlamaConfig()).keys() | vars(Qwen3Config()).keys()
        if is_dflash2(self.raw, self.weights):
            known_options |= set(FIELDS_OF_KIND["dflash2"])
        for option, value in sorted(self.options.items()):
            if option in SUPPORTED_VALUES:
                supported = value in SUPPORTED_VALUES[option]
            else:
                supported = option in known_options or bool(TRAINING_OPTIONS.fullmatch(option))
                supported = supported or (option in NO_EFFECT_IF_FALSE and value is False)
            self.need(
                value is None or supported,
                f"has {option}={brief(value)} in its config.json, which is not supported; choose another head, or "
                "take it out if it does not change what the head computes.",
            )

    def _check_target_sizes(self, vocab_size: int) -> None:
        """Raise ValueError if the config says that the head was made for a target of other sizes."""
        width, depth = self.options.get("target_hidden_size"), self.options.get("num_target_layers")
        sizes = (
            ("tokens", vocab_size, self.vocab_size),
            ("numbers in a state", width, self.target_config.hidden_size),
            ("layers", depth, self.target_config.num_hidden_layers),
        )
        for noun, stated, actual in sizes:
            self.need(
                stated in (None, actual),
                f"is for a target with {stated} {noun}, and {type(self.target).__name__} has {actual}; choose a head "
                "that was made for this target.",
            )

    def _medusa_config(self, num_heads: int, num_layers: int) -> HeadConfig:
        """The config of Medusa, whose counts are those of its tensors."""
        return HeadConfig(
            kind="medusa",
            hidden_size=self.target_config.hidden_size,
            target_hidden_size=self.target_config.hidden_size,
            vocab_size=self.vocab_size,
            layer_ids=[self.target_config.num_hidden_layers],
            draft_vocab_size=self.vocab_size,
            medusa_num_heads=num_heads,
            medusa_num_layers=num_layers,
            num_draft_tokens=num_heads,
            target=self.raw.get("base_model_name_or_path") or "",
        )

    def _kind(self) -> str:
        """What kind of head the files have, by their tensors; where they leave it open, by the config."""
        names = str([*self.weights])
        is_eagle = any(weight.endswith("layers.0.hidden_norm.weight") for weight in self.weights)
        self.need(
            is_eagle or "hidden_norm.weight" in self.weights,
            "has neither layers.0.hidden_norm nor hidden_norm among its tensors, so it is no draft head of a "
            "supported form; choose another.",
        )
        stated, projector = self.raw.get("speculators_model_type"), self.options.get("projector_type")
        architectures = str(self.raw.get("architectures")).lower()
        if is_eagle:
            kind = "peagle" if "mask_hidden" in self.weights or stated == "peagle" else "eagle3"
        elif projector == "domino" or "prefix_gru." in names or stated == "domino":
            kind = "domino"
        elif is_dflash2(self.raw, self.weights):
            kind = "dflash2"
        elif "dspark" in architectures or "markov_rank" in self.raw or "markov_head" in names:
            kind = "dspark"
        else:
            kind = "dspark" if "dspark" in (stated, projector) else "dflash"
        self.need(
            stated in (None, kind),
            f"has speculators_model_type={brief(stated)} in its config.json and tensors of {kind}; get it again, or "
            f"choose one of {', '.join((*EAGLE_KINDS, *BLOCK_KINDS))}.",
        )
        return kind

    def _layer_fields(self, qk_norm: bool) -> dict[str, Any]:
        """The fields that the config of a layer has; what is absent there is the default of its architecture."""
        names = {*LAYER_FIELDS, "rope_theta", "partial_rotary_factor"} - {"layer_types"}
        stated = {name: self.options[name] for name in names if self.options.get(name) is not None}
        rope_dim, stated["rope_parameters"] = self._rope_options()
        architecture: Any = Qwen3Config if qk_norm else LlamaConfig
        try:
            layer_config = architecture(**stated)
        except Exception as error:  # of a type that only the Hub's library has
            raise ValueError(f"{self.name} has a config of its layers that transformers refuses: {error}") from error
        rope = dict(layer_config.rope_parameters or {})
        if rope_dim is not None:
            rope["rope_dim"] = rope_dim
        return {name: getattr(layer_config, name, None) for name in LAYER_FIELDS} | {"rope_parameters": rope}

    def _rope_options(self) -> tuple[Any, dict[str, Any]]:
        """How many channels are rotated, if it is said, and how positions are scaled, from where either may stand."""
        stated = [dict(self.options[name]) for name in ("rope_scaling", "rope_parameters") if self.options.get(name)]
        rope_dims = [rope.pop("rope_dim") for rope in stated if rope.get("rope_dim") is not None]
        for rope in stated:
            old_name = rope.pop("type", None)
            rope["rope_type"] = rope.get("rope_type") or old_name or "default"
            for option in ("mrope_section", "mrope_interleaved"):
                rope.pop(option, None)
            if rope["rope_type"] == "mrope":  # text has one position, and that of pictures is one of three
                rope["rope_type"] = "default"
            self.need(
                rope["rope_type"] in ROPE_TYPES,
                f"has rope_type={brief(rope['rope_type'])} in its config.json, which is not supported; choose another "
                "head, or take it out if no text is longer than max_position_embeddings.",
            )
        without_theta = [{key: value for key, value in rope.items() if key != "rope_theta"} for rope in stated]
        self.need(
            all(rope == without_theta[0] for rope in without_theta),
            f"has rope_scaling and rope_parameters in its config.json that differ ({brief(without_theta)}); get it "
            "again.",
        )
        merged: dict[str, Any] = {}
        for rope in stated:
            merged |= rope
        return next(iter(rope_dims), None), merged

    def _fields_by_shapes(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields that follow from shapes of tensors; `fields` are those of the config."""
        weights = self.weights
        required = (
            "fc.weight",
            f"{ATTENTION}q_proj.weight",
            f"{ATTENTION}k_proj.weight",
            "layers.0.mlp.gate_proj.weight",
            "norm.weight",
        )
        missing = [weight for weight in required if weight not in weights]
        self.need(
            not missing,
            f"lacks {', '.join(missing)}; get it again, or choose a head that joins states of several layers.",
        )
        _, query_width, key_width, intermediate_size, hidden_size = (weights[weight].shape[0] for weight in required)
        head_dim, num_heads = fields["head_dim"], fields["num_attention_heads"]
        query_norm = weights.get(TENSOR_OF_FIELD["qk_norm"])
        if query_norm is not None:
            head_dim = query_norm.numel()
            num_heads = query_width // head_dim
        self.need(
            query_width == num_heads * head_dim and key_width % head_dim == 0,
            f"has {num_heads} attention heads of {head_dim} by its config.json, and {query_width} rows in q_proj; get "
            "it again.",
        )
        matches = [re.match(r"layers\.(\d+)\.", weight) for weight in weights]
        num_layers = 1 + max(int(match[1]) for match in matches if match)
        empty = weights["fc.weight"].new_zeros(0, 0)
        confidence = weights.get(TENSOR_OF_FIELD["confidence_head"], empty)
        output = weights.get(TENSOR_OF_FIELD["own_head"])
        return self._window_fields(num_layers) | {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": key_width // head_dim,
            "head_dim": head_dim,
            "markov_rank": weights.get("markov_head.markov_w1.weight", empty).shape[-1],
            "confidence_head_with_markov": confidence.shape[-1] > hidden_size,
            "draft_vocab_size": self.vocab_size if output is None else len(output),
            "dtype": weights["fc.weight"].dtype,
        }

    def _window_fields(self, num_layers: int) -> dict[str, Any]:
        """Which layers see a window, and its size."""
        layer_types = (self.options.get("layer_types") or ())[:num_layers] or None
        window = self.options.get("sliding_window")
        if self.options.get("use_swa") and layer_types is None:
            layer_types, window = ["sliding_attention"] * num_layers, self.options.get("swa_window_size")
        if self.options.get("use_sliding_window") and layer_types is None and is_int(window):
            num_full = self.options.get("max_window_layers", 28)  # as in the config of Qwen3
            layer_types = [
                "sliding_attention" if layer >= num_full else "full_attention" for layer in range(num_layers)
            ]
        sliding = "sliding_attention" in (layer_types or ())
        self.need(
            layer_types is None or (len(layer_types) == num_layers and (not sliding or is_int(window))),
            f"has layer_types={brief(layer_types)} and sliding_window={brief(window)} for its {num_layers} layers; "
            "get it again.",
        )
        return {"layer_types": layer_types, "sliding_window": window if sliding else None}

    def _proposal_fields(self, kind: str) -> dict[str, Any]:
        """How the head drafts, and for whom."""
        proposal = self.raw.get("speculators_config") or {}
        methods = proposal.get("proposal_methods") or [{}]
        verifier = proposal.get("verifier") or {}
        default = proposal.get("default_proposal_method")
        method = next((method for method in methods if method.get("proposal_type") == default), methods[0])
        mask_token: Any = self.first_value(MASK_TOKEN_OPTIONS)
        self.need(
            kind == "eagle3" or (is_int(mask_token) and 0 <= mask_token < self.vocab_size),
            f"has mask_token_id={brief(mask_token)} in its config.json; it needs that of a token of the target.",
        )
        fields = {
            "mask_token_id": mask_token,
            "num_draft_tokens": method.get("speculative_tokens", 5),
            "target": verifier.get("name_or_path") or public_name(self.target),
            "target_architectures": verifier.get("architectures") or None,
        }
        if kind in EAGLE_KINDS:
            return fields
        block_size: Any = self.options.get("block_size", 8 if self.is_of_speculators else None)
        self.need(
            is_int(block_size) and block_size > 1,
            f"has block_size={brief(block_size)} in its config.json; it needs the positions of a block, 2 or more.",
        )
        anchor = self._samples_from_anchor(kind, block_size, method.get("speculative_tokens"))
        if not proposal:
            fields["num_draft_tokens"] = block_size - (not anchor)
        return fields | {"block_size": block_size, "sample_from_anchor": anchor}

    def _samples_from_anchor(self, kind: str, block_size: int, num_proposed: Any) -> bool:
        """Whether the first position of a block proposes a token too: as it is said, or as its producer means it.

        Files of speculators without the key are older than sampling from the anchor; DSpark of all others does.
        """
        if "layout" in self.overrides:
            return SAMPLES_FROM_ANCHOR[self.overrides["layout"]]
        stated = self.first_value(ANCHOR_OPTIONS)
        from_anchor = kind == "dspark" and not self.is_of_speculators if stated is None else bool(stated)
        option, other = ("anchor", "fill-in") if from_anchor else ("fill-in", "anchor")
        self.need(
            num_proposed != (block_size - 1 if from_anchor else block_size),
            f"proposes {num_proposed} tokens a block of {block_size} by speculative_tokens, which is the number of "
            f"layout={other!r}, and by sample_from_anchor={brief(stated)} its layout is {option!r}; give "
            f"layout={option!r} if it proposes fewer than it could, and layout={other!r} if it was "
            "trained so.",
        )
        return from_anchor

    def _layer_ids(self, kind: str) -> list[int]:
        """Which states the head reads, as they are given, or as they stand in the files."""
        depth, width = self.target_config.num_hidden_layers, self.target_config.hidden_size
        model = type(self.target).__name__
        joined_width = self.weights["fc.weight"].shape[-1]
        self.need(
            joined_width % width == 0,
            f"reads {joined_width} numbers a position, and the states of {model} have {width}; choose a head that was "
            "made for this target.",
        )
        count = joined_width // width
        override = self.overrides.get("layer_ids")
        ids = self._layer_ids_in_files(kind, depth, count) if override is None else override
        self.need(
            isinstance(ids, list | tuple) and all(is_int(number) and number >= 0 for number in ids),
            f"has layer_ids={brief(ids)}, which are no list of numbers of 0 or more; {GIVE_LAYER_IDS}.",
        )
        self.need(
            len(ids) == count,
            f"has {len(ids)} layer ids ({ids}) and reads {count} states of {width} numbers; {GIVE_LAYER_IDS}, {count} "
            "of them, or choose a head that was made for this target.",
        )
        self.need(
            max(ids) <= depth,
            f"reads the output of layer {max(ids)}, and {model} has {depth}; choose a head that was made for this "
            f"target, or {GIVE_LAYER_IDS}.",
        )
        self.need(
            override is not None or depth not in ids,
            f"reads the last state (layer id {depth}), which some mean before the final norm and others behind it; "
            f"{GIVE_LAYER_IDS}, {depth} for the one before the norm.",
        )
        return list(ids)

    def _layer_ids_in_files(self, kind: str, depth: int, count: int) -> Any:
        """The layer ids in files: where they stand says whether they count outputs of layers, or layers from 0."""
        candidates: list[list[int]] = []
        for part, name, offset in LAYER_ID_OPTIONS:
            config = (self.raw.get(part) or {}) if part else self.raw
            ids = config.get(name)
            self.need(
                ids is None or (isinstance(ids, list) and all(map(is_int, ids))),
                f"has layer ids {brief(ids)} in its config.json, no list of numbers; {GIVE_LAYER_IDS}.",
            )
            if ids:
                candidates.append([number + offset for number in ids])
        self.need(
            all(ids == candidates[0] for ids in candidates),
            f"has layer ids in two places, which mean different states ({brief(candidates)}); {GIVE_LAYER_IDS}.",
        )
        if candidates:
            return candidates[0]
        if kind in EAGLE_KINDS:
            return [2, depth // 2, depth - 3]
        if count == 1:
            return [depth // 2 + 1]
        return [round(1 + index * (depth - 4) / (count - 1)) + 1 for index in range(count)]
