"""What the published forms of draft heads say, and how: names of tensors, options, and where layer ids stand."""

import re
from typing import Any


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
MASKS = ("mask_token_id", "ptd_token_id", "pard_token")
OF_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
PARTS = ("transformer_layer_config", "eagle_config", "dflash_config")  # of a config, with options of their own
IDS = "eagle_aux_hidden_state_layer_ids"
OUTPUTS = ((IDS,), ("aux_hidden_state_layer_ids",))  # where layer ids stand that count outputs of layers
LAYERS = (("eagle_config", IDS), ("target_layer_ids",), ("dflash_config", "target_layer_ids"))  # or layers from 0
ATTENTION, MLP = "layers.0.self_attn.", "layers.0.mlp."
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
STATED = {  # fields that tensors do not tell, and what they are where a config says nothing
    "norm_before_residual": False,
    "norm_output": False,
    "sliding_window_non_causal": False,
    "markov_head_type": "vanilla",
}


def describes_head(raw: dict[str, Any]) -> bool:
    """Whether a config says that it is a draft head's; some say nothing of it."""
    keys = ("speculators_model_type", "medusa_num_heads", "eagle_config", "dflash_config", "draft_vocab_size")
    made_for = " ".join(map(str, raw.get("architectures") or ()))
    says = re.search("eagle3|dflash|dspark|medusa", made_for, re.IGNORECASE) is not None
    return says or any(key in raw for key in (*keys, "target_layer_ids"))
