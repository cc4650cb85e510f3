"""Inputs of a forward that have an entry for each row of the batch."""

from typing import Any

import torch
from transformers.modeling_outputs import ModelOutput


def has_rows(value: Any, rows: int) -> bool:
    """Whether an input has an entry for each of the rows."""
    if isinstance(value, ModelOutput):
        return any(has_rows(part, rows) for part in value.values())
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows


def select(value: Any, index: torch.Tensor, rows: int) -> Any:
    """The entries at row indices [R'] of an input that has one for each of the rows; any other input as it is.

    Hidden states of layers in an encoder's output are left alone: `generate` does not repeat them for
    `num_return_sequences`, and no decoder reads them.
    """
    if isinstance(value, ModelOutput):
        return type(value)(**{name: select(part, index, rows) for name, part in value.items()})
    return value[index.to(value.device)] if has_rows(value, rows) else value
