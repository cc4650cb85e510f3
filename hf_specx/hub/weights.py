"""Checks of the files with a model's weights, and that they are the weights of what its config describes."""

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers.modeling_utils import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_specx.common.errors import require

from .model_files import AGAIN, inside, read_object


PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
OF_SEVERAL_PROCESSES = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")  # taken before all others


def shards(folder: Path) -> list[str]:
    """Names of the files that have a model's weights, as its index gives them; one file where there is no index.

    Raises:
        ValueError: the index is cut, or names a file that is elsewhere or that may run code.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / SAFE_WEIGHTS_NAME).exists() or not index.exists():  # the order of `from_pretrained`
        return [SAFE_WEIGHTS_NAME]
    files, metadata = (read_object(index).get(name) for name in ("weight_map", "metadata"))
    known = isinstance(files, dict) and files and all(isinstance(name, str) for name in files.values())
    require(bool(known), f"{index} does not say which file has which weights; {AGAIN}.")
    require(isinstance(metadata, dict), f"{index} has no metadata, so it may be cut; {AGAIN}.")
    names = sorted(set(files.values()))  # type: ignore[union-attr]
    for name in names:
        is_plain = Path(name).name == name and "\\" not in name and name not in (".", "..")
        require(is_plain, f"{index} names {name!r}, which is outside the model's folder; {AGAIN}.")
        told = f"{index} names {name!r}, and only safetensors are loaded, since other files may run code; "
        require(name.endswith(".safetensors"), f"{told}save the model anew.")
    return names


def check_weights(folder: Path) -> None:
    """Whether the files of a model's weights are there, whole, and the only ones."""
    names, found = shards(folder), {path.name for path in folder.iterdir()}
    pickles = [name for name in sorted(found) if Path(name).suffix in PICKLES]
    told = f"{folder} has its weights in {next(iter(pickles), None)}, a pickle, which may run code; convert it to "
    told += "safetensors, or load it yourself with use_safetensors=False if you trust it."
    require(not pickles or not found.isdisjoint(names), told)
    part = min(filter(OF_SEVERAL_PROCESSES.fullmatch, found), default=None)
    told = f"{folder} has {part}, a part that one process saved, which hides the weights; save the whole model."
    require(part is None, told)
    number = len(_shapes(folder))
    for settings in inside(read_object(folder / "config.json")):
        for name, value in settings.items():
            told = f"{folder / 'config.json'} has {name}={value}, and there are {number} weights; {AGAIN}."
            require(not ("layer" in name and isinstance(value, int)) or value <= number, told)


def check_size(folder: Path, needed: int) -> None:
    """Whether a model of so many parameters can be what the weights are of; before it takes memory."""
    found = sum(map(math.prod, _shapes(folder)))
    told = f"{folder} has {found} numbers in its weights, and the model of its config {needed}; {AGAIN}."
    require(needed <= 2 * found, told)


def check_loaded(
    where: str, missing: Collection[str], mismatched: Collection[Any], unused: Collection[str], used: Collection[str]
) -> None:
    """Whether the weights in a model's files were all of its weights, and no others.

    Args:
        where: names the files in errors.
        missing, mismatched, unused: as transformers reports them of loading.
        used: names of the model's weights.
    """
    name, found, expected = min(mismatched, default=("", (), ()))
    told = f"{where}: {name!r} is {list(found)}, and its config says {list(expected)}; {AGAIN}."
    require(not mismatched, told)
    told = f"{where} lacks {len(missing)} of the model's weights, {min(missing, default='')!r} among them; {AGAIN}."
    require(not missing, told)
    kinds = {re.sub(r"\d+", "#", name) for name in used}
    no_layers = not any("#" in kind for kind in kinds)
    further = [name for name in unused if (kind := re.sub(r"\d+", "#", name)) in kinds or (no_layers and "#" in kind)]
    told = f"{where} has weights for more layers than its config, {min(further, default='')!r} among them; {AGAIN}."
    require(not further, told)


def shapes_in(path: Path) -> list[list[int]]:
    """The shapes of the tensors in a file, of which only the header is read.

    Raises:
        ValueError: it is not there, is no safetensors, or is longer or shorter than its header says.
    """
    told = f"{path.parent} has no {path.name}: weights are missing, no safetensors, or written half; {AGAIN}."
    require(path.is_file(), told)
    try:
        with safe_open(str(path), framework="pt") as file:
            return [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    except Exception as error:  # of a type that only safetensors has
        raise ValueError(f"{path} is not whole, or no safetensors ({error}); {AGAIN}.") from error


def _shapes(folder: Path) -> list[list[int]]:
    return [shape for name in shards(folder) for shape in shapes_in(folder / name)]
