"""Tiny random models that see images."""

import math
from functools import cache

import torch
from tiny import GROUPED, SIZES, VOCAB_SIZE
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel


IMAGE, START, END = 40, 42, 43  # ids that stand for images; those of words are lower

TEXT = SIZES | GROUPED
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"image_size": 8, "patch_size": 4}
QWEN_TOWER = {"hidden_size": 16, "intermediate_size": 24, "depth": 2, "num_heads": 2}
QWEN_TOWER |= {"patch_size": 4, "out_hidden_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
TOWERS = {  # what differs from TOWER or QWEN_TOWER
    "llava": {"model_type": "clip_vision_model"},
    "mistral3": {"model_type": "pixtral", "patch_size": 2, "head_dim": 8},
    "gemma3": {"model_type": "siglip_vision_model"},
    "paligemma": {"model_type": "siglip_vision_model", "projection_dim": 32},
    "idefics3": {"image_size": 16},
    "smolvlm": {"image_size": 16},
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
TEXTS = {  # what differs from TEXT
    "llava": {"model_type": "llama"},
    "mistral3": {"model_type": "mistral", "sliding_window": 8},
    "gemma3": WINDOW | {"query_pre_attn_scalar": 8},
    "paligemma": {"model_type": "gemma"},
    "idefics3": {"model_type": "llama"},
    "smolvlm": {"model_type": "llama"},
    "qwen2_vl": {"rope_parameters": ROPE},
    "qwen2_5_vl": {"rope_parameters": ROPE},
    "qwen3_vl": {"rope_parameters": ROPE | {"mrope_interleaved": True}},
}
WHOLES = {
    "llava": {"image_seq_length": 4},
    "mistral3": {"spatial_merge_size": 2},
    "gemma3": {"mm_tokens_per_image": 4, "boi_token_index": START, "eoi_token_index": END},
    "paligemma": {"projection_dim": 32, "hidden_size": 32, "vocab_size": VOCAB_SIZE},
    "idefics3": {"scale_factor": 2, "pad_token_id": 0},
    "smolvlm": {"scale_factor": 2, "pad_token_id": 0},
}
MODEL_TYPES = tuple(TOWERS)


def config(model_type: str, **changes) -> PreTrainedConfig:
    """A tiny config; changes go to the text model."""
    qwen = model_type.startswith("qwen")
    whole = {"image_token_id": IMAGE, "tie_word_embeddings": False} | WHOLES.get(model_type, {})
    of_qwen = {"vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": END + 1}
    whole |= of_qwen if qwen else {"image_token_index": IMAGE}
    tower, text = (QWEN_TOWER if qwen else TOWER) | TOWERS[model_type], TEXT | TEXTS[model_type] | changes
    return CONFIG_MAPPING[model_type](vision_config=tower, text_config=text, **whole)


@cache
def seeing(model_type: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A random model whose text depends on its images."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config(model_type, **changes)).eval()
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) in tables:
                parameter.normal_()
            elif parameter.ndim > 1:
                parameter.normal_(0, 2 * parameter[0].numel() ** -0.5)
    return model


def inputs(model: PreTrainedModel, images: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Left-padded prompts of unequal length with one image or none each; Qwen's images differ in size."""
    name, generator = model.config.model_type, torch.Generator().manual_seed(0)
    qwen, grids, rows = name.startswith("qwen"), [], []
    for row, count in enumerate(images):
        words = torch.randint(1, IMAGE, ((7, 3, 5)[row],), generator=generator).tolist()
        grid = ((1, 4, 4), (1, 2, 4), (1, 4, 6))[row]
        grids += [grid] * count
        placeholders = [START, *[IMAGE] * (math.prod(grid) // 4 if qwen else 4), END] * count
        rows.append(words[:1] + placeholders + words[1:])
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    given = {"input_ids": ids, "attention_mask": mask}
    if qwen:
        pixels = torch.randn(sum(map(math.prod, grids)), 3 * 2 * 4 * 4, generator=generator)
        given |= {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
        return given | {"mm_token_type_ids": (ids == IMAGE).long()}
    if name in ("idefics3", "smolvlm"):  # a row without an image has one of zeros
        pixels = torch.randn(len(images), 1, 3, 16, 16, generator=generator)
        return given | {"pixel_values": pixels * torch.tensor(images).view(-1, 1, 1, 1, 1)}
    given["pixel_values"] = torch.randn(sum(images), 3, 8, 8, generator=generator)
    if name == "mistral3":
        given["image_sizes"] = torch.tensor([[8, 8]] * sum(images))
    if name == "gemma3":
        given["token_type_ids"] = (ids == IMAGE).long()
    if name == "paligemma":
        given["token_type_ids"] = torch.zeros_like(ids)
    return given
