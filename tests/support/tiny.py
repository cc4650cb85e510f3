"""Tiny random models that a test can afford, with laws that are far from flat."""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


VOCAB_SIZE = 48
WINDOW = 8

SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.4}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
MIXED = ["sliding_attention", "full_attention"]
SPECIAL = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.4},
    "mistral": GROUPED | {"sliding_window": WINDOW},
    "qwen2": GROUPED | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "gemma2": GROUPED | {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "smollm3": GROUPED | {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED},
    "phi3": GROUPED | {"sliding_window": WINDOW},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "phi": {},
    "stablelm": {"num_key_value_heads": 2},
}


def tiny(model_type: str = "llama", seed: int = 0, **changes) -> PreTrainedModel:
    """A random model of a type, in float32 and evaluation mode."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **SIZES | SPECIAL.get(model_type, GROUPED) | changes)
    return AutoModelForCausalLM.from_config(config).eval()


def near(model: PreTrainedModel, noise: float, seed: int = 1) -> PreTrainedModel:
    """A copy whose every weight is moved by `noise` of its tensor's standard deviation."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.ndim > 1:
                parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return moved


def without_layers(model: PreTrainedModel, first: int = 0) -> PreTrainedModel:
    """The model, whose layers from this one on add nothing from now on; from 0 on it goes by the last token alone."""
    for layer in model.model.layers[first:]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def prompts(rows: int, width: int = 11, seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded prompts of unequal length, as `generate` takes them; the pad id is 0."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, VOCAB_SIZE, (rows, width), generator=generator)
    lengths = 1 + (torch.arange(rows) * 7 + width - 1) % width
    attention_mask = (torch.arange(width) >= width - lengths[:, None]).long()
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


class Forwards:
    """Counts the forwards of a model by a hook, with the tokens that each was fed."""

    def __init__(self, model: PreTrainedModel):
        self.ids: list[torch.Tensor] = []
        self.handle = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module, args, kwargs):
        self.ids.append(kwargs["input_ids"])

    _note.reads_only = True  # so that a target is not measured because of it

    @property
    def lengths(self) -> list[int]:
        """Tokens a row in each forward."""
        return [ids.shape[1] for ids in self.ids]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.handle.remove()
