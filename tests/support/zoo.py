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

ENDINGS: dict[int | None, str] = {  # of names of sizes; the longest one that fits says the size, None leaves it
    128: "context_length max_seq_len n_ctx position_embeddings positions",
    96: "encoder_hash_byte_group_vocab vocab_size vocab_size_per_layer_input",
    64: "attention_hidden_size d_inner dff feed_forward_size ff ffn_dim ffn_hidden_size intermediate_size "
    "intermediate_size_mlp lru_width mlp_dim projector_hidden_size",
    32: "d_model emb_dim embedding_dim embedding_size expert_ffn_hidden_size hidden_dim hidden_size "
    "hidden_size_global lora_rank moe_intermediate_size n_embd output_dim pronunciation_embed_dim "
    "shape_embed_dim shared_expert_intermediate_size shared_experts_intermediate_size "
    "shared_intermediate_size upsample_groups word_embed_proj_dim",
    16: "adapter_rank block_size chunk_size conv_channels downsample_hidden_size feature_projection_input_dim "
    "hc_lowrank hidden_size_per_layer_input index_head_dim index_n_heads input_feat_per_channel "
    "laurel_rank linear_head_dim linear_key_head_dim linear_value_head_dim num_buckets num_mel_bins "
    "out_channel output_channels router_hidden_size",
    8: "attention_chunk_size attention_head_size attention_window d_kv d_rel head head_dim image_size "
    "kv_channels local_attention mamba_d_state mamba_dt_rank mamba_n_heads mamba_num_heads o_lora_rank "
    "rel_extent rotary_dim sliding_window state_size time_step_rank window_size",
    4: "crop_size experts heads index_topk n_head patch_size",
    2: "decoder_layers decoder_num_hidden_layers depth encoder_layers encoder_num_hidden_layers "
    "linear_num_key_heads moe_k moe_topk num_blocks num_experts_per_tok num_key_value_heads num_kv_heads "
    "num_layers_per_stack",
    1: "first_k_dense_replace n_group n_groups num_dense_layers shared_experts topk_group",
    0: "num_kv_shared_layers num_nextn_predict_layers",
    None: "acoustic_tokenizer_chunk_size attention_head_dim conf_attention_chunk_size conf_num_attention_heads "
    "keep_window_size n_mamba_heads num_sparse_decoder_layers num_sparse_encoder_layers "
    "original_max_position_embeddings position_bias_num_buckets qk_head_dim unpadded_vocab_size",
}
SIZES = {ending: size for size, endings in ENDINGS.items() for ending in endings.split()}
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
        elif isinstance(value, int) and not isinstance(value, bool) and (size := _size(name)) is not None:
            small[name] = min(value, size)
    if values.get("kv_lora_rank") and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "head_dim" in values:
        small.setdefault("head_dim", SIZES["head_dim"])
    small |= {name: False for name in ("tie_word_embeddings", "tie_encoder_decoder") if name in values}
    return _merged(small, CONFIGS.get(config.model_type, {}))


def _size(name: str) -> int | None:
    """How large what has this name may be, by the longest of its endings that is known."""
    words = name.split("_")
    endings = ("_".join(words[first:]) for first in range(len(words)))
    return next((SIZES[ending] for ending in endings if ending in SIZES), None)


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
    heard = attention_mask.reshape(*attention_mask.shape, *[1] * (len(shape) - 1))
    return {name: features * heard, "attention_mask": attention_mask}
