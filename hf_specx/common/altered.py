"""Copies of models that share all weights with them and have a few other parts: the model itself is never changed.

Other parts are position tables that count the slots before a token: they are told its column in `generate` instead.
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
NO_LIMIT = (0.0, float("inf"))


def altered(model: Any, parts: Mapping[nn.Module, nn.Module]) -> Any:
    """A model with other modules in the places of some of its own; the model itself if it has none of these.

    Only modules that hold one of them are copied; what is registered on a module later, as hooks are, is on its copy
    as well.
    """
    if not parts or model in parts:
        return parts.get(model, model)
    children = {name: module if module is None else altered(module, parts) for name, module in model._modules.items()}
    if all(child is model._modules[name] for name, child in children.items()):
        return model
    made = shallow(model)
    made._modules = children
    return made


def without_limits(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """For the Mamba-2 layers of a model, these without limits to the time step (5.23), as in single steps."""
    found = {module: shallow(module) for module in model.modules() if hasattr(module, "time_step_limit")}
    for made in found.values():
        made.time_step_limit = NO_LIMIT
    return found


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
        vectors = torch.zeros((), dtype=torch.float32, device=columns.device)  # takes on the dtype of the table
        for column in sorted(self.numbers):
            given[COUNT] = column
            found = self.table(**given)  # [R * q or 1, 1, D] or [1, D]
            here = (columns.to(found.device) == column)[:, None]
            vectors = torch.where(here, found.flatten(0, -2), vectors.to(found))
        return vectors.view(rows, count, -1)


def column_tables(model: PreTrainedModel, told: bool, even: bool) -> dict[nn.Module, ColumnTable]:
    """What is to stand in the places of a model's position tables; nothing where it is `told` positions.

    Where slots are the columns of `generate`, in rows that are `even`, only tables that skip pad ids are replaced.
    """
    modules = () if told else (model.get_decoder() or model).modules()
    tables = [m for m in modules if COUNT in inspect.signature(m.forward).parameters]
    return {t: ColumnTable(t) for t in tables if not even or getattr(t, "padding_idx", None) is not None}
