"""What people put around a model before they give it to us."""

from typing import Any

from transformers import PreTrainedModel


def unwrapped(model: Any, adapters: bool = False) -> Any:
    """The model inside `torch.compile`, whose wrapper has no `generate` of its own; anything else as it is.

    Args:
        model: what was given for a target or a draft.
        adapters: also the model inside PEFT's wrapper: the layers of LoRA are in it. A prompt that was tuned is not,
            so that only a draft, which may be anything, is taken out of that one.
    """
    compiled = getattr(model, "_modules", {}).get("_orig_mod")
    if compiled is not None:
        return unwrapped(compiled, adapters)
    if adapters and not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        return unwrapped(model.get_base_model(), adapters)
    return model
