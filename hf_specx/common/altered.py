"""Copies of models that share their weights and have a few modules replaced; the model itself is never changed.

Replaced are position tables that count the slots before a token: they are given its column in `generate` instead.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .architectures import CACHE
from .wrappers import shallow


COUNT = f"{CACHE}_length"  # the argument of a position table that says how many slots come before
NO_TIME_STEP_LIMIT = (0.0, float("inf"))


def altered(model: Any, parts: Mapping[nn.Module, nn.Module]) -> Any:
    """A copy of a model in which `parts` replaces modules (keys) by others (values); the model itself if it has none.

    Only modules that hold one of them are copied; what is registered on a module later, as hooks are, is on its copy
    as well.
    """
    if not parts or model in parts:
        return parts.get(model, model)
    children = {name: module if module is None else altered(module, parts) for name, module in model._modules.items()}
    if all(child is model._modules[name] for name, child in children.items()):
        return model
    copy = shallow(model)
    copy._modules = children
    return copy


def without_limits(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Replacements of Mamba-2 layers, without the limits of time steps that 5.23 ignores in single steps."""
    copies = {module: shallow(module) for module in model.modules() if hasattr(module, "time_step_limit")}
    for copy in copies.values():
        copy.time_step_limit = NO_TIME_STEP_LIMIT
    return copies


class ColumnTable(nn.Module):
    """A position table that gives each token the vector it has in `generate`, where tokens are fed one by one.

    Attributes:
        table: the model's own table; its first argument is tokens [R, q, ...], or only their shape.
        columns: [R, q] int64, the column in `generate` of each token that is fed next.
        numbers: the columns that occur in it.
    """

    columns: torch.Tensor
    numbers: set[int]

    def __init__(self, table: nn.Module):
        super().__init__()
        self.table, self.signature = table, inspect.signature(table.forward)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The vectors [R, q, D] of tokens at `columns`; arguments are those of the model's own table."""
        arguments = self.signature.bind(*args, **kwargs).arguments
        name, tokens = next(iter(arguments.items()))
        rows, count, *rest = tokens.shape if isinstance(tokens, torch.Tensor) else tokens
        columns = self.columns.flatten()  # [R * q]

        def as_rows(*shape: int) -> Any:
            return tokens.reshape(*shape, *rest) if isinstance(tokens, torch.Tensor) else shape

        position_ids = arguments.get("position_ids")
        if position_ids is not None:
            arguments[name] = as_rows(1, rows * count)
            arguments["position_ids"] = columns.to(position_ids.device).view(-1, *[1] * (position_ids.ndim - 1))
            return self.table(**arguments).reshape(rows, count, -1)
        arguments[name] = as_rows(rows * count, 1)  # a table that reads ids gives pads no position, nor counts them
        vectors = torch.zeros((), dtype=torch.float32, device=columns.device)  # takes on the dtype of the table
        for column in sorted(self.numbers):
            arguments[COUNT] = column
            at_column = self.table(**arguments)  # [R * q or 1, 1, D] or [1, D]
            is_column = (columns.to(at_column.device) == column)[:, None]
            vectors = torch.where(is_column, at_column.flatten(0, -2), vectors.to(at_column))
        return vectors.view(rows, count, -1)


def column_tables(
    model: PreTrainedModel, takes_positions: bool, slots_are_columns: bool
) -> dict[nn.Module, ColumnTable]:
    """The replacements of a model's position tables; none for a model that `takes_positions` as an argument.

    Where a token's slot is its column in `generate`, only tables that skip pad ids are replaced.
    """
    if takes_positions:
        return {}
    modules = (model.get_decoder() or model).modules()
    tables = [module for module in modules if COUNT in inspect.signature(module.forward).parameters]
    if slots_are_columns:
        tables = [table for table in tables if getattr(table, "padding_idx", None) is not None]
    return {table: ColumnTable(table) for table in tables}
