"""The draft that training starts from: a copy, the target's first layers, or either with LoRA."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.errors import require
from hf_specx.drafting.early_exit import EarlyExitDraft, check_exit_layer

from .recipe import LAYERS_PREFIX


PROBE = 8  # tokens on which a copy of the first layers is compared with the layers themselves
LORA_ALPHA = 2  # times the rank


@torch.no_grad()
def draft_of_first_layers(target: PreTrainedModel, count: int) -> PreTrainedModel:
    """A model of its own with copies of the target's first layers, its embedding, final norm and head.

    Raises:
        ValueError: the target has no list of layers, not enough of them, or a config that cannot say so.
    """
    check_exit_layer(LAYERS_PREFIX.rstrip(":"), count, target)
    told = f"'{LAYERS_PREFIX}{count}': the target has weights that are offloaded to memory or disk, which cannot be "
    require(not any(weight.is_meta for weight in target.parameters()), told + "copied; name a draft model instead.")
    layers = EarlyExitDraft(count).first_layers(target)
    config = copy.deepcopy(target.config)
    text = config.get_text_config(decoder=True)
    all_layers = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == all_layers:
            setattr(text, name, value[:count])  # such as layer_types
    text.num_hidden_layers = count
    given = f"'{LAYERS_PREFIX}{count}'"
    told = f"{given}: a {type(target).__name__} with as many layers of its own does not give what the target's first "
    told += "ones give; name a draft model instead."
    try:
        draft: Any = type(target)(config).to(dtype=target.dtype, device=target.device)  # type: ignore[call-arg]
        draft.load_state_dict(layers.state_dict())
        own = dict(draft.named_buffers())
        for name, buffer in layers.named_buffers():
            # such as rotary frequencies: not in the state, nor in the weights' dtype
            own[name].data = buffer.to(own[name].device, copy=True)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{told} {error}") from error
    draft.generation_config = copy.deepcopy(target.generation_config)
    ids = torch.arange(PROBE, device=target.device)[None] % text.vocab_size
    apart = draft.eval()(ids).logits - layers(ids).logits
    require(bool(apart.abs().max() < 1e-2), told)
    return draft


def trainable_copy(draft: PreTrainedModel, lora: int | None, seed: int) -> Any:
    """A copy in float32 whose weights are trained, or with `lora` as its rank, whose adapters are."""
    made = copy.deepcopy(draft).float().requires_grad_(lora is None)
    if lora is None:
        return made
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(f"lora={lora} needs peft, which is not installed: pip install peft.") from error
    torch.manual_seed(seed)
    config = LoraConfig(r=lora, lora_alpha=LORA_ALPHA * lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(made, config)


def merged(draft: Any, like: PreTrainedModel) -> PreTrainedModel:
    """The trained draft as a plain model, where the one that it was copied from is, and in its precision.

    Buffers that are in no state, as rotary frequencies, keep theirs.
    """
    plain = draft.merge_and_unload() if hasattr(draft, "merge_and_unload") else draft
    made = copy.deepcopy(like)
    made.load_state_dict(plain.state_dict())
    return made.eval()
