"""Checks of the files of a pair before they are loaded: what is half-written, runs code or reads elsewhere."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.utils import CHAT_TEMPLATE_DIR

from hf_specx.common.errors import refusal, require


AGAIN = "get it again, or save the pair anew"
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


@refusal
def check_reference(name: str) -> str | None:
    """Whether a repository that a config names can be loaded by its name."""
    if not Path(name).exists():
        return None
    return (
        f"the pair means the repository {name!r}, and a local folder of that name would be loaded in its place; "
        "rename it or work elsewhere, or pass the model yourself, as target= or draft=."
    )


@refusal
def link_out_of_the_folder(root: Path, files: Collection[Path]) -> str | None:
    home = root.resolve()
    allowed = home.parent.parent if home.parent.name == "snapshots" else home  # the Hub's cache links to its blobs
    for path in files:
        if not path.resolve().is_relative_to(allowed):
            return f"{path} is a link out of the pair's folder; put the file itself there."
    return None


@refusal
def model_with_code(folder: Path, trust_remote_code: bool) -> str | None:
    config, *parts = inside(read_object(folder / "config.json"))
    named = "auto_map" in config and str(config.get("model_type")) not in CONFIG_MAPPING
    if trust_remote_code or not (named or any("auto_map" in part for part in parts)):
        return None
    return (
        f"the model in {folder} brings code of its own, which is not run; read it, and pass trust_remote_code=True if "
        "you trust it."
    )


@refusal
def model_with_kernels(folder: Path, trust_remote_code: bool) -> str | None:
    for part in inside(read_object(folder / "config.json")):
        for name in KERNELS:
            if "/" in str(part.get(name, "")) and not trust_remote_code:
                return f"{folder / 'config.json'} has {name}={part[name]!r}, code from elsewhere; take it out."
    return None


@refusal
def model_in_other_files(folder: Path) -> str | None:
    for part in inside(read_object(folder / "config.json")):
        for name in FILES_FOR_MODELS:
            if part.get(name):
                return f"{folder / 'config.json'} has {name}={part[name]!r}, which was not checked; take it out."
    return None


@refusal
def generation_config_that_is_no_json(folder: Path) -> str | None:
    path = folder / "generation_config.json"
    if not path.exists() or isinstance(_json(path), dict):
        return None
    return f"{path} is not a JSON object, and transformers would use its own defaults; {AGAIN}."


@refusal
def adapter_in_place_of_a_model(folder: Path) -> str | None:
    if not (folder / "adapter_config.json").exists():
        return None
    return f"{folder} has an adapter_config.json, which names a model elsewhere; merge the adapter and save the model."


@refusal
def tokenizer_with_code(folder: Path, trust_remote_code: bool) -> str | None:
    if trust_remote_code or "auto_map" not in read_object(folder / "tokenizer_config.json"):
        return None
    return (
        f"the tokenizer in {folder} brings code of its own, which is not run; read it, and pass "
        "trust_remote_code=True if you trust it."
    )


@refusal
def tokenizer_of_no_class_for_it(folder: Path) -> str | None:
    for path in (folder / "tokenizer_config.json", folder / "config.json"):
        name = read_object(path).get("tokenizer_class")
        if name is not None and not str(name).endswith(("Tokenizer", "TokenizerFast", "Backend")):
            return f"{path} has tokenizer_class={name!r}, which is no tokenizer; {AGAIN}."
    return None


@refusal
def model_that_asks_for_beams(folder: Path) -> str | None:
    beams = read_object(folder / "generation_config.json").get("num_beams")
    if beams in (None, 1):
        return None
    return (
        f"{folder / 'generation_config.json'} has num_beams={beams!r}, which transformers would make room for before "
        "we are asked; take it out."
    )


@refusal
def tokenizer_in_other_files(folder: Path) -> str | None:
    config = read_object(folder / "tokenizer_config.json")
    for name in FILES_FOR_TOKENIZERS:
        if config.get(name):
            return f"{folder / 'tokenizer_config.json'} has {name}={config[name]!r}, no file of its own; take it out."
    return None


@refusal
def tokenizer_of_another_size(found: int, recorded: int, where: str) -> str | None:
    if found == recorded:
        return None
    return f"the tokenizer of {where} has {found} tokens, and its pair was checked with {recorded}; {AGAIN}."


@refusal
def tokenizer_with_other_ids(found: str | None, recorded: str | None, where: str) -> str | None:
    if recorded is None or found == recorded:
        return None
    return f"the tokens of the tokenizer of {where} have other ids than those that its pair was checked with; {AGAIN}."


@refusal
def tokenizer_with_other_special_tokens(found: dict[str, str], recorded: dict[str, str], where: str) -> str | None:
    for role in sorted(found.keys() | recorded.keys()):
        if found.get(role) != recorded.get(role):
            return (
                f"the tokenizer of {where} has {role}={found.get(role)!r}, and its pair was checked with "
                f"{recorded.get(role)!r}; {AGAIN}."
            )
    return None


@refusal
def check_facts(where: str, recorded: dict[str, Any], found: dict[str, Any]) -> str | None:
    """Whether a model is what its pair was made with; None is not known."""
    for name, value in recorded.items():
        if value is not None and found[name] is not None and found[name] != value:
            return f"{where} has {name}={found[name]!r}, and the pair was made with {value!r}; {AGAIN}."
    return None


def check_is_pair(where: str, config_name: str, found: bool) -> None:
    """Whether a folder or repository is a pair."""
    require(
        found,
        f"{where} has no {config_name}, so it is no draft-target pair; name a pair, or put two models together with "
        "DraftTargetPair(target, draft, tokenizer).",
    )


def check_links(root: Path, folder: Path) -> None:
    """Whether all files of a model are in the pair's folder."""
    link_out_of_the_folder(root, [folder, *folder.glob("*"), *folder.glob(f"{CHAT_TEMPLATE_DIR}/*")])


def check_model(folder: Path, trust_remote_code: bool) -> None:
    """Whether a model's settings can be loaded."""
    config = folder / "config.json"
    require(config.is_file(), f"{folder} has no config.json: the model is missing, or was written half; {AGAIN}.")
    require(isinstance(_json(config), dict), f"{config} is not a JSON object; {AGAIN}.")
    generation_config_that_is_no_json(folder)
    model_that_asks_for_beams(folder)
    model_with_code(folder, trust_remote_code)
    model_with_kernels(folder, trust_remote_code)
    model_in_other_files(folder)
    adapter_in_place_of_a_model(folder)


def check_tokenizer(folder: Path, expected: bool, trust_remote_code: bool) -> None:
    """Whether a tokenizer can be loaded."""
    found = (folder / "tokenizer_config.json").exists()
    told = f"{folder} has no tokenizer_config.json, though its pair was saved with a tokenizer; {AGAIN}."
    require(found or not expected, told)
    tokenizer_with_code(folder, trust_remote_code)
    tokenizer_of_no_class_for_it(folder)
    tokenizer_in_other_files(folder)


def check_tokens(found: Any, recorded: Any, where: str) -> None:
    """Whether a tokenizer is the one that was checked, by the `TokenizerFacts` of both."""
    tokenizer_of_another_size(found.tokens, recorded.tokens, where)
    tokenizer_with_other_ids(found.vocabulary, recorded.vocabulary, where)
    tokenizer_with_other_special_tokens(found.special_tokens, recorded.special_tokens, where)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object in a file, {} if there is none."""
    values = _json(path)
    return values if isinstance(values, dict) else {}


def inside(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """An object and all objects in it, the outermost first."""
    waiting: list[Any] = [values]
    for value in waiting:
        if isinstance(value, dict):
            yield value
        waiting.extend(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
