"""Forwards of a model, counted by a hook."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel


def reads_only(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that says so: a target that has it is not measured, and runs no forwards for that."""
    hook.reads_only = True
    return hook


@contextmanager
def counting(model: PreTrainedModel) -> Iterator[list[object]]:
    """A list that grows with each forward."""
    calls: list[object] = []
    hook = model.register_forward_pre_hook(reads_only(lambda module, args: calls.append(module)))
    try:
        yield calls
    finally:
        hook.remove()
