"""Whether a loaded model is still what its repository on the Hub has at a commit, before a pair refers to it."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hf_specx.common.fingerprint import Offloaded, model_fingerprint, state_of, tensor_digest
from hf_specx.common.model_files import check_reference, shards
from hf_specx.drafting.heads.head import DraftHead

from .fetch import get_files
from .pair_config import ModelSource


LOADING_OPTIONS = ("dtype", "torch_dtype", "quantization_config", "use_cache")  # what may differ in a config


def why_not_there(
    model: PreTrainedModel, source: ModelSource, target: PreTrainedModel, cache_dir: str | Path | None = None
) -> str:
    """Why a model cannot be shown to be that of a repository at a commit; "" if it is.

    It is compared, tensor by tensor, with the files of that commit in the cache of the Hub's client. It may be the
    draft head of a `target`.
    """
    name = str(source.name)
    check_reference(name)
    try:
        files = get_files(name, source.revision, ["*"], source.subfolder, local_files_only=True, cache_dir=cache_dir)
    except LocalEntryNotFoundError:
        return "its files are not in the cache here"
    folder = files.folder
    if not all((folder / shard).exists() for shard in shards(folder)):
        return "its weights are not in the cache here, or no safetensors"
    if isinstance(model, DraftHead):
        published = DraftHead.from_pretrained(folder, target=target)
        torch.nn.Module.to(published, dtype=model.dtype)
        published.name_or_path = model.name_or_path
        is_same = model_fingerprint(published) == model_fingerprint(model)
        return "" if is_same else "its weights or settings were changed"
    config = type(model.config).from_pretrained(str(folder))
    changed = _differing(config.to_dict(), model.config.to_dict())
    return f"its config has another {changed}" if changed else _changed_weight(model, folder)


def _differing(there: dict[str, Any], here: dict[str, Any]) -> str:
    """The name of a setting that differs, also in a part of a config; empty if none does."""
    for name in sorted(there.keys() | here.keys()):
        then, now = there.get(name), here.get(name)
        if name in LOADING_OPTIONS or name.startswith("_") or name == "transformers_version" or then == now:
            continue
        if not (isinstance(then, dict) and isinstance(now, dict)):
            return name
        inner = _differing(then, now)
        if inner:
            return f"{name}.{inner}"
    return ""


def _changed_weight(model: PreTrainedModel, folder: Path) -> str:
    """A sentence about the first weight of a model that differs from the files in a folder; "" if none does."""
    state = state_of(model)
    weights = {name: state[name] for name in model.state_dict()}
    if not any(isinstance(value, Offloaded) for value in weights.values()):  # else all of them would have to be loaded
        weights = dict(revert_weight_conversion(model, weights))  # by the names, and in the shapes, of files
    digests = dict[str, str]()
    dtypes = dict[str, torch.dtype]()
    for name, value in weights.items():
        tensor = value.load() if isinstance(value, Offloaded) else value
        if tensor.is_meta:
            return f"its {name} is not in memory"
        digests[name], dtypes[name] = tensor_digest(tensor), tensor.dtype
    compared = set[str]()
    for shard in shards(folder):
        with safe_open(str(folder / shard), framework="pt") as file:
            for name in file.keys() & weights.keys():
                digest = tensor_digest(file.get_tensor(name).to(dtypes[name]))
                if digest != digests[name]:
                    return f"its {name} was changed"
                compared.add(digest)
    # a weight that is tied to another one has that one's numbers, and is not saved
    missing = min((name for name, digest in digests.items() if digest not in compared), default="")
    return f"its {missing} is not in the files" if missing else ""
