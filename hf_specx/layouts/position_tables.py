"""Position tables that count the slots before a token: they are told its column in `generate` instead."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.architectures import ANY_POSITION
from hf_specx.common.patching import Overriding, patch_attribute


SIZES = {  # fields of a config, the first that it has
    "encoder": ("max_source_positions", "max_encoder_position_embeddings", "max_position_embeddings"),
    "decoder": ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings", "max_seq_len"),
}


class PositionTables:
    """The tables of one model; empty where it takes positions as an argument.

    Args:
        model: the model.
        told: whether its forward is given positions.
        even: whether slots are the columns of `generate`; then only tables that skip pad ids are told.
    """

    def __init__(self, model: PreTrainedModel, told: bool, even: bool):
        modules = () if told else (model.get_decoder() or model).modules()
        tables = [m for m in modules if "past_key_values_length" in inspect.signature(m.forward).parameters]
        tables = [t for t in tables if not even or getattr(t, "padding_idx", None) is not None]
        self.forwards = {patch_attribute(table, "forward"): table.forward for table in tables}

    def at(self, first: list[int], last: int) -> Overriding:
        """A context in which forwards are fed tokens from the columns `first` [R] on; no column is after `last`."""
        return Overriding({key: partial(by_column, usual, first, last) for key, usual in self.forwards.items()})


def by_column(
    lookup: Callable[..., torch.Tensor], first: list[int], last: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """What a position table gives to tokens that are fed one by one, as in `generate`.

    Args:
        lookup: the table's own forward; its first argument is tokens [R, q, ...], or only their shape.
        first: the columns of the first tokens of the R rows.
        last: the last column that `generate` feeds; later ones are looked up as this one, as the table may lack them.

    Returns:
        [R, q, D]
    """
    given = inspect.signature(lookup).bind(*args, **kwargs).arguments
    name, tokens = next(iter(given.items()))
    rows, count, *rest = tokens.shape if isinstance(tokens, torch.Tensor) else tokens
    columns = (torch.tensor(first)[:, None] + torch.arange(count)).clamp(max=last).flatten()  # [R * q]

    def as_rows(*shape: int) -> Any:
        return tokens.reshape(*shape, *rest) if isinstance(tokens, torch.Tensor) else shape

    position_ids = given.get("position_ids")
    if position_ids is not None:
        given[name] = as_rows(1, rows * count)
        given["position_ids"] = columns.to(position_ids).view(-1, *[1] * (position_ids.ndim - 1))
        return lookup(**given).reshape(rows, count, -1)
    given[name] = as_rows(rows * count, 1)  # a table that reads ids gives pads no position, nor counts them
    vectors = torch.zeros(())
    for column in columns.unique().tolist():
        given["past_key_values_length"] = column
        found = lookup(**given)  # [R * q or 1, 1, D] or [1, D]
        here = (columns == column).to(found.device)[:, None]
        vectors = torch.where(here, found.flatten(0, -2), vectors.to(found))
    return vectors.view(rows, count, -1)


def position_table(model: PreTrainedModel, encoder: bool = False) -> int | None:
    """How many positions the table of a decoder or an encoder has; None where positions are computed."""
    part = "encoder" if encoder else "decoder"
    whole = getattr(model.get_encoder(), "config", model.config) if encoder else model.config  # of two models, its own
    config = whole.get_text_config(**{part: True})
    if hasattr(config, "rope_parameters") or config.model_type in ANY_POSITION:
        return None
    return next((size for name in SIZES[part] if (size := getattr(config, name, None))), None)
