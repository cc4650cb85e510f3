"""Write a pair into a folder, all of it or nothing; or publish it, as a repository that runs without this package."""

import copy
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils import (
    CHAT_TEMPLATE_DIR,
    FEATURE_EXTRACTOR_NAME,
    PROCESSOR_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    VIDEO_PROCESSOR_NAME,
)

from hf_specx.common.checkpoints import Files
from hf_specx.common.drafts import DRAFT_FOLDER, PAIR_CONFIG_NAME
from hf_specx.common.errors import require
from hf_specx.common.model_files import shards
from hf_specx.common.wrappers import has_adapters, label_of
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.suffix import SuffixDraft

from .cards import render
from .facts import draft_tokenizer_facts, model_facts, tokenizer_facts
from .fetch import SMALL_FILES, fingerprint, get_pair, get_settings, get_tokenizer
from .folders import INSIDE, PAIR_CARD_MARKER, REFERENCE, check_folder, check_repository, without_folders
from .pair_config import SLOWER, ModelSource, PairConfig, WeightlessDraft
from .pair_models import HEAD_NAME, FoundModel, find_model
from .publish_code import (
    CARD,
    CODE_FOLDER,
    Branch,
    keep_card_of_others,
    list_files,
    make_repository,
    put_in_place,
    reaching_hub,
    write_code,
)
from .references import why_not_there


MESSAGE = "Draft-target pair"
FILES_BESIDE_WEIGHTS = ("config.json", "generation_config.json", SAFE_WEIGHTS_INDEX_NAME)
PROCESSOR_FILES = (PROCESSOR_NAME, FEATURE_EXTRACTOR_NAME, VIDEO_PROCESSOR_NAME)
WritePair = Callable[[Path], PairConfig]  # writes models, tokenizers and config into an empty folder
SAVED = (*SMALL_FILES, "*.safetensors", "*.bin", "*.py")  # by `save`
SOURCE_FIELDS = ("name", "revision", "subfolder", "dtype", "fingerprint")  # what cannot be read from a loaded model


def save(
    pair: Any,
    folder: str | Path,
    *,
    target: str = INSIDE,
    draft: str = INSIDE,
    overwrite: bool = False,
    with_code: bool = False,
) -> None:
    """Write the pair into a folder: all of it or nothing, in safetensors, with the target at its root.

    Args:
        folder: where; must be empty or not exist.
        target, draft: "inside" (the default), or "reference" to the id and commit that it was loaded from; its files
            have to be here still, since it is compared with them.
        overwrite: whether to replace the folder of another pair, with all that is in it.
        with_code: whether to write all that `publish` would upload, to be used from there: also the card, and the code
            to use the pair.

    Raises:
        ValueError: the folder is in use (by no pair, with `overwrite`), the draft cannot be saved, or a model is to be
            a reference and is not from the Hub, or was changed since.
    """
    check_folder(Path(folder).resolve(), overwrite)
    write_folder(loaded_pair(pair, target, draft), folder, overwrite, with_code)


def loaded_pair(pair: Any, target: str = INSIDE, draft: str = INSIDE) -> WritePair:
    """A function that writes a loaded pair into a folder, each model inside or by reference.

    Raises ValueError for what cannot be saved.
    """
    sources = {"target": _source(pair, "target", target), "draft": _source(pair, "draft", draft)}
    _check_draft(pair.draft, draft)
    for model in pair.models:
        require(
            not has_adapters(model),
            f"{label_of(model)} has adapters of PEFT, which a pair does not save; make the pair of what its "
            "merge_and_unload() gives.",
        )
    return partial(_write, pair, sources)


def pair_as_it_is(name: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> WritePair:
    """A function that copies a saved pair into a folder; its files are checked, and no weight is loaded.

    A model that is named by its id stays so, and its weights are not needed.
    """
    files, config = get_pair(name, revision)
    models: dict[str, FoundModel] = {}
    for role in ("target", "draft"):
        source: ModelSource = getattr(config, role)
        if source.name is None:
            models[role] = find_model(files, config, role, {}, trust_remote_code, True)
        else:
            get_settings(files, source, trust_remote_code)
    return partial(_copy, files, config, models, trust_remote_code)


def write_folder(write: WritePair, folder: str | Path, overwrite: bool = False, with_code: bool = False) -> None:
    """Write a pair into a folder that `check_folder` has allowed, all of it or nothing."""
    name = Path(folder).absolute().name
    folder = Path(folder).resolve()  # of a link, which stays one
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as work:
        new, old = Path(work) / "new", Path(work) / "old"
        new.mkdir()
        config = write(new)
        if with_code:
            warn_of_slower(config)
            (new / CARD).write_text(render(config, name, published=True), encoding="utf-8")
            write_code(new)
        put_in_place(new, folder, old)


def _check_draft(draft: Any, where: str) -> None:
    """Raise ValueError unless a draft can be saved; of one without weights its numbers are, and no pool of texts."""
    kind, kinds = type(draft).__name__, "a model, a SuffixDraft or an EarlyExitDraft"
    is_kind = isinstance(draft, PreTrainedModel | WeightlessDraft)
    require(is_kind, f"a pair is saved with {kinds}, and its draft is a {kind}; give one of these.")
    if isinstance(draft, WeightlessDraft):
        require(where != REFERENCE, f"draft={where!r} is for models, and {kind} has no files; leave it out.")
    require(
        not isinstance(draft, SuffixDraft) or draft.pool is None,
        "a pool of texts is not saved with a pair; use SuffixDraft without it, and pool.save for the texts.",
    )
    head = _head_of(draft)
    if head is not None:
        is_linear = type(head) is torch.nn.Linear and head.in_features == head.out_features  # loading it runs no code
        require(
            is_linear,
            "a pair is saved with a square torch.nn.Linear as the head of its EarlyExitDraft, and this one is "
            f"{head}; use such a head, or keep this one apart.",
        )


def _head_of(draft: Any) -> Any:
    """The head of an early exit; None of any other draft."""
    return draft.head if isinstance(draft, EarlyExitDraft) else None


def reference_to(pair: Any, role: str) -> tuple[ModelSource, str]:
    """The entry of a config that refers to a model of a pair, and why it may not be used; empty if it may."""
    model, source = getattr(pair, role), pair.sources[role]
    reference = model_facts(model)
    if source is not None and source.name is not None:
        reference = replace(reference, **{name: getattr(source, name) for name in SOURCE_FIELDS})
    if reference.name is None:
        origin = f"loaded from {str(model.name_or_path)!r}" if model.name_or_path else "made here"
        return reference, f"was {origin}, which is no repository on the Hub or not known at which commit"
    why = why_not_there(model, reference, pair.target, pair.cache_dir)
    return reference, f"is not shown to be {reference.name} at {reference.revision}: {why}" if why else ""


def _source(pair: Any, role: str, where: str) -> ModelSource | None:
    """A reference to a model; None if it is to be saved inside the pair."""
    is_option = where in (INSIDE, REFERENCE)
    require(is_option, f"{role}={where!r} is unknown; save the {role} {INSIDE!r} or by {REFERENCE!r}.")
    if where == INSIDE or not isinstance(getattr(pair, role), PreTrainedModel):
        return None
    reference, why = reference_to(pair, role)
    remedy = (
        f"save it with {role}='inside', or load the pair with DraftTargetPair.from_pretrained and leave it as it is"
    )
    require(not why, f"the {role} {why}; {remedy}.")
    return reference


def _write(pair: Any, sources: dict[str, ModelSource | None], folder: Path) -> PairConfig:
    """Write those models that are to be inside, the tokenizers and the config; returns the config."""
    config: PairConfig = copy.deepcopy(pair.config)
    config.set_draft(pair.draft if isinstance(pair.draft, WeightlessDraft) else None)
    head = _head_of(pair.draft)
    if head is not None:
        tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
        save_file(tensors, folder / HEAD_NAME, metadata={"format": "pt"})
    config.draft_tokenizer = None
    if isinstance(pair.draft, PreTrainedModel):
        config.draft = sources["draft"] or _write_model(pair.draft, folder, DRAFT_FOLDER)
        config.draft_tokenizer = draft_tokenizer_facts(pair)
        if config.draft_tokenizer is not None and sources["draft"] is None:
            pair.draft_tokenizer.save_pretrained(folder / DRAFT_FOLDER)
    config.target = sources["target"] or _write_model(pair.target, folder)
    if config.processor and pair.processor is None:
        warnings.warn(
            "the pair was saved with a processor, and is saved without it; set pair.processor to what AutoProcessor "
            "loads from it.",
            UserWarning,
            stacklevel=4,
        )
    config.processor = pair.processor is not None
    if pair.processor is not None:
        pair.processor.save_pretrained(folder)
    if pair.tokenizer is None:
        config.tokenizers = None
    else:
        pair.tokenizer.save_pretrained(folder)
        facts, recorded = tokenizer_facts(pair.tokenizer, pair.draft_tokenizer), config.tokenizers
        if recorded is None or facts.method == "own" or replace(recorded, method=facts.method) != facts:
            config.tokenizers = facts
    return _write_config(config, folder)


def _write_model(model: PreTrainedModel, folder: Path, subfolder: str = "") -> ModelSource:
    """Write a model into a subfolder of the pair; returns where it is."""
    model.save_pretrained(folder / subfolder)
    facts = replace(model_facts(model), fingerprint=fingerprint(folder / subfolder))
    return replace(facts, name=None, revision=None, subfolder=subfolder)


def _copy(
    files: Files, config: PairConfig, models: dict[str, FoundModel], trust_remote_code: bool, folder: Path
) -> PairConfig:
    """Write the files of models that are inside, the tokenizers and the config; returns the config."""
    for role, subfolder in (("draft", DRAFT_FOLDER), ("target", "")):
        model = models.get(role)
        if model is not None and model.head is not None:
            shutil.copyfile(model.head, folder / HEAD_NAME)
        if model is None or model.files is None:
            continue
        (folder / subfolder).mkdir(exist_ok=True)
        for name in (*FILES_BESIDE_WEIGHTS, *shards(model.files.folder)):
            if (model.files.folder / name).is_file():
                shutil.copyfile(model.files.folder / name, folder / subfolder / name)
        setattr(config, role, replace(getattr(config, role), subfolder=subfolder))
        draft_tokenizer = get_tokenizer(model.files, config.draft_tokenizer, model.trusted) if subfolder else None
        if draft_tokenizer is not None and config.draft_tokenizer is not None:
            draft_tokenizer.save_pretrained(folder / subfolder)
    for name in PROCESSOR_FILES if config.processor else ():
        if (files.root / name).is_file():
            shutil.copyfile(files.root / name, folder / name)
    tokenizer = get_tokenizer(files, config.tokenizers, trust_remote_code)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return _write_config(config, folder)


def _write_config(config: PairConfig, folder: Path) -> PairConfig:
    """Write the config without folders of this machine; returns it."""
    config.measurements = [replace(m, command=without_folders(m.command)) for m in config.measurements]
    text = config.to_text()
    PairConfig.from_text(text.encode(), PAIR_CONFIG_NAME)  # what could not be read again is not saved
    (folder / PAIR_CONFIG_NAME).write_text(text, encoding="utf-8")
    return config


def publish(
    pair: Any,
    repo_id: str,
    *,
    target: str = INSIDE,
    draft: str = INSIDE,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = MESSAGE,
) -> str:
    """Upload the pair with its card and the code to use it without this package, in place of an earlier pair.

    There are two commits, since the code names that of the models. Of an earlier pair nothing is left that is of a
    kind in `SAVED` and at the root or in `draft/`, nor its code.

    Args:
        repo_id: "owner/name"; made if it does not exist.
        target, draft: "inside" (the default) or "reference", as for `save`.
        private: whether it is made private; one that is there has to be so already.
        token: as in `HfApi`.
        revision: a branch, made if it does not exist; None is the main one.
        commit_message: of the first commit.

    Returns:
        The second commit.

    Raises:
        ValueError: as `save`; or the repository or branch is no pair, and has files that a pair would replace, or it
            is public and not `private`, or the other way round.
        ConnectionError: the Hub cannot be reached.
    """
    check_repository(repo_id)
    return upload(loaded_pair(pair, target, draft), repo_id, private, token, revision, commit_message)


def upload(
    write: WritePair,
    repo_id: str,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = MESSAGE,
) -> str:
    """Publish the pair that `write` writes, as `publish` does; returns the second commit."""
    api = HfApi(token=token)
    with reaching_hub(repo_id), tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "pair"
        folder.mkdir()
        config = write(folder)
        warn_of_slower(config)
        (folder / CARD).write_text(render(config, repo_id, published=True), encoding="utf-8")
        make_repository(api, repo_id, private)
        return _upload(api, folder, {"repo_id": repo_id, "revision": revision}, commit_message)


def warn_of_slower(config: PairConfig) -> None:
    """Warn if a pair that is published was slower than plain `generate`."""
    if not config.pays:
        message = f"when this pair was measured, {SLOWER}; tune it with another draft, or where it will run."
        warnings.warn(message, UserWarning, stacklevel=3)


def _upload(api: HfApi, folder: Path, branch: Branch, commit_message: str) -> str:
    """Upload a pair's folder, then the code, which names the first commit; returns the second commit."""
    repo_id, revision = branch["repo_id"], branch["revision"]
    files, listed_branch = list_files(api, branch)
    stale = sorted(filter(_is_saved, files))
    replaced = stale + [file for file in files if file.startswith(f"{CODE_FOLDER}/")]
    require(
        PAIR_CONFIG_NAME in files or not replaced,
        f"{repo_id} is no pair, and has {replaced[:3]}, which a pair would replace; name another repository.",
    )
    keep_card_of_others(api, folder, files, listed_branch, PAIR_CARD_MARKER)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    models = api.upload_folder(folder_path=folder, commit_message=commit_message, delete_patterns=stale, **branch)
    write_code(folder, repo_id, models.oid)
    message = f"Code for the models of {models.oid[:7]}"
    options: dict[str, Any] = {"path_in_repo": CODE_FOLDER, "commit_message": message, "delete_patterns": ["*.py"]}
    return api.upload_folder(folder_path=folder / CODE_FOLDER, **options, **branch).oid


def _is_saved(name: str) -> bool:
    """Whether a file of a repository may belong to an earlier pair: at the root, in `draft/`, or a chat template."""
    folder, _, last = name.rpartition("/")
    return folder in ("", DRAFT_FOLDER, CHAT_TEMPLATE_DIR) and any(fnmatch(last, pattern) for pattern in SAVED)
