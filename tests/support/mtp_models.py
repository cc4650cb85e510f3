"""Tiny random targets with multi-token layers of their own, saved as their checkpoints have them."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import GROUPED, SIZES
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_layers import MtpModel

from hf_specx.drafting.heads.mtp import with_layers


VOCAB_SIZE = 8  # so that candidates of random layers are often right
COMMON = SIZES | GROUPED | {"vocab_size": VOCAB_SIZE, "moe_intermediate_size": 16, "max_position_embeddings": 256}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
TYPES = {
    "deepseek_v3": EXPERTS | LATENT | {"num_nextn_predict_layers": 1},
    "deepseek_v3 of three": EXPERTS | LATENT | {"num_nextn_predict_layers": 3},
    "glm4_moe": EXPERTS | {"num_nextn_predict_layers": 2},
    "mellum": {"num_experts": 4, "num_experts_per_tok": 2, "num_nextn_predict_layers": 1}
    | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "step3p7": {"num_nextn_predict_layers": 2, "sliding_window": 6, "n_routed_experts": 4}
    | {"num_experts_per_tok": 2, "share_expert_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"mlp_layer_types": ["dense", "sparse", "dense", "dense"]},
    "inkling_text": {"num_mtp_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
LINEAR |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16}
RECURRENT = {  # which transformers does not draft with
    "qwen3_next": LINEAR | QWEN_EXPERTS,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | QWEN_EXPERTS,
}


def mtp_target(name: str, folder: Path, monkeypatch=None) -> PreTrainedModel:
    """A target of `TYPES` or `RECURRENT`, loaded from the folder, where its files and those of its layers are put."""
    kind, settings = name.split()[0], COMMON | (TYPES | RECURRENT)[name]
    torch.manual_seed(0)
    if kind == "step3p7":
        vision = {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14}
        config = AutoConfig.for_model(kind, text_config=settings, vision_config=vision, image_token_id=VOCAB_SIZE - 1)
        model = AutoModelForImageTextToText.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    if monkeypatch is not None:  # the names in real checkpoints have the number of real layers
        patterns = [rf"model\.layers\.{COMMON['num_hidden_layers'] + number}\..*" for number in range(4)]
        monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", patterns)
    known = with_layers(model)
    layers = MtpModel(known, known.config.get_text_config().num_mtp_layers)
    model.save_pretrained(folder)
    found = load_file(folder / "model.safetensors")
    own = {key: value for key, value in layers.state_dict().items() if key.startswith(("layers.", "shared_post"))}
    for key, value in own.items():
        found[_name(kind, key)] = 0.25 * torch.randn(value.shape) + ("norm" in key)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return type(model).from_pretrained(folder).eval()


def _name(kind: str, key: str) -> str:
    """The name in a checkpoint of a tensor that transformers' `MtpModel` has by another."""
    if kind == "mellum" or kind in RECURRENT:
        outer = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
        part = key.split(".")[2]
        return f"mtp.{outer[part]}.weight" if part in outer else f"mtp.{key.replace('mtp_block.', '')}"
    if kind == "inkling_text":
        return f"model.mtp.{key.replace('mtp_block.', 'transformer_block.')}"
    _, number, rest = key.split(".", 2)
    rest = rest.removeprefix("mtp_block.") if "mtp_block" in rest else rest.replace("post_norm.", "shared_head.norm.")
    return f"model.layers.{COMMON['num_hidden_layers'] + int(number)}.{rest}"
