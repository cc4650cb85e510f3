"""Drafts that are given by a name: a name that needs no files, or a repository or folder with a head or a model."""

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hf_specx.common.checkpoints import Files, find_file, read_config
from hf_specx.common.devices import last_device
from hf_specx.common.drafts import DRAFT_FOLDER, PAIR_CONFIG_NAME, check_head, read_draft, split_revision
from hf_specx.common.errors import require
from hf_specx.common.load_model import load_model
from hf_specx.common.model_files import check_layers, check_links, check_model, check_weights, shards
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.suffix import SuffixDraft

from .detect_head import ASSISTANTS, is_head
from .gemma4 import AssistantDraft
from .head import DraftHead


MODEL_FILES = ("generation_config.json", SAFE_WEIGHTS_INDEX_NAME)  # beside config and weights
LOADED: WeakKeyDictionary[PreTrainedModel, dict[str, Any]] = WeakKeyDictionary()  # drafts by name, for each target


def weightless_draft(name: str) -> SuffixDraft | EarlyExitDraft | None:
    """`SuffixDraft()` for "suffix", `EarlyExitDraft(4)` for "exit:4"; None for the name of a model."""
    draft = read_draft(name)
    if draft.model is not None:
        return None
    return SuffixDraft() if draft.layers is None else EarlyExitDraft(draft.layers)


def with_weightless_drafts(draft: Any) -> Any:
    """A draft, or a list of drafts, with `weightless_draft` in place of the names that stand for one.

    The names of folders and of models stay.
    """
    if isinstance(draft, list | tuple):
        return [with_weightless_drafts(part) for part in draft]
    if not isinstance(draft, str) or Path(draft).is_dir():
        return draft
    return weightless_draft(draft) or draft


def with_loaded_drafts(draft: Any, target: PreTrainedModel) -> Any:
    """A draft, or a list of drafts, with the head or model of each name, loaded once for a target."""
    if isinstance(draft, list | tuple):
        return [with_loaded_drafts(part, target) for part in draft]
    if not isinstance(draft, str | Path):
        return draft
    drafts_by_name = LOADED.setdefault(target, {})
    if str(draft) not in drafts_by_name:
        name = draft if Path(draft).is_dir() else read_draft(str(draft)).model or draft
        model = load_draft(str(name), target)
        check_head(str(draft), model)
        drafts_by_name[str(draft)] = model
    return drafts_by_name[str(draft)]


def with_assistant_drafts(draft: Any) -> Any:
    """A draft, or a list of drafts, with assistants of Gemma 4 as drafts that read the target's keys."""
    if isinstance(draft, list | tuple):
        return [with_assistant_drafts(part) for part in draft]
    is_model = isinstance(draft, PreTrainedModel)
    return AssistantDraft(draft) if is_model and draft.config.model_type in ASSISTANTS else draft


def load_draft(name: str, target: PreTrainedModel) -> PreTrainedModel:
    """A head or a model from a folder or the Hub, as of an "@" and a revision; in the precision of its files.

    No code of theirs is run, and all files are of one commit.

    Raises:
        ValueError: the files are neither, are ambiguous, bring code, or are a head for another target.
    """
    name, revision = split_revision(name)
    require(
        find_file(name, PAIR_CONFIG_NAME, revision=revision) is None,
        f"draft_model={name!r} is a pair; give its draft, as {name}/{DRAFT_FOLDER}, or load it by "
        "DraftTargetPair.from_pretrained.",
    )
    read_config(name, revision=revision)  # raises where there is none
    path = find_file(name, "config.json", revision=revision)
    assert path is not None
    commit = None if Path(name).is_dir() else path.parent.name
    if is_head(name, read_config(path.parent), revision=commit):
        return DraftHead.from_pretrained(name, target=target, revision=commit)
    files = Files(name, commit, path.parent)
    try:
        for file in MODEL_FILES:
            find_file(name, file, revision=commit)
        for shard in shards(files.folder):
            find_file(name, shard, revision=commit)
        check_links(files.root, files.folder)
        check_model(files.folder, trust_remote_code=False, pinned=False)
        check_weights(files.folder)
        check_layers(files.folder)
        model: Any = load_model(files, trust_remote_code=False, dtype="auto")
    except (OSError, ValueError, KeyError) as error:
        message = (
            f"draft_model={name!r} is no draft head, and cannot be loaded as a model that generates text, in "
            f"safetensors and without code of its own ({str(error).rstrip('.')}); load it yourself."
        )
        raise ValueError(message) from error
    return model.to(last_device(target))
