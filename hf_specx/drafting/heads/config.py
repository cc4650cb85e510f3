"""What a draft head is, the same for every published format; kept on disk in the form of the *speculators* library."""

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
OF_EAGLE, OF_BLOCKS = ("eagle3", "peagle"), ("dflash", "dspark", "dflash2", "domino")
OF_ALL = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OF_BLOCK = ("block_size", "sample_from_anchor", "sliding_window_non_causal")
OF_OTHERS = {"is_causal": False, "use_last_layernorm": True}  # what speculators does not write; only if it is not this
OF_MARKOV = ("markov_rank", "markov_head_type", "confidence_head_with_markov")
OF_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
OF_DFLASH2 = (*OF_SELECTOR, "output_multiplier", "final_logit_softcapping", "input_embedding_scale")
OF_DOMINO = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
OF_LAYERS = """
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
    hidden_act: str = "silu"  # as `mlp_bias` what `LlamaMLP` asks for
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
    qk_norm: bool = False  # as the biases whether there are such weights
    attention_bias: bool = False
    output_bias: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False  # whether the first layer adds to the normed state instead of the state itself
    norm_before_fc: bool = False  # one norm over all states that are read, before they are joined
    fc_norm: bool = False  # or one for each
    norm_output: bool = False  # whether the state that is fed back is the normed one
    use_last_layernorm: bool = True  # whether scores are of the normed one
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    sliding_window_non_causal: bool = False  # whether layers with a window see all of the block
    is_causal: bool = False  # whether no layer does: a place sees itself and what is before it
    mask_token_id: int | None = None  # the token of positions that are not known yet
    mask_embedding: bool = False  # whether the head has a vector of its own for it
    block_size: int | None = None  # positions of a block
    sample_from_anchor: bool = False  # whether the first of them proposes a token as well
    markov_rank: int = 0  # of what adds to the scores of a position by the token before it; 0 is none
    markov_head_type: str = "vanilla"
    confidence_head: bool = False  # whether the head says how sure it is of a candidate
    confidence_head_with_markov: bool = False  # and looks at the token before for that
    conv_kernel_size: int = 0  # of DFlash2: positions of a block that a convolution joins
    conv_group_size: int = 0  # channels that share what it adds to a kernel
    selector_rank: int = 0  # of what the token before and the state say of a candidate
    selector_top_k: int = 0  # candidates of a place
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0  # 0 is none
    input_embedding_scale: float = 1.0
    gru_hidden_dim: int = 0  # of Domino: of the state of the tokens before a place
    emb_dim: int = 0  # of what it and the block's state are joined in
    pure_draft_prefix_len: int = 0  # places that are not corrected
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
            return common | {name: getattr(self, name) for name in sizes} | {"base_model_name_or_path": self.target}
        is_eagle = self.kind in OF_EAGLE
        names = (*(OF_ALL if is_eagle else OF_BLOCK), "draft_vocab_size", "target_hidden_size", "mask_token_id")
        found = common | {name: getattr(self, name) for name in names}
        if self.kind == "dspark":
            found |= {name: getattr(self, name) for name in OF_MARKOV}
            found["enable_confidence_head"] = self.confidence_head
        if self.kind == "dflash2":
            found |= {name: getattr(self, name) for name in OF_DFLASH2}
        if self.kind == "domino":
            found |= {name: getattr(self, name) for name in OF_DOMINO}
        found |= {name: getattr(self, name) for name, usual in OF_OTHERS.items() if getattr(self, name) != usual}
        return found | {
            f"{'eagle_' * is_eagle}aux_hidden_state_layer_ids": self.layer_ids,
            "speculators_model_type": self.kind,
            "speculators_version": "0.9.0",
            "transformer_layer_config": self._layer(),
            "speculators_config": self._proposal(),
        }

    to_diff_dict = to_dict

    def _layer(self) -> dict[str, Any]:
        """The part on one layer, as transformers' config of that architecture."""
        found = {name: getattr(self, name) for name in OF_LAYERS}
        scaling = dict(self.rope_parameters or {})
        found |= {"model_type": "qwen3" if self.qk_norm else "llama", "rope_theta": scaling.pop("rope_theta", 10000.0)}
        if scaling.get("rope_type", "default") != "default" or "rope_dim" in scaling:
            found["rope_scaling"] = scaling
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
