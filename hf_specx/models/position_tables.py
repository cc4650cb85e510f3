"""Position tables that count the slots before a token: they are told its column in `generate` instead."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specx.common.architectures import ANY_POSITION


SIZES = {  # fields of a config, the first that it has
    "encoder": ("max_source_positions", "max_encoder_position_embeddings", "max_position_embeddings"),
    "decoder": ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings", "max_seq_len"),
}


class ColumnTable(nn.Module):
    """Gives what a position table gives to tokens that are fed one by one, as in `generate`.

    Attributes:
        table: the model's own; its first argument is tokens [R, q, ...], or only their shape.
        columns: [R, q] int64, of the tokens that are fed next; `numbers`: which ones occur in it.
    """

    columns: torch.Tensor
    numbers: set[int]

    def __init__(self, table: nn.Module):
        super().__init__()
        self.table, self.signature = table, inspect.signature(table.forward)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Vectors [R, q, D]."""
        given = self.signature.bind(*args, **kwargs).arguments
        name, tokens = next(iter(given.items()))
        rows, count, *rest = tokens.shape if isinstance(tokens, torch.Tensor) else tokens
        columns = self.columns.flatten()  # [R * q]

        def as_rows(*shape: int) -> Any:
            return tokens.reshape(*shape, *rest) if isinstance(tokens, torch.Tensor) else shape

        position_ids = given.get("position_ids")
        if position_ids is not None:
            given[name] = as_rows(1, rows * count)
            given["position_ids"] = columns.to(position_ids.device).view(-1, *[1] * (position_ids.ndim - 1))
            return self.table(**given).reshape(rows, count, -1)
        given[name] = as_rows(rows * count, 1)  # a table that reads ids gives pads no position, nor counts them
        vectors = torch.zeros(())
        for column in sorted(self.numbers):
            given["past_key_values_length"] = column
            found = self.table(**given)  # [R * q or 1, 1, D] or [1, D]
            here = (columns.to(found.device) == column)[:, None]
            vectors = torch.where(here, found.flatten(0, -2), vectors.to(found))
        return vectors.view(rows, count, -1)


def column_tables(model: PreTrainedModel, told: bool, even: bool) -> dict[nn.Module, ColumnTable]:
    """What is to stand in the places of a model's position tables; nothing where it takes positions as an argument.

    Args:
        model: the model.
        told: whether its forward is given positions.
        even: whether slots are the columns of `generate`; then only tables that skip pad ids are told.
    """
    modules = () if told else (model.get_decoder() or model).modules()
    tables = [m for m in modules if "past_key_values_length" in inspect.signature(m.forward).parameters]
    return {t: ColumnTable(t) for t in tables if not even or getattr(t, "padding_idx", None) is not None}


def position_table(model: PreTrainedModel, encoder: bool = False) -> int | None:
    """How many positions the table of a decoder or an encoder has; None where positions are computed."""
    part = "encoder" if encoder else "decoder"
    whole = getattr(model.get_encoder(), "config", model.config) if encoder else model.config  # of two models, its own
    config = whole.get_text_config(**{part: True})
    if hasattr(config, "rope_parameters") or config.model_type in ANY_POSITION:
        return None
    return next((size for name in SIZES[part] if (size := getattr(config, name, None))), None)
