"""Load a model exactly as its files describe it; missing weights raise an error and are not made up.

Every model but heads that is given by a name or a folder is loaded here, from files that `model_files.py` has checked.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)

from .checkpoints import Files
from .errors import require
from .model_files import GET_AGAIN, check_size


AUTO_CLASSES = (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoModelForImageTextToText,
)
COMMIT = "_commit_hash"  # attribute of a config, not saved with it
NO_ADAPTERS = "none"  # where transformers looks for one if peft is installed, else on the Hub, without the token
MAX_IN_BUFFERS = 2**28  # numbers, more than those of any real model


def auto_class(config: PreTrainedConfig) -> Any:
    """The `AutoModelFor...` class that loads a model.

    It is the one that gives the class in `config.architectures`, else the first that knows the config or is in its
    `auto_map`, else `AutoModelForCausalLM`.
    """
    in_auto_map = getattr(config, "auto_map", None) or {}
    knowing: list[Any] = [auto for auto in AUTO_CLASSES if type(config) in auto._model_mapping]
    named = [auto for auto in AUTO_CLASSES if auto.__name__ in in_auto_map]
    exact = [auto for auto in knowing if auto._model_mapping[type(config)].__name__ in (config.architectures or [])]
    return [*exact, *knowing, *named, *AUTO_CLASSES][0]


def load_config(files: Files, trust_remote_code: bool) -> PreTrainedConfig:
    """A model's config, from `files` that were checked; its code runs only if it is trusted."""
    with _naming_folder_in_errors(files.folder):
        config = AutoConfig.from_pretrained(str(files.folder), trust_remote_code=trust_remote_code)
    assert isinstance(config, PreTrainedConfig)
    if not trust_remote_code:
        vars(config).pop("auto_map", None)  # transformers has a class of its own for it
    return config


def load_model(files: Files, trust_remote_code: bool, **kwargs: Any) -> PreTrainedModel:
    """A model in evaluation mode, with the `generate` of its class, from `files` that were checked.

    `kwargs` are for `from_pretrained`. Weights that are missing, have another shape, or belong to layers that the
    model does not have are a ValueError.
    """
    folder = files.folder  # not by the repository's name, whose code may have changed since it was checked
    config = load_config(files, trust_remote_code)
    trust = {"trust_remote_code": trust_remote_code}
    loader = auto_class(config)
    quantised = getattr(config, "quantization_config", None) is not None
    if not quantised and kwargs.get("use_safetensors", True):
        with _naming_folder_in_errors(folder), torch.device("meta"):
            empty = loader.from_config(config, attn_implementation="eager", **trust)
        buffer_size = sum(buffer.numel() for buffer in empty.buffers())  # computed, not loaded
        check_size(folder, empty.num_parameters() + max(0, buffer_size - MAX_IN_BUFFERS))
    model, loading_info = loader.from_pretrained(
        str(folder),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are reported below
        adapter_kwargs={"subfolder": NO_ADAPTERS, "local_files_only": True},
        **{"use_safetensors": True} | trust | kwargs,
    )
    _check_loaded(files.shown, loading_info, list(model.state_dict()))
    vars(model).pop("generate", None)  # one bound by a repository's trusted code would call this package again
    return with_origin(files, model).eval()


def with_origin(files: Files, model: PreTrainedModel) -> PreTrainedModel:
    """A model that says where it came from."""
    model.name_or_path = model.config._name_or_path = files.name
    if files.revision is not None:
        setattr(model.config, COMMIT, files.revision)
    return model


def _check_loaded(where: str, loading_info: dict[str, Collection[Any]], weights: Collection[str]) -> None:
    """Raise ValueError if the weights in files were not all that a model has, or belong to layers that it lacks.

    Args:
        where: the files, as errors name them.
        loading_info: of transformers.
        weights: names of the model's own.
    """
    name, shape, expected = min(loading_info["mismatched_keys"], default=("", (), ()))
    require(
        not loading_info["mismatched_keys"],
        f"{where}: {name!r} is {list(shape)}, and its config says {list(expected)}; {GET_AGAIN}.",
    )
    missing = loading_info["missing_keys"]
    require(
        not missing,
        f"{where} lacks {len(missing)} of the model's weights, {min(missing, default='')!r} among them; {GET_AGAIN}.",
    )
    patterns = {re.sub(r"\d+", "#", name) for name in weights}
    has_layers = any("#" in pattern for pattern in patterns)
    unexpected = {name: re.sub(r"\d+", "#", name) for name in loading_info["unexpected_keys"]}
    of_layers = [
        name for name, pattern in unexpected.items() if pattern in patterns or (not has_layers and "#" in pattern)
    ]
    require(
        not of_layers,
        f"{where} has weights for more layers than its config, {min(of_layers, default='')!r} among them; "
        f"{GET_AGAIN}.",
    )


@contextmanager
def _naming_folder_in_errors(folder: Path) -> Iterator[None]:
    """Name the folder in errors that reading its config raises."""
    try:
        yield
    except Exception as error:  # wrong values may raise any
        message = (
            f"transformers cannot read the config of {folder}: {error}; {GET_AGAIN}, or install a newer transformers."
        )
        raise ValueError(message) from error
