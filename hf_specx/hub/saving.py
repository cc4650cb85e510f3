"""Write a pair into a folder: all of it, or nothing."""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_specx.common.errors import require
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.suffix import SuffixDraft

from .exit_head import HEAD_NAME
from .facts import draft_tokenizer_facts, model_facts, tokenizer_facts
from .fetch import fingerprint
from .folders import INSIDE, REFERENCE, check_folder, without_folders
from .pair_config import CONFIG_NAME, ModelSource, PairConfig, WeightlessDraft


OF_FILES = ("name", "revision", "subfolder", "dtype", "fingerprint")  # what cannot be read from a loaded model
SUBFOLDERS = {"target": "", "draft": "draft"}


def save(
    pair: Any,
    folder: str | Path,
    *,
    target: str = INSIDE,
    draft: str = INSIDE,
    overwrite: bool = False,
    finish: Callable[[Path, PairConfig], object] = lambda folder, config: None,
) -> PairConfig:
    """Write a pair, and return the config that was written.

    It is written into a temporary folder, which is then renamed, so that nobody sees it half written.

    Args:
        pair: a `DraftTargetPair`.
        folder: where; must be empty or not exist.
        target, draft: "inside" (the default), or "reference" to the id and commit that it was loaded from.
        overwrite: whether to replace the folder of another pair, with all that is in it.
        finish: called with the temporary folder and the config, to write further files.

    Raises:
        ValueError: the folder is in use (by no pair, with `overwrite`), or a model is to be a reference and
            is not from the Hub.
    """
    folder = Path(folder).resolve()
    check_folder(folder, overwrite)
    _check_draft(pair.draft, draft)
    sources = {role: _source(pair, role, where) for role, where in (("target", target), ("draft", draft))}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as work:
        new, old = Path(work) / "new", Path(work) / "old"
        new.mkdir()
        config = _write(pair, new, sources)
        finish(new, config)
        try:
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
    return config


def _check_draft(draft: Any, where: str) -> None:
    """Whether a draft can be saved; one without weights is but numbers, and a pool's texts are its user's own."""
    kind = type(draft).__name__
    known = isinstance(draft, PreTrainedModel | WeightlessDraft)
    kinds = "a model, a SuffixDraft or an EarlyExitDraft"
    require(known, f"a pair is saved with {kinds}, and its draft is a {kind}; give one of these.")
    if isinstance(draft, WeightlessDraft):
        require(where != REFERENCE, f"draft={where!r} is for models, and {kind} has no files; leave it out.")
    if isinstance(draft, SuffixDraft):
        told = "a pool of texts is not saved with a pair; use SuffixDraft without it, and pool.save for the texts."
        require(draft.pool is None, told)
    head = _head_of(draft)
    told = f"a pair is saved with a square torch.nn.Linear as the head of its EarlyExitDraft, and this one is {head}"
    known = head is None or (type(head) is torch.nn.Linear and head.in_features == head.out_features)
    require(known, f"{told}; use such a head, or keep this one apart.")  # tensors alone run no code when loaded


def _head_of(draft: Any) -> Any:
    return draft.head if isinstance(draft, EarlyExitDraft) else None


def _source(pair: Any, role: str, where: str) -> ModelSource | None:
    """A reference to a model; None if it is to be saved inside the pair."""
    known = where in (INSIDE, REFERENCE)
    require(known, f"{role}={where!r} is unknown; save the {role} {INSIDE!r} or by {REFERENCE!r}.")
    model, source = getattr(pair, role), pair.sources[role]
    if where == INSIDE or not isinstance(model, PreTrainedModel):
        return None
    found = model_facts(model)
    if source is not None and source.name is not None:
        found = replace(found, **{name: getattr(source, name) for name in OF_FILES})
    origin = f"loaded from {str(model.name_or_path)!r}" if model.name_or_path else "made here"
    require(
        found.name is not None,
        f"the {role} was {origin}, which is no repository on the Hub or not known at which commit; save it with "
        f"{role}='inside', or load the pair with DraftTargetPair.from_pretrained, which notes the commit.",
    )
    return found


def _write(pair: Any, folder: Path, sources: dict[str, ModelSource | None]) -> PairConfig:
    """Write the models that are inside, the tokenizers and the config; returns the config."""
    config: PairConfig = copy.deepcopy(pair.config)
    config.set_draft(pair.draft if isinstance(pair.draft, WeightlessDraft) else None)
    config.measurements = [replace(m, command=without_folders(m.command)) for m in config.measurements]
    config.target = sources["target"] or _write_model(pair.target, folder, SUBFOLDERS["target"])
    head = _head_of(pair.draft)
    if head is not None:
        tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
        save_file(tensors, folder / HEAD_NAME, metadata={"format": "pt"})
    config.draft_tokenizer = None
    if isinstance(pair.draft, PreTrainedModel):
        config.draft = sources["draft"] or _write_model(pair.draft, folder, SUBFOLDERS["draft"])
        models = pair.target, pair.draft
        config.draft_tokenizer = draft_tokenizer_facts(pair.tokenizer, pair.draft_tokenizer, *models)
        if config.draft_tokenizer is not None and sources["draft"] is None:
            pair.draft_tokenizer.save_pretrained(folder / SUBFOLDERS["draft"])
    if pair.tokenizer is None:
        config.tokenizers = None
    else:
        pair.tokenizer.save_pretrained(folder)
        found, known = tokenizer_facts(pair.tokenizer, pair.draft_tokenizer), config.tokenizers
        if known is None or found.method == "own" or replace(known, method=found.method) != found:
            config.tokenizers = found
    text = config.to_text()
    PairConfig.from_text(text.encode(), CONFIG_NAME)  # what could not be read again is not saved
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
    return config


def _write_model(model: PreTrainedModel, folder: Path, subfolder: str) -> ModelSource:
    """Write a model into a subfolder of the pair; returns where it is."""
    model.save_pretrained(folder / subfolder)
    found = replace(model_facts(model), fingerprint=fingerprint(folder / subfolder))
    return replace(found, name=None, revision=None, subfolder=subfolder)
