"""Wrappers around a model: `torch.compile` and PEFT."""

from typing import Any

from transformers import PreTrainedModel


def unwrapped(model: Any, adapters: bool = False) -> Any:
    """The model inside the wrapper of `torch.compile`, which has no `generate` of its own; anything else as it is.

    Args:
        model: what was given as target or draft.
        adapters: whether to remove PEFT's wrapper too. LoRA layers are kept, they are part of the model inside; a
            tuned prompt is lost. So this is for drafts, whose tokens may come from any distribution.
    """
    compiled = getattr(model, "_modules", {}).get("_orig_mod")
    if compiled is not None:
        return unwrapped(compiled, adapters)
    if adapters and not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        return unwrapped(model.get_base_model(), adapters)
    return model


def unwrapped_draft(draft: Any) -> Any:
    """The same for what drafts, a model or anything else; of a list each item."""
    return [unwrapped(part, True) for part in draft] if isinstance(draft, list | tuple) else unwrapped(draft, True)
