"""Publish a pair: a model repository whose `custom_generate` folder runs without this package installed."""

import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers.utils import CHAT_TEMPLATE_DIR

from hf_specx.common.errors import require
from hf_specx.pair_files import pair_source
from hf_specx.pair_files.pair_config import PairConfig
from hf_specx.pair_files.schema import HUB_ID

from .cards import render
from .flatten import SOURCE, published_code
from .saving import INSIDE, save


CODE = "custom_generate"
NEEDS = {"torch": "2.6", "transformers": "5.17"}  # the lowest versions, as in pyproject.toml
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
    needs = "".join(f"{package}>={lowest}\n" for package, lowest in NEEDS.items())
    (code / "requirements.txt").write_text(needs, encoding="utf-8")


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
        _write_card(new, config, path.name)
        write_code(new, str(path))

    return save(pair, path, finish=finish, **options)


def _write_card(folder: Path, config: PairConfig, name: str) -> None:
    (folder / "README.md").write_text(render(config, name, published=True), encoding="utf-8")


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
        ValueError: as `save`, and if `repo_id` cannot be the name of a repository.
    """
    named = HUB_ID.fullmatch(repo_id) and "/" in repo_id
    require(bool(named), f"repo_id={repo_id!r} is no name of a repository; give 'owner/name'.")
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "pair"
        config = save(pair, folder, target=target, draft=draft)
        _write_card(folder, config, repo_id)
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        to: dict[str, Any] = {"repo_id": repo_id, "revision": revision}
        stale = [name for name in api.list_repo_files(repo_id, revision=revision) if _is_saved(name)]
        models = api.upload_folder(folder_path=folder, commit_message=commit_message, delete_patterns=stale, **to)
        write_code(folder, repo_id, models.oid)
        return api.upload_folder(
            folder_path=folder / CODE,
            path_in_repo=CODE,
            commit_message=f"Code for the models of {models.oid[:7]}",
            delete_patterns=["*.py"],
            **to,
        ).oid
