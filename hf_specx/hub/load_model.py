"""Load a model exactly as its files describe it; missing weights raise an error and are not made up."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .facts import COMMIT, auto_class
from .fetch import Files
from .model_files import AGAIN
from .weights import check_loaded, check_size


NO_ADAPTERS = "none"  # where transformers looks for one if peft is installed, else on the Hub, without the token
TABLES = 2**28  # numbers in buffers, more than any real model needs


def load_config(files: Files, subfolder: str, trust_remote_code: bool) -> PreTrainedConfig:
    """A model's config.

    Args:
        files, subfolder: where it is.
        trust_remote_code: whether its code may run.

    Raises:
        ValueError: it cannot be read.
    """
    folder = files.root / subfolder
    with _reading(folder):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    assert isinstance(config, transformers.PreTrainedConfig)
    if not trust_remote_code:
        vars(config).pop("auto_map", None)  # transformers has a class of its own for it
    return config


def load_model(files: Files, subfolder: str, trust_remote_code: bool, **kwargs: Any) -> PreTrainedModel:
    """A model in evaluation mode, with the `generate` of its class.

    Args:
        files, subfolder: where it is; checked by `fetch`.
        trust_remote_code: whether its code may run.
        **kwargs: for `from_pretrained`.

    Raises:
        ValueError: weights are missing, have another shape, or belong to layers that the model does not have.
    """
    config, trust = load_config(files, subfolder, trust_remote_code), {"trust_remote_code": trust_remote_code}
    folder = files.root / subfolder  # not by the repository's name, whose code may have changed since it was checked
    loader, quantised = auto_class(config), getattr(config, "quantization_config", None) is not None
    if not quantised and kwargs.get("use_safetensors", True):
        with _reading(folder), torch.device("meta"):
            empty = loader.from_config(config, attn_implementation="eager", **trust)
        tables = sum(buffer.numel() for buffer in empty.buffers())  # computed, not loaded
        check_size(folder, empty.num_parameters() + max(0, tables - TABLES))
    model, seen = loader.from_pretrained(
        str(folder),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are reported below
        adapter_kwargs={"subfolder": NO_ADAPTERS, "local_files_only": True},
        **{"use_safetensors": True} | trust | kwargs,
    )
    unused = [] if "num_hidden_layers" in kwargs else seen["unexpected_keys"]
    missing, mismatched = seen["missing_keys"], seen["mismatched_keys"]
    check_loaded(f"{files.name} {subfolder}".strip(), missing, mismatched, unused, list(model.state_dict()))
    vars(model).pop("generate", None)  # one bound by a repository's trusted code would call this package again
    model.name_or_path = model.config._name_or_path = files.name
    if files.revision is not None:
        setattr(model.config, COMMIT, files.revision)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Name the folder in errors that reading its config raises."""
    try:
        yield
    except Exception as error:  # wrong values may raise any
        told = f"transformers cannot read the config of {folder}: {error}; {AGAIN}, or install a newer transformers."
        raise ValueError(told) from error
