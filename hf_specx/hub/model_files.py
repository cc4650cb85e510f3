"""Checks of the files of a pair before they are loaded: what is half-written, runs code or reads elsewhere."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.utils import CHAT_TEMPLATE_DIR

from hf_specx.common.errors import require


AGAIN = "get it again, or save the pair anew"
TRUST = "read it, and load it yourself with trust_remote_code=True if you trust it"
FULL_COMMIT = re.compile(r"[0-9a-f]{40}")  # a full one, which always stands for the same files
FILES_FOR_MODELS = ("configuration_files", "transformers_weights")  # read in place of those that were checked
FILES_FOR_TOKENIZERS = (  # not overruled
    "fast_tokenizer_files",
    "gguf_file",
    "init_inputs",
    "merges",
    "merges_file",
    "vocab",
)
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
TOKENIZER_CLASSES = ("Tokenizer", "TokenizerFast", "Backend")  # how their names end


def check_is_pair(where: str, config_name: str, found: bool) -> None:
    """Whether a folder or repository is a pair."""
    require(
        found,
        f"{where} has no {config_name}, so it is no draft-target pair; name a pair, or put two models together with "
        "DraftTargetPair(target, draft, tokenizer).",
    )


def check_reference(name: str) -> None:
    """Whether a repository that a config names can be loaded by its name."""
    require(
        not Path(name).exists(),
        f"the pair means the repository {name!r}, and a local folder of that name would be loaded in its place; "
        "rename it or work elsewhere, or load the model yourself and pass it.",
    )


def check_links(root: Path, folder: Path) -> None:
    """Whether a file, or all files of a model in a folder, are in the pair's folder, and no links to other places."""
    home = root.resolve()
    allowed = home.parent.parent if home.parent.name == "snapshots" else home  # the Hub's cache links to its blobs
    for path in (folder, *folder.glob("*"), *folder.glob(f"{CHAT_TEMPLATE_DIR}/*")):
        told = f"{path} is a link out of the pair's folder; put the file itself there."
        require(path.resolve().is_relative_to(allowed), told)


def check_model(folder: Path, trust_remote_code: bool, pinned: bool = True) -> None:
    """Whether a model's settings can be loaded.

    Args:
        folder: of the model.
        trust_remote_code: whether it may bring code.
        pinned: whether its files are always the same, or its user's own choice; else they may not bring code.
    """
    path, generation = folder / "config.json", folder / "generation_config.json"
    require(path.is_file(), f"{folder} has no config.json: the model is missing, or was written half; {AGAIN}.")
    require(isinstance(_json(path), dict), f"{path} is not a JSON object; {AGAIN}.")
    told = f"{generation} is not a JSON object, and transformers would use its own defaults; {AGAIN}."
    require(not generation.exists() or isinstance(_json(generation), dict), told)
    beams = read_object(generation).get("num_beams")
    told = f"{generation} has num_beams={beams!r}, which transformers would make room for before we are asked; "
    require(beams in (None, 1), f"{told}take it out.")
    _check_code(path, trust_remote_code, pinned)
    told = f"{folder} has an adapter_config.json, which names a model elsewhere; merge the adapter and save the model."
    require(not (folder / "adapter_config.json").exists(), told)


def _check_code(path: Path, trust_remote_code: bool, pinned: bool) -> None:
    """Whether a model's config asks for code that may not run, or for files that are not checked."""
    config, *parts = inside(read_object(path))
    unknown = "auto_map" in config and str(config.get("model_type")) not in CONFIG_MAPPING
    brings, told = unknown or any("auto_map" in part for part in parts), f"the model in {path.parent} brings code of "
    require(not brings or trust_remote_code, f"{told}its own, which is not run; {TRUST}.")
    told += "its own, and the pair names its repository without a full commit, so that the code may change; "
    require(not brings or pinned, f"{told}write the commit that you have read as its revision in the pair's config.")
    trusted = trust_remote_code and pinned
    for part in (config, *parts):
        if trusted:
            _check_own_code(path, part)
        for name in KERNELS:
            kernel = str(part.get(name, ""))
            told = f"{path} has {name}={kernel!r}, code from elsewhere; take it out, or trust it at a full commit."
            fixed = FULL_COMMIT.fullmatch(kernel.partition("@")[2].partition(":")[0])
            require("/" not in kernel or bool(trusted and fixed), told)
        for name in FILES_FOR_MODELS:
            told = f"{path} has {name}={part.get(name)!r}, which was not checked; take it out."
            require(not part.get(name), told)


def _check_own_code(path: Path, config: dict[str, Any]) -> None:
    """Whether trusted code is that of the repository itself, and of none whose main branch anybody may change."""
    for name in _everything(config.get("auto_map")):
        told = f"{path} takes code from {name!r}, another repository at no commit; put the code into its own."
        require(not isinstance(name, str) or "--" not in name, told)


def check_tokenizer(folder: Path, expected: bool, trust_remote_code: bool) -> None:
    """Whether a tokenizer can be loaded.

    Args:
        folder: of the tokenizer.
        expected: whether there must be one.
        trust_remote_code: whether it may bring code.
    """
    path = folder / "tokenizer_config.json"
    told = f"{folder} has no tokenizer_config.json, though its pair was saved with a tokenizer; {AGAIN}."
    require(path.exists() or not expected, told)
    config = read_object(path)
    told = f"the tokenizer in {folder} brings code of its own, which is not run; {TRUST}."
    require("auto_map" not in config or trust_remote_code, told)
    _check_own_code(path, config)
    for each in (path, folder / "config.json"):
        name = read_object(each).get("tokenizer_class")
        told = f"{each} has tokenizer_class={name!r}, which is no tokenizer; {AGAIN}."
        require(name is None or str(name).endswith(TOKENIZER_CLASSES), told)
    for name in FILES_FOR_TOKENIZERS:
        require(not config.get(name), f"{path} has {name}={config.get(name)!r}, no file of its own; take it out.")


def check_tokens(found: Any, recorded: Any, where: str) -> None:
    """Whether a tokenizer is the one that was checked, by the `TokenizerFacts` of both."""
    told = f"the tokenizer of {where} has {found.tokens} tokens, and its pair was checked with {recorded.tokens}"
    require(found.tokens == recorded.tokens, f"{told}; {AGAIN}.")
    told = f"the tokens of the tokenizer of {where} have other ids than those that its pair was checked with; {AGAIN}."
    require(recorded.vocabulary in (None, found.vocabulary), told)
    ours, theirs = found.special_tokens, recorded.special_tokens
    for role in sorted(ours.keys() | theirs.keys()):
        told = f"the tokenizer of {where} has {role}={ours.get(role)!r}, and its pair was checked with "
        require(ours.get(role) == theirs.get(role), f"{told}{theirs.get(role)!r}; {AGAIN}.")


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object in a file, {} if there is none."""
    values = _json(path)
    return values if isinstance(values, dict) else {}


def inside(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """An object and all objects in it, the outermost first."""
    return (value for value in _everything(values) if isinstance(value, dict))


def _everything(value: Any) -> Iterator[Any]:
    """A value, and all values that are in it, in dicts and lists of any depth."""
    waiting: list[Any] = [value]
    for each in waiting:
        yield each
        waiting.extend(each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
