"""Publish a pair: a model repository whose `custom_generate` folder runs without this package installed."""

import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import RevisionNotFoundError
from transformers.utils import CHAT_TEMPLATE_DIR

from hf_specx.common.errors import require

from . import pair_source
from .cards import render
from .flatten import SOURCE, published_code
from .folders import INSIDE, check_repository
from .pair_config import CONFIG_NAME, PairConfig
from .saving import save


CODE = "custom_generate"
NEEDS = ("torch>=2.6", "transformers>=5.17", "transformers<6")  # as in pyproject.toml; one bound a line is read
SAVED = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.safetensors", "*.bin", "*.py")  # by `save`


def write_code(folder: Path, name: str, revision: str | None = None) -> None:
    """Write the `custom_generate` folder of a pair.

    Args:
        folder: the pair's; `custom_generate` is made in it.
        name: where the code will look for the pair: an id on the Hub, or a folder.
        revision: the commit of its models; None for a folder.
    """
    code = folder / CODE
    code.mkdir()
    source = f'"""{pair_source.__doc__}"""\n\nPAIR = {name!r}\nREVISION = {revision!r}\n'
    for module, text in (published_code() | {SOURCE: source}).items():
        (code / f"{module}.py").write_text(text, encoding="utf-8")
    (code / "requirements.txt").write_text("".join(f"{bound}\n" for bound in NEEDS), encoding="utf-8")


def write_repository(pair: Any, folder: str | Path, **options: Any) -> PairConfig:
    """Write all that `publish` would upload into a folder, to be used from there.

    Args:
        pair: a `DraftTargetPair`.
        folder: where; the code holds its path, so the folder cannot be moved.
        **options: of `save`.

    Returns:
        The config that was written.

    Raises:
        ValueError: as `save`.
    """
    path = Path(folder).absolute()

    def finish(new: Path, config: PairConfig) -> None:
        _write_card(new, config, str(path), path.name)
        write_code(new, str(path))

    return save(pair, path, finish=finish, **options)


def _write_card(folder: Path, config: PairConfig, name: str, title: str) -> None:
    (folder / "README.md").write_text(render(config, name, published=True, title=title), encoding="utf-8")


def _is_saved(name: str) -> bool:
    """Whether a file of a repository may belong to an earlier pair: at the root, in `draft/`, or a chat template."""
    folder, _, last = name.rpartition("/")
    return folder in ("", "draft", CHAT_TEMPLATE_DIR) and any(fnmatch(last, pattern) for pattern in SAVED)


def publish(
    pair: Any,
    repo_id: str,
    *,
    target: str = INSIDE,
    draft: str = INSIDE,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str = "Draft-target pair",
) -> str:
    """Upload a pair and the code to use it, in two commits, since the code names the commit of the models.

    Of an earlier pair there, files of the kinds in `SAVED` that are at the root or in `draft/`, and code in
    `custom_generate/`, are deleted if this pair has none of their name.

    Args:
        pair: a `DraftTargetPair`.
        repo_id: "owner/name"; made if it does not exist.
        target, draft: "inside" (the default) or "reference", as for `save`.
        private, token: as in `HfApi.create_repo`.
        revision: a branch, made if it does not exist; None is the main one.
        commit_message: of the first commit.

    Returns:
        The second commit.

    Raises:
        ValueError: as `save`; or `repo_id` cannot be the name of a repository, or it, or this branch of it, has such
            files and is no pair.
        ConnectionError: the Hub cannot be reached.
    """
    check_repository(repo_id)
    api = HfApi(token=token)
    try:
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work) / "pair"
            config = save(pair, folder, target=target, draft=draft)
            _write_card(folder, config, repo_id, repo_id)
            api.create_repo(repo_id, private=private, exist_ok=True)
            return _upload(api, folder, {"repo_id": repo_id, "revision": revision}, commit_message)
    except Exception as error:
        if not _is_offline(error):
            raise
        told = f"{repo_id!r} was not published: the Hub cannot be reached ({error}); try again with a network."
        raise ConnectionError(told) from error


def _is_offline(error: Exception) -> bool:
    """Whether nothing answered, told by the error's name: the Hub's client has changed the library under it."""
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def _upload(api: HfApi, folder: Path, to: dict[str, Any], commit_message: str) -> str:
    """Upload a pair's folder, then the code, which names the first commit; returns the second."""
    there = _files(api, **to)
    stale = sorted(filter(_is_saved, there))
    taken = stale + [name for name in there if name.startswith(f"{CODE}/")]
    told = f"{to['repo_id']} is no pair, and has {taken[:3]}, which a pair would replace; name another repository."
    require(CONFIG_NAME in there or not taken, told)
    if to["revision"] is not None:
        api.create_branch(to["repo_id"], branch=to["revision"], exist_ok=True)
    models = api.upload_folder(folder_path=folder, commit_message=commit_message, delete_patterns=stale, **to)
    write_code(folder, to["repo_id"], models.oid)
    return api.upload_folder(
        folder_path=folder / CODE,
        path_in_repo=CODE,
        commit_message=f"Code for the models of {models.oid[:7]}",
        delete_patterns=["*.py"],
        **to,
    ).oid


def _files(api: HfApi, repo_id: str, revision: str | None) -> list[str]:
    """Those of a branch; a branch that is still to be made begins with those of the main one."""
    try:
        return api.list_repo_files(repo_id, revision=revision)
    except RevisionNotFoundError:
        return api.list_repo_files(repo_id)
