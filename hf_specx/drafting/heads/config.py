"""What a draft head is, the same for every published format; kept on disk in the form of the *speculators* library."""

from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from hf_specx.common.errors import brief, require


ARCHITECTURES = {
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
    "medusa": "MedusaModel",
}
OF_EAGLE, OF_BLOCKS = ("eagle3", "peagle"), ("dflash", "dspark")
OF_ALL = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OF_BLOCK = ("block_size", "sample_from_anchor", "sliding_window_non_causal")
OF_MARKOV = ("markov_rank", "markov_head_type", "confidence_head_with_markov")
OF_LAYERS = """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
    rms_norm_eps max_position_embeddings attention_bias layer_types sliding_window
""".split()  # noqa: SIM905


class HeadConfig(PreTrainedConfig):
    """A draft head: its kind, its sizes, and which of the target's states it reads.

    Attributes:
        kind: "eagle3", "peagle", "dflash", "dspark" or "medusa".
        layer_ids: which states of the target it reads: 0 is the embeddings, l the output of l layers. The number of
            the target's layers is the output of the last one before the final norm; for Medusa behind it.
        hidden_size, target_hidden_size: of the head, and of the states.
        num_hidden_layers: of the head, as its weights have them.
        vocab_size, draft_vocab_size: of the target, and of the head, whose tokens may be a part of those.
        qk_norm, attention_bias, output_bias, fc_bias: whether there are such weights.
        norm_before_residual: whether the first layer adds to the normed state instead of the state itself.
        norm_before_fc, fc_norm: one norm over all states that are read, or one for each, before they are joined.
        norm_output: whether the state that is fed back is the normed one.
        mask_token_id: the token of positions that are not known yet.
        block_size: positions of a block; `sample_from_anchor` whether the first of them proposes a token as well.
        sliding_window_non_causal: whether layers with a window see all of the block.
        markov_rank, markov_head_type: of what adds to the scores of a position by the token before it; 0 is none.
        confidence_head, confidence_head_with_markov: whether the head says how sure it is of a candidate, and whether
            it looks at the token before for that.
        num_draft_tokens: how many candidates its makers recommend.
        own_embeddings, own_head: whether it has its own, or uses the target's.
        target, target_architectures: the target that it was made for.
    """

    kind: str = "eagle3"
    layer_ids: list[int] | None = None
    hidden_size: int = 0
    target_hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 0
    vocab_size: int = 0
    draft_vocab_size: int = 0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    sliding_window_non_causal: bool = False
    mask_token_id: int | None = None
    block_size: int | None = None
    sample_from_anchor: bool = False
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    confidence_head: bool = False
    confidence_head_with_markov: bool = False
    medusa_num_heads: int | None = None
    medusa_num_layers: int | None = None
    num_draft_tokens: int = 5
    own_embeddings: bool = False
    own_head: bool = False
    target: str = ""
    target_architectures: list[str] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """From what `config.json` has; fields by the names above are taken as they are."""
        return super().from_dict(fields_of(config_dict), **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As `config.json` has it; for Medusa in the form of Medusa."""
        dtype = str(self.dtype).removeprefix("torch.") if isinstance(self.dtype, torch.dtype) else self.dtype
        common = {"architectures": [ARCHITECTURES[self.kind]], "dtype": dtype}
        if self.kind == "medusa":
            sizes = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")
            return common | {name: getattr(self, name) for name in sizes} | {"base_model_name_or_path": self.target}
        is_eagle = self.kind in OF_EAGLE
        names = (*(OF_ALL if is_eagle else OF_BLOCK), "draft_vocab_size", "target_hidden_size", "mask_token_id")
        found = common | {name: getattr(self, name) for name in names}
        if self.kind == "dspark":
            found |= {name: getattr(self, name) for name in OF_MARKOV}
            found["enable_confidence_head"] = self.confidence_head
        return found | {
            f"{'eagle_' * is_eagle}aux_hidden_state_layer_ids": self.layer_ids,
            "speculators_model_type": self.kind,
            "speculators_version": "0.9.0",
            "transformer_layer_config": self._layer(),
            "speculators_config": self._proposal(),
        }

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def _layer(self) -> dict[str, Any]:
        """The part on one layer, as transformers' config of that architecture."""
        found = {name: getattr(self, name) for name in OF_LAYERS}
        scaling = dict(self.rope_parameters or {})
        found |= {"model_type": "qwen3" if self.qk_norm else "llama", "rope_theta": scaling.pop("rope_theta", 10000.0)}
        if scaling.get("rope_type", "default") != "default":
            found["rope_scaling"] = scaling
        if self.partial_rotary_factor != 1:
            found["partial_rotary_factor"] = self.partial_rotary_factor
        return found | {"use_sliding_window": self.sliding_window is not None}

    def _proposal(self) -> dict[str, Any]:
        """The part on how to draft, and for whom."""
        greedy = {"proposal_type": "greedy", "speculative_tokens": self.num_draft_tokens}
        return {
            "algorithm": self.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": self.target, "architectures": self.target_architectures or []},
        }


def fields_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of `HeadConfig` that a config in the form of *speculators* or Medusa has; of any other, itself."""
    if "medusa_num_heads" in raw:
        kept = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size", "dtype")
        given = {name: raw[name] for name in kept if name in raw}
        return {"kind": "medusa", "target": raw.get("base_model_name_or_path") or ""} | given
    layer, proposal = raw.get("transformer_layer_config"), raw.get("speculators_config") or {}
    if layer is None:
        return raw
    methods, verifier = proposal.get("proposal_methods") or [{}], proposal.get("verifier") or {}
    chosen = [method for method in methods if method.get("proposal_type") == proposal.get("default_proposal_method")]
    ids = raw.get("eagle_aux_hidden_state_layer_ids", raw.get("aux_hidden_state_layer_ids"))
    found = layer_fields(layer, str(layer.get("model_type", "qwen3")).startswith("qwen3"))
    found |= {
        "kind": raw["speculators_model_type"],
        "layer_ids": ids,
        "confidence_head": bool(raw.get("enable_confidence_head")),
        "num_draft_tokens": (chosen or methods)[0].get("speculative_tokens", 5),
        "target": verifier.get("name_or_path") or "",
        "target_architectures": verifier.get("architectures") or None,
        "dtype": raw.get("dtype", raw.get("torch_dtype")),
    }
    names = (*OF_ALL, *OF_BLOCK, *OF_MARKOV, "draft_vocab_size", "target_hidden_size", "mask_token_id")
    return found | {name: raw[name] for name in names if raw.get(name) is not None}


def layer_fields(layer: dict[str, Any], qk_norm: bool) -> dict[str, Any]:
    """The fields that the config of a decoder layer has; what is absent there is the default of its architecture."""
    told = f"the head's layers have hidden_act={brief(layer.get('hidden_act'))}; only silu is supported."
    require(layer.get("hidden_act", "silu") == "silu", told)
    names = [*OF_LAYERS, "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"]
    layer_types = layer.get("layer_types")
    given = {name: layer[name] for name in names if layer.get(name) is not None and name != "layer_types"}
    architecture: Any = Qwen3Config if qk_norm else LlamaConfig
    try:
        known = architecture(**given)
    except Exception as error:  # of a type that only the Hub's library has
        raise ValueError(f"the config of the head's layers is no config of transformers: {error}") from error
    rope = dict(known.rope_parameters or {})
    factor = rope.pop("partial_rotary_factor", 1.0)
    rope.pop("mrope_section", None)  # text has one position, and that of pictures is one of three
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    found = {name: getattr(known, name, None) for name in OF_LAYERS}
    return found | {
        "rope_parameters": rope,
        "partial_rotary_factor": factor,
        "qk_norm": qk_norm,
        "layer_types": layer_types,
        "sliding_window": layer.get("sliding_window") if "sliding_attention" in (layer_types or ()) else None,
    }
