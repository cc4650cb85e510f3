"""Checks of a model's files before they are loaded: that they are whole, run no code and name no other files."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.modeling_utils import safe_open
from transformers.utils import CHAT_TEMPLATE_DIR, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .checkpoints import MEDUSA_WEIGHTS
from .errors import require


FULL_COMMIT = re.compile(r"[0-9a-f]{40}")  # a full one, which always stands for the same files
GET_AGAIN = "get it again, or save the pair anew"
TRUST = "read it, and load it yourself with trust_remote_code=True if you trust it"
FILES_FOR_MODELS = ("configuration_files", "transformers_weights")  # read in place of those that were checked
FILES_FOR_TOKENIZERS = ("fast_tokenizer_files", "gguf_file", "init_inputs", "merges", "merges_file", "vocab")
KERNEL = re.compile("[/:]")  # in what says how a part of a model is computed: a repository whose code would be run
TOKENIZER_CLASSES = ("Tokenizer", "TokenizerFast", "Backend")  # how their names end
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
OF_SEVERAL_PROCESSES = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")  # taken before all others


def check_reference(name: str) -> None:
    """Raise ValueError unless a repository that a config names can be loaded by its name."""
    message = (
        f"the pair means the repository {name!r}, and a local folder of that name would be loaded in its place; "
        "rename it or work elsewhere, or load the model yourself and pass it."
    )
    require(not Path(name).exists(), message)


def check_links(root: Path, folder: Path) -> None:
    """Raise ValueError if a file, or one of a model in a folder, is a link out of the pair's folder."""
    allowed = root.resolve()
    if allowed.parent.name == "snapshots":  # the Hub's cache links to its blobs
        allowed = allowed.parent.parent
    for path in (folder, *folder.glob("*"), *folder.glob(f"{CHAT_TEMPLATE_DIR}/*")):
        message = f"{path} is a link out of the pair's folder; put the file itself there."
        require(path.resolve().is_relative_to(allowed), message)


def check_model(folder: Path, trust_remote_code: bool, pinned: bool) -> None:
    """Raise ValueError unless a model's settings can be loaded.

    Only trusted ones that are `pinned`, and so are always the same, may bring code.
    """
    path, generation = folder / "config.json", folder / "generation_config.json"
    is_adapter = (folder / "adapter_config.json").exists() and not path.exists()
    message = (
        f"{folder} is an adapter of PEFT, and no whole model; merge it into its model by merge_and_unload() of peft, "
        "save that, and name it. (As the target of a command it is merged.)"
    )
    require(not is_adapter, message)
    require(path.is_file(), f"{folder} has no config.json: the model is missing, or was written half; {GET_AGAIN}.")
    config, settings = _object_in(path), _object_in(generation)
    require(config is not None, f"{path} is not a JSON object; {GET_AGAIN}.")
    message = f"{generation} is not a JSON object, and transformers would use its own defaults; {GET_AGAIN}."
    require(not generation.exists() or settings is not None, message)
    message = (
        f"{folder} has an adapter_config.json, which names a model elsewhere; merge the adapter and save the model."
    )
    require(not (folder / "adapter_config.json").exists(), message)
    _check_code(path, config, trust_remote_code, pinned)


def check_generation(folder: Path) -> None:
    """Raise ValueError if a target's generation config asks for beam search."""
    path = folder / "generation_config.json"
    beams = (_object_in(path) or {}).get("num_beams")
    message = (
        f"{path} has num_beams={beams!r}, for which transformers repeats every row before it calls a strategy; take "
        "it out."
    )
    require(beams in (None, 1), message)


def _check_code(path: Path, settings: Any, trust_remote_code: bool, pinned: bool) -> None:
    """Raise ValueError if a model's config asks for code that may not run, or for files that are not checked."""
    config, *parts = _objects(settings)
    is_unknown_type = "auto_map" in config and str(config.get("model_type")) not in CONFIG_MAPPING
    brings_code = is_unknown_type or any("auto_map" in part for part in parts)
    message = f"the model in {path.parent} brings code of its own, which is not run; {TRUST}."
    require(not brings_code or trust_remote_code, message)
    message = (
        f"the model in {path.parent} brings code of its own, and the pair names its repository without a full commit, "
        "so that the code may change; write the commit that you have read as its revision in the pair's config."
    )
    require(not brings_code or pinned, message)
    is_trusted = trust_remote_code and pinned
    for part in (config, *parts):
        if is_trusted:
            _check_own_code(path, part)
        for name, kernel in _kernels(part):
            commit = FULL_COMMIT.fullmatch(kernel.partition("@")[2].partition(":")[0])
            message = (
                f"{path} has {name}={kernel!r}, code from elsewhere, so that it names code for parts of the model; "
                "take it out, or trust it at a full commit."
            )
            require(is_trusted and commit is not None, message)
        for name in FILES_FOR_MODELS:
            message = f"{path} has {name}={part.get(name)!r}, which was not checked; take it out."
            require(not part.get(name), message)


def _kernels(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The code from elsewhere that a config names for parts of a model, as one for all parts or one for each."""
    for name, value in config.items():
        if "_implementation" in name:
            for text in _everything(value):
                if isinstance(text, str) and KERNEL.search(text):
                    yield name, text


def _check_own_code(path: Path, config: dict[str, Any]) -> None:
    """Raise ValueError if trusted code is that of another repository, whose main branch anybody may change."""
    for name in _everything(config.get("auto_map")):
        message = f"{path} takes code from {name!r}, another repository at no commit; put the code into its own."
        require(not isinstance(name, str) or "--" not in name, message)


def check_tokenizer(folder: Path, expected: bool, trust_remote_code: bool) -> None:
    """Raise ValueError unless a tokenizer can be loaded, and is there if it is expected."""
    path = folder / "tokenizer_config.json"
    message = f"{folder} has no tokenizer_config.json, though its pair was saved with a tokenizer; {GET_AGAIN}."
    require(path.exists() or not expected, message)
    config = _object_in(path) or {}
    message = f"the tokenizer in {folder} brings code of its own, which is not run; {TRUST}."
    require("auto_map" not in config or trust_remote_code, message)
    for file in (path, folder / "config.json"):
        settings = _object_in(file) or {}
        if trust_remote_code:  # else the code that config.json may name is passed over
            _check_own_code(file, settings)
        name = settings.get("tokenizer_class")
        message = f"{file} has tokenizer_class={name!r}, which is no tokenizer; {GET_AGAIN}."
        require(name is None or str(name).endswith(TOKENIZER_CLASSES), message)
    for name in FILES_FOR_TOKENIZERS:
        require(not config.get(name), f"{path} has {name}={config.get(name)!r}, no file of its own; take it out.")


def shards(folder: Path) -> list[str]:
    """Names of the files that have a model's weights, by its index, which is checked; one file where there is none."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / SAFE_WEIGHTS_NAME).exists() or not index.exists():  # the order of `from_pretrained`
        names = [name for name in (SAFE_WEIGHTS_NAME, MEDUSA_WEIGHTS) if (folder / name).exists()]
        return names[:1] or [SAFE_WEIGHTS_NAME]
    files, metadata = ((_object_in(index) or {}).get(name) for name in ("weight_map", "metadata"))
    is_map = isinstance(files, dict) and files and all(isinstance(name, str) for name in files.values())
    require(bool(is_map), f"{index} does not say which file has which weights; {GET_AGAIN}.")
    require(isinstance(metadata, dict), f"{index} has no metadata, so it may be cut; {GET_AGAIN}.")
    names = sorted(set(files.values()))  # type: ignore[union-attr]
    for name in names:
        is_plain = Path(name).name == name and "\\" not in name and name not in (".", "..")
        require(is_plain, f"{index} names {name!r}, which is outside the model's folder; {GET_AGAIN}.")
        message = (
            f"{index} names {name!r}, and only safetensors are loaded, since other files may run code; save the "
            "model anew."
        )
        require(name.endswith(".safetensors"), message)
    return names


def check_weights(folder: Path) -> None:
    """Raise ValueError unless the files of a model's weights are there, whole, and the only ones."""
    names = shards(folder)
    present = {path.name for path in folder.iterdir()}
    pickles = [name for name in sorted(present) if Path(name).suffix in PICKLES]
    message = (
        f"{folder} has its weights in {next(iter(pickles), None)}, a pickle, which may run code; convert it to "
        "safetensors, or load it yourself with use_safetensors=False if you trust it; of a draft head "
        "DraftHead.from_pretrained(..., target=...) takes tensors alone, and save_pretrained() writes safetensors."
    )
    require(not pickles or not present.isdisjoint(names), message)
    part = min(filter(OF_SEVERAL_PROCESSES.fullmatch, present), default=None)
    message = f"{folder} has {part}, a part that one process saved, which hides the weights; save the whole model."
    require(part is None, message)
    _shapes(folder)


def check_layers(folder: Path) -> None:
    """Raise ValueError if a model has more layers than weights; the config of a head may count its target's layers."""
    number, path = len(_shapes(folder)), folder / "config.json"
    for settings in _objects(_object_in(path) or {}):
        for name, value in settings.items():
            # max_window_layers makes none, and first layers of a model keep its number
            is_count = "layer" in name and isinstance(value, int) and not name.startswith("max_")
            message = f"{path} has {name}={value}, and there are {number} weights; {GET_AGAIN}."
            require(not is_count or value <= number, message)


def check_size(folder: Path, needed: int) -> None:
    """Raise ValueError if a model, not made yet, needs more than twice as many parameters as its files have."""
    available = sum(map(math.prod, _shapes(folder)))
    message = f"{folder} has {available} numbers in its weights, and the model of its config {needed}; {GET_AGAIN}."
    require(needed <= 2 * available, message)


def shapes_in(path: Path) -> list[list[int]]:
    """The shapes of the tensors in a file of whole safetensors, of which only the header is read."""
    message = f"{path.parent} has no {path.name}: weights are missing, no safetensors, or written half; {GET_AGAIN}."
    require(path.is_file(), message)
    try:
        with safe_open(str(path), framework="pt") as file:
            return [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    except Exception as error:  # of a type that only safetensors has
        raise ValueError(f"{path} is not whole, or no safetensors ({error}); {GET_AGAIN}.") from error


def _shapes(folder: Path) -> list[list[int]]:
    """The shapes of all weights of a model."""
    return [shape for name in shards(folder) for shape in shapes_in(folder / name)]


def _objects(values: Any) -> Iterator[dict[str, Any]]:
    """An object and all objects in it, the outermost first."""
    return (value for value in _everything(values) if isinstance(value, dict))


def _everything(value: Any) -> Iterator[Any]:
    """A value, and all values that are in it, in dicts and lists of any depth."""
    waiting: list[Any] = [value]
    for item in waiting:  # which grows meanwhile
        yield item
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _object_in(path: Path) -> dict[str, Any] | None:
    """A JSON object in a file, None if there is none."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
