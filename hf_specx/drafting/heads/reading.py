"""Read published draft heads: whatever the form of their files, as one config and tensors by one set of names."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from hf_specx.common.architectures import vocabulary
from hf_specx.common.errors import brief, is_int, kind, require, similar

from .config import HeadConfig, fields_of, layer_fields


HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder")
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.pt",
)
NAMES = (  # what a name begins with, and how it begins here
    (r"^(model|medusa_head)\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^additional_layers\.(\d+)\.", lambda found: f"layers.{int(found[1]) + 1}."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^(layers\.[1-9]\d*)\.hidden_norm\.", r"\1.input_layernorm."),
)
OF_THE_TARGET = re.compile(r"(verifier_norm|verifier_lm_head|.*rotary_emb)\.")  # copies, and what is computed


def read_head(name: str | Path, target: PreTrainedModel, **loading: Any) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """The config of a draft head, and its tensors in the precision of its files.

    Nothing in the files is run: weights are safetensors, or pickles of which only tensors are read.

    Args:
        name: a folder, or an id on the Hub.
        target: the model whose states it reads.
        **loading: `HUB`, and `layer_ids` in place of those in the files.

    Raises:
        ValueError: the files are no head, or none for this target; it says what is wrong.
    """
    for option in loading.keys() - {*HUB, "layer_ids"}:
        told = f"unknown option {option!r} for a draft head; {similar(option, (*HUB, 'layer_ids'))}"
        raise ValueError(f"{told}give one of {', '.join((*HUB, 'layer_ids'))}.")
    layer_ids = loading.pop("layer_ids", None)
    raw, weights = read_files(name, **loading)
    weights = canonical(weights)
    fields = fields_of(raw) if "transformer_layer_config" in raw else layer_fields(raw, False)
    config = HeadConfig(**fields)
    return config, weights


def read_files(name: str | Path, **hub: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What is in the config and in the weights of a repository or folder."""
    path = _file(name, "config.json", hub)
    told = f"{name} has no config.json, so it is no draft head; give a folder or a repository of one."
    require(path is not None, told)
    try:
        raw = json.loads(Path(str(path)).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}; get it again.") from error
    require(isinstance(raw, dict), f"{path} is not a JSON object; get it again.")
    found = next((file for file in WEIGHTS if _file(name, file, hub) is not None), None)
    require(found is not None, f"{name} has no weights; a draft head has one of {', '.join(WEIGHTS)}.")
    files = [str(found)]
    if str(found).endswith(".index.json"):
        index = json.loads(Path(str(_file(name, str(found), hub))).read_bytes())
        files = sorted(set(index["weight_map"].values()))
        for file in files:
            plain = Path(file).name == file and "\\" not in file and file.endswith((".safetensors", ".bin"))
            require(plain, f"{name}: {found} names {file!r}, which is no file of weights beside it; get it again.")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= _tensors(Path(str(_file(name, file, hub))))
    return raw, weights


def _file(name: str | Path, file: str, hub: dict[str, Any]) -> Path | None:
    """The path of a file on this machine, got from the Hub if need be; None if there is no such file."""
    found = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False, **hub)
    return None if found is None else Path(found)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in a file; of a pickle nothing else is made."""
    try:
        found = load_state_dict(str(path), weights_only=True)
    except (UnpicklingError, RuntimeError, OSError, EOFError) as error:
        told = f"{path} cannot be read as tensors alone ({error}); convert it to safetensors if you trust it."
        raise ValueError(told) from error
    wrong = [name for name, tensor in found.items() if not isinstance(tensor, torch.Tensor)]
    require(not wrong, f"{path} has {min(wrong, default='')!r}, which is no tensor; save the weights alone.")
    return found


def canonical(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the names of the *speculators* form, without what the target has as well."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        for pattern, beginning in NAMES:
            name = re.sub(pattern, beginning, name)
        require(name not in found, f"two tensors of the head are {name!r} by their names; keep one of them.")
        if not OF_THE_TARGET.match(name):
            found[name] = tensor
    embeddings = found.get("embed_tokens.weight")
    if embeddings is not None and bool(embeddings.isnan().all()):  # left out by the trainer
        del found["embed_tokens.weight"]
    return found
