"""A tiny random model of nearly every type that transformers can generate text with, from one shrinking of configs."""

import dataclasses
import zlib

import torch
import transformers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from zoo_special import CONFIGS, DEFAULTS, GENERATION, SCALES, SEEDS, SOUNDS


KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
VOCAB_SIZE = 96
FIRST_WORD, LAST_WORD = 4, 80  # ids of prompts; special ids lie outside

NAMES = {
    96: "vocab_size pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab src_vocab_size "
    "tgt_vocab_size decoder_vocab_size vocab_size_per_layer_input",
    64: "intermediate_size d_ff decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size dff dim_ff d_inner "
    "feed_forward_size n_inner intermediate_size_mlp dense_intermediate_size mlp_dim "
    "speech_encoder_intermediate_size t2u_decoder_ffn_dim t2u_encoder_ffn_dim attention_hidden_size lru_width "
    "projector_hidden_size",
    32: "hidden_size encoder_hidden_size hidden_dim pronunciation_embed_dim shape_embed_dim d_model n_embd "
    "embedding_dim emb_dim embedding_size word_embed_proj_dim input_embedding_size output_embedding_size "
    "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
    "shared_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank "
    "cross_hidden_size audio_hidden_size upsample_groups hidden_size_global backbone_hidden_size output_dim "
    "out_hidden_size",
    16: "downsample_hidden_size ext_pw_out_channel nemo_conv_channels subsampling_conv_channels conv_channels "
    "depthwise_separable_out_channel output_channels hc_lowrank num_mel_bins feature_projection_input_dim "
    "input_feat_per_channel index_head_dim index_n_heads linear_key_head_dim linear_value_head_dim "
    "hidden_size_per_layer_input laurel_rank router_hidden_size linear_head_dim adapter_rank "
    "relative_attention_num_buckets num_buckets chunk_size mamba_chunk_size block_size",
    8: "head_dim d_kv dim_head cross_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim kv_channels "
    "sliding_window sliding_window_size attention_window_size attention_chunk_size window_size local_attention "
    "attention_head_size swa_head_dim state_size ssm_state_size mamba_d_state time_step_rank mamba_dt_rank "
    "mamba_head_dim mamba_d_head mamba_n_heads mamba_num_heads attention_window d_head image_size o_lora_rank "
    "d_rel rel_extent",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "decoder_num_attention_heads encoder_num_attention_heads num_decoder_attention_heads "
    "num_encoder_attention_heads attention_heads cross_num_attention_heads speech_encoder_attention_heads "
    "t2u_decoder_attention_heads t2u_encoder_attention_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts swa_num_attention_heads linear_num_value_heads linear_num_heads patch_size crop_size "
    "spatial_patch_size index_topk",
    2: "num_key_value_heads decoder_num_key_value_heads encoder_num_key_value_heads cross_num_key_value_heads "
    "swa_num_key_value_heads linear_num_key_heads kv_n_heads num_kv_heads num_experts_per_tok "
    "num_experts_per_token moe_top_k moe_topk moe_k num_hidden_layers n_layer n_layers num_layers decoder_layers "
    "encoder_layers decoder_num_hidden_layers encoder_num_hidden_layers num_decoder_layers num_encoder_layers "
    "num_blocks depth speech_encoder_layers t2u_decoder_layers t2u_encoder_layers num_layers_per_stack",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts n_groups "
    "mamba_n_groups mamba_ngroups first_k_dense_replace num_dense_layers",
    128: "max_position_embeddings n_positions max_seq_len n_ctx max_source_positions max_target_positions "
    "max_encoder_position_embeddings max_decoder_position_embeddings max_speech_positions max_text_positions "
    "context_length num_position_embeddings",
    0: "num_kv_shared_layers num_nextn_predict_layers num_mtp_layers layerdrop decoder_layerdrop encoder_layerdrop",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
SHARPNESS = 2.5  # standard deviation of the logits
RECURRENCES = ("A_log", "dt_", "time_")
CROSSINGS, CROSS_GAIN = ("encoder_attn", "cross", "EncDec"), 1.5  # so that a decoder heeds its encoder
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def model_types() -> list[tuple[str, str]]:
    """Every (kind, model type) that transformers lists."""
    return sorted((kind, model_type) for kind, names in KINDS.items() for model_type in names)


def build(kind: str, model_type: str, seed: int = 0) -> PreTrainedModel:
    """A tiny random model in float32 and evaluation mode that never ends a text."""
    config = tiny_config(model_type)
    if kind == "causal" and "is_decoder" in vars(config):
        config.is_decoder = True
    model_class = getattr(transformers, KINDS[kind][model_type])
    if model_class.config_class in (type(getattr(config, name, None)) for name in ("text_config", "decoder")):
        config = config.get_text_config(decoder=True)
    offset = _listed(SEEDS, kind, model_type) or (0,)
    torch.manual_seed(seed + offset[0])
    model = model_class._from_config(config).float().eval()
    usual = (0.5, 3.0) if config.is_encoder_decoder else (2.0, 1.0)
    _scale(model, *_listed(SCALES, kind, model_type) or usual)
    start = getattr(config, "decoder_start_token_id", None)
    start = 2 if start is None and config.is_encoder_decoder else start
    special = {"bos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": start} | GENERATION.get(model_type, {})
    model.generation_config = GenerationConfig(**special)
    return model


def _listed(table: dict[tuple, str], kind: str, model_type: str) -> tuple:
    """The key, less its kind, under which a table names the type."""
    return next((key[1:] for key, names in table.items() if key[0] == kind and model_type in names.split()), ())


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The default config of a type with every size made small."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_shrunk(config_class(**DEFAULTS.get(model_type, {}))))


def _shrunk(config: PreTrainedConfig) -> dict:
    """Arguments that make a small config of the same class."""
    values = {field.name: vars(config).get(field.name) for field in dataclasses.fields(config)}
    lists = _layer_lists(values)
    layers = max([2, *(len(dict.fromkeys(kinds)) for kinds in lists.values())])
    small = {name: _cycled(kinds, layers) for name, kinds in lists.items()}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = {"model_type": value.model_type} | _shrunk(value)
        elif name in LAYER_COUNTS and value is not None:
            small[name] = layers
        elif name.endswith(("_token_id", "_token_index")) and (value is not None or name == "pad_token_id"):
            small[name] = _token(name)
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(value, SIZES[name])
    if values.get("kv_lora_rank") and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "head_dim" in values:
        small.setdefault("head_dim", SIZES["head_dim"])
    small |= {name: False for name in ("tie_word_embeddings", "tie_encoder_decoder") if name in values}
    return _merged(small, CONFIGS.get(config.model_type, {}))


def _merged(old: dict, new: dict) -> dict:
    merged = dict(old)
    for name, value in new.items():
        both = isinstance(value, dict) and "model_type" in merged.get(name, {})
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _layer_lists(values: dict) -> dict[str, list]:
    """The arguments that hold one word for each layer."""
    count = next((values[name] for name in LAYER_COUNTS if values.get(name)), None)
    return {
        name: list(value)
        for name, value in values.items()
        if isinstance(value, list | tuple)
        and ("layer" in name or name == "indexer_types")
        and len(set(value)) < len(value) == count
    }


def _cycled(kinds: list, layers: int) -> list:
    distinct = list(dict.fromkeys(kinds))
    return [distinct[i % len(distinct)] for i in range(layers)]


def _token(name: str) -> int | None:
    """A special id: none for the end, low for the common ones, one of the last ids for the rest."""
    if name == "eos_token_id":
        return None
    known = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 2}
    return known.get(name, LAST_WORD + 1 + zlib.crc32(name.encode()) % (VOCAB_SIZE - LAST_WORD - 1))


@torch.no_grad()
def _scale(model: PreTrainedModel, gain: float, width: float) -> None:
    """Random matrices that multiply sizes by `gain`, embeddings of standard deviation `width`, and a sharp law."""
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear) and head.weight is getattr(model.get_input_embeddings(), "weight", None):
        head.weight = torch.nn.Parameter(head.weight.clone())  # some types tie them whatever the config says
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or not parameter.requires_grad or any(word in name for word in RECURRENCES):
            continue
        fan_in = parameter[0].numel() if "conv" in name else parameter.shape[-1]
        share = CROSS_GAIN if any(word in name for word in CROSSINGS) else 1.0
        parameter.normal_(0, width if id(parameter) in tables else share * gain * fan_in**-0.5)
    weight = getattr(head, "weight", None)
    if weight is not None and len(weight) == VOCAB_SIZE:
        weight.normal_(0, SHARPNESS * weight.shape[-1] ** -0.5)
        weight[:FIRST_WORD] = weight[LAST_WORD + 1 :] = 0  # so that special ids are never the likeliest


def inputs(model: PreTrainedModel, rows: int = 3) -> dict[str, torch.Tensor]:
    """What `generate` takes: rows of unequal length, padded on the left for a decoder, on the right for an encoder."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([(9, 4, 7, 8, 5)[row % 5] for row in range(rows)])
    sounds = _sounds(*SOUNDS[model.config.model_type], lengths, generator) if _hears(model) else {}
    if sounds and (model.config.is_encoder_decoder or "input_values" in sounds):
        return sounds
    places = torch.arange(int(lengths.max()))
    input_ids = torch.randint(FIRST_WORD, LAST_WORD + 1, (rows, len(places)), generator=generator)
    lefts = places >= len(places) - lengths[:, None]
    attention_mask = (places < lengths[:, None] if model.config.is_encoder_decoder else lefts).long()
    return sounds | {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


def _hears(model: PreTrainedModel) -> bool:
    """Whether the model has to be given sound."""
    return model.config.model_type in SOUNDS and not type(model).__name__.endswith(("ForCausalLM", "ForTextToText"))


def _sounds(name: str, shape: tuple, frames: int, lengths: torch.Tensor, generator: torch.Generator) -> dict:
    """Random features of sound, with so many frames to a unit of `lengths`; of equal length where that is 0."""
    shape = [frames * int(lengths.max()) if size is None else size for size in shape]
    features = torch.randn(len(lengths), *shape, generator=generator)
    if not frames:
        return {name: features}
    attention_mask = (torch.arange(shape[0]) < frames * lengths[:, None]).long()
    return {
        name: features * attention_mask.reshape(*attention_mask.shape, *[1] * (len(shape) - 1)),
        "attention_mask": attention_mask,
    }
