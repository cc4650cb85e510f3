"""Load a model exactly as its files describe it; missing weights raise an error and are not made up."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict

from hf_specx.common.checkpoints import read_config
from hf_specx.common.devices import last_device
from hf_specx.common.errors import require
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.heads.head import DraftHead
from hf_specx.drafting.heads.reading import is_head

from .facts import COMMIT, auto_class
from .fetch import Files, get_files
from .model_files import AGAIN, check_links, check_size, shapes_in
from .pair_config import PairConfig, WeightlessDraft


NO_ADAPTERS = "none"  # where transformers looks for one if peft is installed, else on the Hub, without the token
TABLES = 2**28  # numbers in buffers, more than any real model needs
HEAD_NAME = "exit_head.safetensors"  # the head of an early exit, a linear map


def load_config(files: Files, subfolder: str, trust_remote_code: bool) -> PreTrainedConfig:
    """A model's config, from `files` that `fetch` has checked; its code runs only if it is trusted."""
    folder = files.root / subfolder
    with _reading(folder):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    assert isinstance(config, transformers.PreTrainedConfig)
    if not trust_remote_code:
        vars(config).pop("auto_map", None)  # transformers has a class of its own for it
    return config


def load_model(
    files: Files,
    subfolder: str,
    trust_remote_code: bool,
    target: PreTrainedModel | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """A model in evaluation mode, with the `generate` of its class, from `files` that `fetch` has checked.

    For a `target` it may be a draft head, in the precision of its files. Its code runs only if it is trusted; `kwargs`
    are for `from_pretrained`. A ValueError says which weights are missing, have another shape, or belong to layers
    that the model does not have.
    """
    if target is not None and holds_head(files, subfolder):
        return _noted(files, DraftHead.from_pretrained(files.root / subfolder, target=target))
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
    if "num_hidden_layers" in kwargs:
        seen["unexpected_keys"] = []
    _check_loaded(f"{files.name} {subfolder}".strip(), seen, list(model.state_dict()))
    vars(model).pop("generate", None)  # one bound by a repository's trusted code would call this package again
    return _noted(files, model).eval()


def _noted(files: Files, model: PreTrainedModel) -> PreTrainedModel:
    """A model that says where it came from."""
    model.name_or_path = model.config._name_or_path = files.name
    if files.revision is not None:
        setattr(model.config, COMMIT, files.revision)
    return model


def holds_head(files: Files, subfolder: str) -> bool:
    """Whether what a pair's files have as its draft is a head."""
    folder = files.root / subfolder
    return is_head(folder, read_config(folder))


def _check_loaded(where: str, seen: dict[str, Collection[Any]], used: Collection[str]) -> None:
    """Whether the weights in files, as transformers has `seen` them, were all that a model has, and no others."""
    name, found, expected = min(seen["mismatched_keys"], default=("", (), ()))
    told = f"{where}: {name!r} is {list(found)}, and its config says {list(expected)}; {AGAIN}."
    require(not seen["mismatched_keys"], told)
    missing = seen["missing_keys"]
    told = f"{where} lacks {len(missing)} of the model's weights, {min(missing, default='')!r} among them; {AGAIN}."
    require(not missing, told)
    kinds = {re.sub(r"\d+", "#", name) for name in used}
    no_layers = not any("#" in kind for kind in kinds)
    unused = {name: re.sub(r"\d+", "#", name) for name in seen["unexpected_keys"]}
    further = [name for name, kind in unused.items() if kind in kinds or (no_layers and "#" in kind)]
    told = f"{where} has weights for more layers than its config, {min(further, default='')!r} among them; {AGAIN}."
    require(not further, told)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Name the folder in errors that reading its config raises."""
    try:
        yield
    except Exception as error:  # wrong values may raise any
        told = f"transformers cannot read the config of {folder}: {error}; {AGAIN}, or install a newer transformers."
        raise ValueError(told) from error


def get_head(pair: Files, config: PairConfig, **hub: Any) -> Path | None:
    """The file of the head that a pair's early exit has, checked; None if it has none."""
    if config.early_exit is None or not config.early_exit.head:
        return None
    path = get_files(pair.name, pair.revision, [HEAD_NAME], **hub).root / HEAD_NAME
    check_links(pair.root, path)
    shapes_in(path)
    return path


def with_head(draft: WeightlessDraft, path: Path | None, target: PreTrainedModel) -> WeightlessDraft:
    """An early exit with the head in a file of `get_head`, where and as precise as the target's last layers."""
    if path is None:
        return draft
    assert isinstance(draft, EarlyExitDraft)
    found, width = load_state_dict(str(path)), target.config.get_text_config(decoder=True).hidden_size
    shapes = {name: (list(tensor.shape), tensor.is_floating_point()) for name, tensor in found.items()}
    wanted = {"weight": ([width, width], True), "bias": ([width], True)}
    told = f"{path} has {shapes}, and the head of this target is a weight [{width}, {width}], with or without a bias"
    require("weight" in shapes and shapes.items() <= wanted.items(), f"{told}; {AGAIN}.")
    head = torch.nn.Linear(width, width, bias="bias" in found, device=last_device(target), dtype=target.dtype).eval()
    head.load_state_dict(found)
    return EarlyExitDraft(draft.exit_layer, head.requires_grad_(False))
