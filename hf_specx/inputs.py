"""Inputs of a forward that have an entry for each row of the batch."""

from typing import Any

import torch
from transformers.modeling_outputs import ModelOutput


def has_rows(value: Any, rows: int) -> bool:
    """Whether an input has an entry for each of the rows."""
    if isinstance(value, ModelOutput):
        return any(has_rows(part, rows) for part in value.values())
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows


def select(value: Any, places: torch.Tensor) -> Any:
    """The entries at places [R'] of an input that has one for each row."""
    if isinstance(value, ModelOutput):
        return type(value)(**{name: select(part, places) for name, part in value.items()})
    if isinstance(value, tuple):
        return tuple(select(part, places) for part in value)
    return value[places.to(value.device)] if isinstance(value, torch.Tensor) else value
