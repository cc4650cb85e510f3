"""An adapter of PEFT in place of a target: the model that it was trained on, with the adapter merged into it."""

import importlib
import importlib.util
import json
from typing import Any

from transformers import PreTrainedModel

from hf_specx.common.checkpoints import Files
from hf_specx.common.errors import require
from hf_specx.common.model_files import check_links, shapes_in


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(files: Files) -> bool:
    """Whether files are an adapter, and no whole model."""
    return (files.root / ADAPTER_CONFIG).is_file() and not (files.root / "config.json").exists()


def base_of(files: Files) -> str:
    """The name of the model that an adapter was trained on, perhaps with "@" and a revision, as its config has it.

    Raises:
        ValueError: peft is not installed, or the config names no model, or code from elsewhere.
    """
    path = files.root / ADAPTER_CONFIG
    check_links(files.root, files.root)
    is_installed = importlib.util.find_spec("peft") is not None
    require(is_installed, f"{files.shown} is an adapter of PEFT, for which peft is not installed; pip install peft.")
    try:
        config: Any = json.loads(path.read_bytes())
    except ValueError:
        config = None
    require(isinstance(config, dict), f"{path} is not a JSON object; get it again, or save the adapter anew.")
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    require(
        isinstance(name, str) and name != "",
        f"{path} has base_model_name_or_path={name!r}; write there the id or folder of the model that the adapter "
        "was trained on.",
    )
    require(
        not config.get("megatron_config"),
        f"{path} has megatron_config, by which peft would import code; take it out.",
    )
    return f"{name}@{revision}" if revision else str(name)


def merged(base: PreTrainedModel, files: Files) -> PreTrainedModel:
    """A model with an adapter for it merged into its weights; a ValueError where that cannot be done."""
    shapes_in(files.root / ADAPTER_WEIGHTS)  # raises for what is no whole safetensors
    peft = importlib.import_module("peft")
    try:
        model: PreTrainedModel = peft.PeftModel.from_pretrained(base, str(files.root)).merge_and_unload()
    except Exception as error:  # of many types
        first_line = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"the adapter in {files.shown} cannot be merged into {base.name_or_path} ({first_line}); merge it by "
            "peft, and save the model."
        ) from error
    model.name_or_path = model.config._name_or_path = files.name
    vars(model.config).pop("_commit_hash", None)  # of the base, whose weights these are no more
    return model.eval()
