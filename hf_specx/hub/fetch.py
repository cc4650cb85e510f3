"""Get the files of models and pairs, from a folder or the Hub; they are checked before any of them is loaded."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import CHAT_TEMPLATE_DIR, SAFE_WEIGHTS_NAME
from transformers.utils.hub import LocalEntryNotFoundError, snapshot_download

from hf_specx.common.checkpoints import MEDUSA_WEIGHTS, Files, not_found, read_config
from hf_specx.common.drafts import DRAFT_FOLDER, PAIR_CONFIG_NAME, check_model_name, split_revision
from hf_specx.common.errors import require
from hf_specx.common.fingerprint import fingerprint_of
from hf_specx.common.model_files import (
    GET_AGAIN,
    check_generation,
    check_layers,
    check_links,
    check_model,
    check_reference,
    check_tokenizer,
    check_weights,
    shards,
)
from hf_specx.drafting.heads.detect_head import is_head

from .facts import tokenizer_facts
from .pair_config import DraftTokenizer, ModelSource, PairConfig, TokenizerFacts


HUB_OPTIONS = ("token", "cache_dir", "local_files_only", "force_download")
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")  # all but weights and code


def get_files(
    name: str | Path,
    revision: str | None,
    patterns: Sequence[str] = SMALL_FILES,
    subfolder: str = "",
    **hub_kwargs: Any,
) -> Files:
    """Download the files of these patterns in one folder of a repository; a local folder is taken as it is."""
    if Path(name).is_dir():
        return Files(str(name), None, Path(name), subfolder)
    prefix = f"{subfolder}/" if subfolder else ""
    allowed = [prefix + pattern for pattern in patterns]
    ignored = [f"{prefix}[!{CHAT_TEMPLATE_DIR[0]}]*/*"]  # folders in it, except that of chat templates
    try:
        root = snapshot_download(
            str(name), revision=revision, allow_patterns=allowed, ignore_patterns=ignored, **hub_kwargs
        )
    except LocalEntryNotFoundError as error:
        raise LocalEntryNotFoundError(not_found(name, error)) from error
    return Files(str(name), Path(root).name, Path(root), subfolder)


def find_files(name: str, **hub_kwargs: Any) -> Files:
    """Download all files of a model but its weights; `name` is a folder, or an id on the Hub, also as ID@REVISION."""
    name, revision = split_revision(name)
    check_model_name(name, revision)
    return get_files(name, revision, **hub_kwargs)


def find_draft_files(name: str, **hub_kwargs: Any) -> Files:
    """Download all files of a draft but its weights; a ValueError if `name` is a pair, at whose root is its target."""
    files = find_files(name, **hub_kwargs)
    require(
        not (files.root / PAIR_CONFIG_NAME).is_file(),
        f"{name} is a pair, and no draft; name the draft in it, as {name}/{DRAFT_FOLDER}, or give the pair alone.",
    )
    return files


def get_pair(name: str | Path, revision: str | None, **hub_kwargs: Any) -> tuple[Files, PairConfig]:
    """Download a pair's small files and read its config; a ValueError if it is wrong or unsafe, or there is none."""
    check_model_name(str(name), revision)
    files = get_files(name, revision, **hub_kwargs)
    path = files.root / PAIR_CONFIG_NAME
    check_links(files.root, path)
    require(
        path.is_file(),
        f"{name} has no {PAIR_CONFIG_NAME}, so it is no draft-target pair; name a pair, or put two models together "
        "with DraftTargetPair(target, draft, tokenizer).",
    )
    return files, PairConfig.from_file(path)


def get_settings(pair: Files, source: ModelSource, trust_remote_code: bool, **hub_kwargs: Any) -> Files:
    """Get and check all files of a model of a pair but its weights, as `get_model` does."""
    name, revision = pair.name, pair.revision
    if source.name is not None:
        check_reference(source.name)
        name, revision = source.name, source.revision
    patterns = (*SMALL_FILES, "*.py") if trust_remote_code and source.is_pinned else SMALL_FILES
    files = get_files(name, revision, patterns, source.subfolder, **hub_kwargs)
    check_links(files.root, files.folder)
    check_model(files.folder, trust_remote_code, source.is_pinned)
    check_generation(files.folder)
    return files


def get_model(
    pair: Files, source: ModelSource, trust_remote_code: bool, use_safetensors: bool, **hub_kwargs: Any
) -> Files:
    """Get and check all files of a model of a pair, whose own files are `pair`.

    With `trust_remote_code` the model may bring code, one in another repository at a full commit only. Without
    `use_safetensors` weights of any format are got, unchecked.
    """
    files = get_settings(pair, source, trust_remote_code, **hub_kwargs)
    weights = [SAFE_WEIGHTS_NAME, MEDUSA_WEIGHTS, *shards(files.folder)] if use_safetensors else ["*"]
    get_files(files.name, files.revision, weights, source.subfolder, **hub_kwargs)
    if use_safetensors:
        check_weights(files.folder)
        if not is_head(files.folder, read_config(files.folder)):
            check_layers(files.folder)
    return files


def get_tokenizer(
    files: Files, facts: TokenizerFacts | DraftTokenizer | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer in a folder, which must be what `facts` say; None if there is none, and none is expected."""
    folder = files.folder
    check_links(files.root, folder)
    check_tokenizer(folder, facts is not None, trust_remote_code)
    if not (folder / "tokenizer_config.json").exists():
        return None
    # where the target is elsewhere there is no config.json, and transformers would look for one
    config = {} if (folder / "config.json").exists() else {"config": PreTrainedConfig()}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, **config)
    except Exception as error:  # a broken file may raise any
        raise ValueError(f"transformers cannot read the tokenizer of {folder}: {error}; {GET_AGAIN}.") from error
    if facts is not None:
        _check_facts(files.name, tokenizer_facts(tokenizer), facts)
    return tokenizer


def _check_facts(name: str, here: TokenizerFacts, recorded: TokenizerFacts | DraftTokenizer) -> None:
    """Raise ValueError if a tokenizer is another one than its pair was checked with."""
    values = {"tokens": here.tokens, **here.special_tokens}
    recorded_values = {"tokens": recorded.tokens, **recorded.special_tokens}
    for key in sorted(values.keys() | recorded_values.keys()):
        value, recorded_value = values.get(key), recorded_values.get(key)
        require(
            value == recorded_value,
            f"the tokenizer of {name} has {key}={value!r}, and its pair was checked with {recorded_value!r}; "
            f"{GET_AGAIN}.",
        )
    require(
        recorded.vocabulary in (None, here.vocabulary),
        f"the tokens of the tokenizer of {name} have other ids than those that its pair was checked with; "
        f"{GET_AGAIN}.",
    )


def fingerprint(folder: Path) -> str:
    """The fingerprint of a model in files: of its config, and of all tensors in safetensors."""
    return fingerprint_of(json.loads((folder / "config.json").read_bytes()), _tensors_in(folder))


def _tensors_in(folder: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the name, the dtype with the shape, and the bytes of each tensor in a folder, one by one."""
    for shard in shards(folder):
        path = folder / shard
        content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8, device="cpu")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, end = (8 + length + offset for offset in tensor["data_offsets"])
                yield name, f"{tensor['dtype']} {tensor['shape']}", content[start:end]
