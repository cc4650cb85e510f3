"""Drafts that are given by a name: what its files say is loaded, a head or a model."""

import json
import re
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from hf_specx.common.checkpoints import find_file, read_config
from hf_specx.common.devices import last_device
from hf_specx.common.drafts import check_head, read_draft, split_revision
from hf_specx.common.errors import require
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.suffix import SuffixDraft

from .head import DraftHead
from .reading import is_head


AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
NO_ADAPTERS = {"subfolder": "none", "local_files_only": True}  # where transformers looks for one if peft is installed
KERNEL = re.compile(r'"_?\w*_implementation": "[^"]*[/:]')  # a repository whose code would be run
LOADED: WeakKeyDictionary[PreTrainedModel, dict[str, Any]] = WeakKeyDictionary()  # drafts by name, for each target


def weightless_draft(name: str) -> SuffixDraft | EarlyExitDraft | None:
    """`SuffixDraft()` for "suffix", `EarlyExitDraft(4)` for "exit:4"; None for the name of a model."""
    draft = read_draft(name)
    if draft.model is not None:
        return None
    return SuffixDraft() if draft.layers is None else EarlyExitDraft(draft.layers)


def read_names(draft: Any) -> Any:
    """A draft, or a list of drafts, with those of names that stand for no files; folders are what they are."""
    if isinstance(draft, list | tuple):
        return [read_names(part) for part in draft]
    if not isinstance(draft, str) or Path(draft).is_dir():
        return draft
    return weightless_draft(draft) or draft


def loaded(draft: Any, target: PreTrainedModel) -> Any:
    """A draft, or a list of drafts, with those that are names loaded for a target, once for each."""
    if isinstance(draft, list | tuple):
        return [loaded(part, target) for part in draft]
    if not isinstance(draft, str | Path):
        return draft
    known = LOADED.setdefault(target, {})
    if str(draft) not in known:
        name = draft if Path(draft).is_dir() else read_draft(str(draft)).model or draft
        found = load_draft(str(name), target)
        check_head(str(draft), found)
        known[str(draft)] = found
    return known[str(draft)]


def load_draft(name: str, target: PreTrainedModel) -> PreTrainedModel:
    """A head or a model from a folder or the Hub, as of an "@" and a revision; in the precision of its files.

    No code of theirs is run.

    Raises:
        ValueError: the files are neither, are ambiguous, bring code, or are a head for another target.
    """
    name, revision = split_revision(name)
    told = f"draft_model={name!r} is a pair; give its draft, as {name}/draft, or load it by DraftTargetPair."
    require(find_file(name, "specx_config.json", revision=revision) is None, f"{told}from_pretrained.")
    raw = read_config(name, revision=revision)
    if is_head(name, raw, revision=revision):
        return DraftHead.from_pretrained(name, target=target, revision=revision)
    told = f"the config of {name!r} names code for parts of the model, which is not run; load the model yourself if "
    require(KERNEL.search(json.dumps(raw)) is None, f"{told}you trust it, and give the model.")
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        loader: Any = next(auto for auto in AUTO_CLASSES if type(config) in auto._model_mapping)
        options = {"dtype": "auto", "use_safetensors": True, "trust_remote_code": False, "revision": revision}
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "adapter_kwargs": NO_ADAPTERS}
        model, seen = loader.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        told = f"draft_model={name!r} is no draft head, and cannot be loaded as a model that generates text, in "
        raise ValueError(f"{told}safetensors and without code of its own ({error}); load it yourself.") from error
    lacking = sorted(map(str, [*seen["missing_keys"], *seen["mismatched_keys"]]))
    told = f"{name!r} lacks {len(lacking)} of the model's weights, {min(lacking, default='')!r} among them; "
    require(not lacking, f"{told}get it again.")
    return model.eval().to(last_device(target))
