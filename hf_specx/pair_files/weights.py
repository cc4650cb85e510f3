"""Checks of the files with a model's weights, and that they are the weights of what its config describes."""

import itertools
import json
import math
import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_specx.common.errors import refusal

from .model_files import AGAIN, inside, read_object


MAX_HEADER_BYTES = 100_000_000  # as safetensors itself
OF_SEVERAL_PROCESSES = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")  # taken before all others


@refusal
def index_without_weights(folder: Path) -> str | None:
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.exists():
        return None
    shards, metadata = (read_object(index).get(name) for name in ("weight_map", "metadata"))
    if isinstance(shards, dict) and shards and all(isinstance(name, str) for name in shards.values()):
        return None if isinstance(metadata, dict) else f"{index} has no metadata, so it may be cut; {AGAIN}."
    return f"{index} does not say which file has which weights; {AGAIN}."


@refusal
def shard_outside_the_folder(folder: Path, names: Collection[str]) -> str | None:
    for name in names:
        if Path(name).name != name or "\\" in name or name in (".", ".."):
            return f"{folder / SAFE_WEIGHTS_INDEX_NAME} names {name!r}, which is outside the model's folder; {AGAIN}."
    return None


@refusal
def shard_that_may_run_code(folder: Path, names: Collection[str]) -> str | None:
    for name in names:
        if not name.endswith(".safetensors"):
            return (
                f"{folder / SAFE_WEIGHTS_INDEX_NAME} names {name!r}, and only safetensors are loaded, since other "
                "files may run code; save the model anew."
            )
    return None


@refusal
def weights_that_may_run_code(folder: Path, names: Collection[str]) -> str | None:
    pickles = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")]
    if not pickles or any((folder / name).exists() for name in names):
        return None
    return (
        f"{folder} has its weights in {min(pickles)}, a pickle, which may run code; convert it to safetensors, or "
        "pass use_safetensors=False if you trust it."
    )


@refusal
def weights_missing(folder: Path, names: Collection[str]) -> str | None:
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return None
    return f"{folder} has no {min(missing)}: weights are missing, no safetensors, or written half; {AGAIN}."


@refusal
def weights_with_strange_header(paths: Collection[Path]) -> str | None:
    for path in paths:
        if _header(path) is None:
            return f"{path} does not begin as safetensors do; {AGAIN}."
    return None


@refusal
def weights_cut_off(paths: Collection[Path]) -> str | None:
    for path in paths:
        start, tensors = _header(path) or (0, {})
        end = start + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        if end != path.stat().st_size:
            return f"{path} has {path.stat().st_size} bytes, and its header speaks of {end}; {AGAIN}."
    return None


@refusal
def weights_that_are_not_all(where: str, missing: Collection[str]) -> str | None:
    if not missing:
        return None
    return f"{where} lacks {len(missing)} of the model's weights, {min(missing)!r} among them; {AGAIN}."


@refusal
def weights_of_another_shape(where: str, mismatched: Collection[Any]) -> str | None:
    if not mismatched:
        return None
    name, found, expected = min(mismatched)
    return f"{where}: {name!r} is {list(found)}, and its config says {list(expected)}; {AGAIN}."


@refusal
def weights_of_several_processes(folder: Path) -> str | None:
    found = [path.name for path in folder.iterdir() if OF_SEVERAL_PROCESSES.fullmatch(path.name)]
    if not found:
        return None
    return f"{folder} has {min(found)}, a part that one process saved, which hides the weights; save the whole model."


@refusal
def layers_without_weights(folder: Path, tensors: int) -> str | None:
    for part in inside(read_object(folder / "config.json")):
        for name, number in part.items():
            if "layer" in name and isinstance(number, int) and number > tensors:
                return f"{folder / 'config.json'} has {name}={number}, and there are {tensors} weights; {AGAIN}."
    return None


@refusal
def model_larger_than_its_weights(where: str, needed: int, found: int) -> str | None:
    if needed <= 2 * found:
        return None
    return f"{where} has {found} numbers in its weights, and the model of its config {needed}; {AGAIN}."


@refusal
def weights_of_further_layers(where: str, unused: Collection[str], used: Collection[str]) -> str | None:
    kinds = {re.sub(r"\d+", "#", name) for name in used}
    without = not any("#" in kind for kind in kinds)  # any layers at all
    further = [name for name in unused if (kind := re.sub(r"\d+", "#", name)) in kinds or (without and "#" in kind)]
    if not further:
        return None
    return f"{where} has weights for more layers than its config, {min(further)!r} among them; {AGAIN}."


def check_shards(folder: Path) -> None:
    """Whether the files that an index names can be downloaded and loaded."""
    index_without_weights(folder)
    names = shards(folder)
    shard_outside_the_folder(folder, names)
    shard_that_may_run_code(folder, names)


def check_weights(folder: Path) -> None:
    """Whether the files of a model's weights are there, whole, and the only ones."""
    names = shards(folder)
    weights_that_may_run_code(folder, names)
    weights_of_several_processes(folder)
    weights_missing(folder, names)
    paths = [folder / name for name in names]
    weights_with_strange_header(paths)
    weights_cut_off(paths)
    layers_without_weights(folder, len(_all_tensors(paths)))


def check_file(path: Path) -> None:
    """Whether a file of weights that is no model's is there and whole."""
    weights_missing(path.parent, [path.name])
    weights_with_strange_header([path])
    weights_cut_off([path])


def check_size(folder: Path, needed: int) -> None:
    """Whether a model of so many parameters can be what the weights are of; before it takes memory."""
    tensors = _all_tensors([folder / name for name in shards(folder)])
    model_larger_than_its_weights(str(folder), needed, sum(math.prod(entry["shape"]) for entry in tensors))


def check_loaded(
    where: str, missing: Collection[str], mismatched: Collection[Any], unused: Collection[str], used: Collection[str]
) -> None:
    """Whether the weights in a model's files were all of its weights, and no others."""
    weights_of_another_shape(where, mismatched)
    weights_that_are_not_all(where, missing)
    weights_of_further_layers(where, unused, used)


def shards(folder: Path) -> list[str]:
    """Names of the files that have a model's weights, as its index gives them; one file where there is no index."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / SAFE_WEIGHTS_NAME).exists() or not index.exists():  # the order of `from_pretrained`
        return [SAFE_WEIGHTS_NAME]
    return sorted(set(read_object(index)["weight_map"].values()))


def _header(path: Path) -> tuple[int, dict[str, Any]] | None:
    """Where the data of a safetensors file begin, and what it says of each tensor; None if it says nothing like it."""
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length) if length <= MAX_HEADER_BYTES else b"")
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            spans = sorted((*entry["data_offsets"], _bits(entry)) for entry in tensors.values())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error):
            return None
    joined = all(end == start for (_, end, _), (start, _, _) in itertools.pairwise([(0, 0, 0), *spans]))
    filled = all(8 * (end - start) == bits for start, end, bits in spans)
    return (8 + length, tensors) if joined and filled else None


def _bits(entry: dict[str, Any]) -> int:
    """Those that a tensor should take, by its type, like "BF16", and its shape."""
    width = 8 if entry["dtype"] == "BOOL" else int(re.findall(r"\d+", entry["dtype"])[0])
    return width * math.prod(entry["shape"])


def _all_tensors(paths: Collection[Path]) -> list[dict[str, Any]]:
    return [entry for path in paths for entry in (_header(path) or (0, {}))[1].values()]
