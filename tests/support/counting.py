"""Forwards of a model, counted by a hook."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel


@contextmanager
def counting(model: PreTrainedModel) -> Iterator[list[object]]:
    """A list that grows with each forward."""
    calls: list[object] = []
    hook = model.register_forward_pre_hook(lambda module, args: calls.append(module))
    try:
        yield calls
    finally:
        hook.remove()
