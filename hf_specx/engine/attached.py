"""A model whose `generate` decodes by a strategy, for code that cannot pass `custom_generate=`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import PreTrainedModel


@contextmanager
def attached(model: PreTrainedModel, strategy: Callable[..., Any]) -> Iterator[PreTrainedModel]:
    """Within this context `model.generate` is called with `custom_generate=strategy`; the model is left as it was."""
    before = vars(model).get("generate")
    bound = partial(type(model).generate, model, custom_generate=strategy)  # type: ignore[attr-defined]
    vars(model)["generate"] = bound
    try:
        yield model
    finally:
        del vars(model)["generate"]
        if before is not None:
            vars(model)["generate"] = before
