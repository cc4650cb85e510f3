"""Reads the config and the tensors of a draft from a folder or the Hub; nothing in its files is run."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from hf_specx.common.errors import require


HUB = (
    "revision",
    "token",
    "cache_dir",
    "local_files_only",
    "force_download",
    "subfolder",
)  # arguments of `cached_file`
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    MEDUSA_WEIGHTS,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.pt",
)


class Files(NamedTuple):
    """The local files of a repository or folder: `root`, or only its subfolder if there is one."""

    name: str
    revision: str | None
    root: Path
    subfolder: str = ""

    @property
    def folder(self) -> Path:
        return self.root / self.subfolder

    @property
    def shown(self) -> str:
        return f"{self.name} {self.subfolder}".strip()


def read_config(name: str | Path, file: str = "config.json", **hub: Any) -> dict[str, Any]:
    """The JSON object in the config of a repository or folder, or in another file; ValueError if there is none."""
    path = find_file(name, file, **hub)
    message = (
        f"{name} has no {file} here, nor on the Hub if that can be reached, so it is no draft head or model; give a "
        "folder or a repository of one."
    )
    require(path is not None, message)
    try:
        raw = json.loads(Path(str(path)).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}; get it again.") from error
    require(isinstance(raw, dict), f"{path} is not a JSON object; get it again.")
    return raw


def read_weights(name: str | Path, names_alone: bool = False, **hub: Any) -> dict[str, torch.Tensor]:
    """The tensors of a repository or folder; with `names_alone` those of safetensors without their values."""
    first = next((file for file in WEIGHTS if find_file(name, file, **hub) is not None), None)
    require(first is not None, f"{name} has no weights; a draft head has one of {', '.join(WEIGHTS)}.")
    files = [str(first)]
    if str(first).endswith(".index.json"):
        weight_map = read_config(name, str(first), **hub).get("weight_map")
        files = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else [""]
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        is_name = Path(file).name == file and "\\" not in file and file.endswith((".safetensors", ".bin", ".pt"))
        path = find_file(name, file, **hub) if is_name else None
        require(path is not None, f"{name}: {first} names {file!r}, no file of weights beside it; get it again.")
        weights |= _tensors(Path(str(path)), "meta" if names_alone else "cpu")
    return weights


def read_pickle(path: Path) -> Any:
    """The content of a small file of torch: tensors, numbers and texts, and lists and dicts of them."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of types that only pickle has
        raise ValueError(f"{path} cannot be read as tensors and numbers alone ({error}); get it again.") from error


def find_file(name: str | Path, file: str, **hub: Any) -> Path | None:
    """The local path of a file, which is downloaded from the Hub if need be; None if there is no such file."""
    try:
        path = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False, **hub)
    except OSError as error:
        raise ValueError(not_found(name, error)) from error
    return None if path is None else Path(path)


def not_found(name: str | Path, error: OSError) -> str:
    """The message for a name that is neither a folder here nor on the Hub."""
    return f"{str(name)!r} cannot be got from the Hub, and there is no folder of that name here: {error}"


def _tensors(path: Path, where: str) -> dict[str, torch.Tensor]:
    """The tensors in a file; if it is a pickle that has anything else, a ValueError."""
    try:
        tensors = load_state_dict(str(path), where, weights_only=True)
    except Exception as error:  # of types that only pickle and safetensors have
        message = f"{path} cannot be read as tensors alone ({error}); convert it to safetensors if you trust it."
        raise ValueError(message) from error
    is_tensors = isinstance(tensors, dict) and all(isinstance(value, torch.Tensor) for value in tensors.values())
    require(is_tensors, f"{path} is no dict of tensors; save the weights alone, as model.safetensors.")
    return tensors
