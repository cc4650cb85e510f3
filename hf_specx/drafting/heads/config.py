"""What a draft head is, the same for every published format; kept on disk in the form of the *speculators* library."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedConfig


ARCHITECTURES = {
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
    "dflash2": "DFlash2DraftModel",
    "domino": "DominoDraftModel",
    "medusa": "MedusaModel",
}
EAGLE_KINDS = ("eagle3", "peagle")
BLOCK_KINDS = ("dflash", "dspark", "dflash2", "domino")
# fields of `HeadConfig` that `config.json` has under their own names
EAGLE_FIELDS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
BLOCK_FIELDS = ("block_size", "sample_from_anchor", "sliding_window_non_causal")
FIELDS_OF_KIND = {  # the same, beside those
    "dspark": ("markov_rank", "markov_head_type", "confidence_head_with_markov"),
    "dflash2": (
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
        "output_multiplier",
        "final_logit_softcapping",
        "input_embedding_scale",
    ),
    "domino": ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"),
}
NOT_OF_SPECULATORS = {"is_causal": False, "use_last_layernorm": True}  # only written if they are not this
LAYER_FIELDS = """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size
    rms_norm_eps max_position_embeddings attention_bias layer_types sliding_window
""".split()  # noqa: SIM905


class HeadConfig(PreTrainedConfig):
    """A draft head: its kind, its sizes, and which of the target's states it reads.

    Of `layer_ids` 0 is the embeddings, l the output of l layers; the number of the target's layers is the output of
    the last one before the final norm, for Medusa behind it.
    """

    kind: str = "eagle3"  # or "peagle", "dflash", "dspark", "dflash2", "domino", "medusa"
    layer_ids: list[int] | None = None  # which states of the target it reads
    hidden_size: int = 0
    target_hidden_size: int = 0
    intermediate_size: int = 0
    hidden_act: str = "silu"  # read by `LlamaMLP`, as `mlp_bias` is
    mlp_bias: bool = False
    num_hidden_layers: int = 1  # of the head, as its weights have them
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 0
    vocab_size: int = 0  # of the target
    draft_vocab_size: int = 0  # of the head, whose tokens may be a part of those
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    rope_parameters: dict[str, Any] | None = None
    qk_norm: bool = False  # whether there are such weights, as of the biases
    attention_bias: bool = False
    output_bias: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False  # whether the first layer adds to the normed state instead of the state itself
    norm_before_fc: bool = False  # one norm over all states that are read, before they are joined
    fc_norm: bool = False  # or one for each
    norm_output: bool = False  # whether the state that is fed back is the normed one
    use_last_layernorm: bool = True  # whether logits are computed of the normed one
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    sliding_window_non_causal: bool = False  # whether layers with a window see all of the block
    is_causal: bool = False  # whether no layer does: a position sees itself and those before it
    mask_token_id: int | None = None  # the token of positions that are not known yet
    mask_embedding: bool = False  # whether the head has a vector of its own for it
    block_size: int | None = None  # positions of a block
    sample_from_anchor: bool = False  # whether the first of them, the last token, proposes one as well
    markov_rank: int = 0  # of the matrices by which the previous token adds to logits; 0 is none
    markov_head_type: str = "vanilla"
    confidence_head: bool = False  # whether the head says how sure it is of a candidate
    confidence_head_with_markov: bool = False  # and looks at the previous token for that
    conv_kernel_size: int = 0  # of DFlash2: positions of a block that a convolution joins
    conv_group_size: int = 0  # channels that share what is added to a kernel
    selector_rank: int = 0  # of the codebooks by which the previous token chooses
    selector_top_k: int = 0  # tokens of most logits, among which it chooses
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0  # 0 is none
    input_embedding_scale: float = 1.0
    gru_hidden_dim: int = 0  # of Domino: width of the state of the tokens before a candidate
    emb_dim: int = 0  # width in which it and the state of the block are joined
    pure_draft_prefix_len: int = 0  # candidates whose logits nothing is added to
    medusa_num_heads: int | None = None
    medusa_num_layers: int | None = None
    num_draft_tokens: int = 5  # how many candidates its makers recommend
    own_embeddings: bool = False  # or it uses the target's
    own_head: bool = False
    target: str = ""  # that it was made for
    target_architectures: list[str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As `config.json` has it; for Medusa in the form of Medusa."""
        dtype = str(self.dtype).removeprefix("torch.") if isinstance(self.dtype, torch.dtype) else self.dtype
        common = {"architectures": [ARCHITECTURES[self.kind]], "dtype": dtype}
        if self.kind == "medusa":
            sizes = ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")
            return common | self._values(sizes) | {"base_model_name_or_path": self.target}
        is_eagle = self.kind in EAGLE_KINDS
        values = common | self._values(EAGLE_FIELDS if is_eagle else BLOCK_FIELDS)
        values |= self._values(("draft_vocab_size", "target_hidden_size", "mask_token_id"))
        values |= self._values(FIELDS_OF_KIND.get(self.kind, ()))
        if self.kind == "dspark":
            values["enable_confidence_head"] = self.confidence_head
        values |= self._values(
            [name for name, default in NOT_OF_SPECULATORS.items() if getattr(self, name) != default]
        )
        return values | {
            f"{'eagle_' * is_eagle}aux_hidden_state_layer_ids": self.layer_ids,
            "speculators_model_type": self.kind,
            "speculators_version": "0.9.0",
            "transformer_layer_config": self._layer(),
            "speculators_config": self._proposal(),
        }

    to_diff_dict = to_dict

    def _values(self, fields: Iterable[str]) -> dict[str, Any]:
        return {field: getattr(self, field) for field in fields}

    def _layer(self) -> dict[str, Any]:
        """The part on one layer, as transformers' config of that architecture."""
        rope = dict(self.rope_parameters or {})
        values = self._values(LAYER_FIELDS) | {
            "model_type": "qwen3" if self.qk_norm else "llama",
            "rope_theta": rope.pop("rope_theta", 10000.0),
        }
        if rope.get("rope_type", "default") != "default" or "rope_dim" in rope:
            values["rope_scaling"] = rope
        return values | {"use_sliding_window": self.sliding_window is not None}

    def _proposal(self) -> dict[str, Any]:
        """The part on how to draft, and for whom."""
        greedy = {"proposal_type": "greedy", "speculative_tokens": self.num_draft_tokens}
        return {
            "algorithm": self.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": self.target, "architectures": self.target_architectures or []},
        }
