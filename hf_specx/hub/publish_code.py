"""The code that a repository carries in `custom_generate/`, of a pair or without models; how it is renewed.

transformers runs it for `custom_generate="owner/name"`, with nothing of this package installed. In a repository
without models it serves any target, with a draft that the call brings.
"""

import ast
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import RevisionNotFoundError

from hf_specx.common.drafts import HUB_ID, PAIR_CONFIG_NAME, check_model_name, split_revision
from hf_specx.common.errors import require
from hf_specx.common.model_files import FULL_COMMIT

from . import pair_source
from .flatten import PAIR_SOURCE, code_version, kind_of_draft, published_code
from .folders import check_repository


CODE_FOLDER = "custom_generate"
# as in pyproject.toml; transformers reads one bound of a version a line
REQUIREMENTS = ("torch>=2.6", "transformers>=5.17", "transformers<6")
CARD, LICENSE = "README.md", Path(__file__).with_name("LICENSE")
CODE_CARD_TEMPLATE = Path(__file__).with_name("code_card.md.jinja")
PAIR_SOURCE_FILE = f"{CODE_FOLDER}/{PAIR_SOURCE}.py"  # by which code of ours is told from that of others
Branch = dict[str, Any]  # `repo_id` and perhaps `revision`, as arguments of `HfApi`
PAIR_SOURCE_FIELDS = ("PAIR", "REVISION", "VERSION")
CODE_CARD_MARKER = "# Speculative sampling for any two models"  # in the card of each repository of code


def write_code(
    folder: Path, repo_id: str | None = None, revision: str | None = None, draft: str | None = None
) -> None:
    """Write the folder `custom_generate` into a folder, which may have a pair in it.

    Args:
        folder: of the pair, or empty.
        repo_id, revision: where the pair's models are on the Hub; None for a pair that stays in its folder, or for no
            pair.
        draft: which drafts the code is for, as `published_code` takes it; None is that of the pair in the folder, or
            any where no pair is.
    """
    code = folder / CODE_FOLDER
    code.mkdir()
    values = dict(zip(PAIR_SOURCE_FIELDS, (repo_id, revision, code_version()), strict=True))
    source = f'"""{pair_source.__doc__}"""\n\n'
    source += "".join(f"{name} = {value!r}\n" for name, value in values.items())
    for module, text in (published_code(draft or kind_of_draft(folder)) | {PAIR_SOURCE: source}).items():
        (code / f"{module}.py").write_text(text, encoding="utf-8")
    (code / "requirements.txt").write_text("".join(f"{bound}\n" for bound in REQUIREMENTS), encoding="utf-8")
    shutil.copyfile(LICENSE, code / LICENSE.name)


def write_code_repository(folder: str | Path, name: str | None = None) -> None:
    """Write a repository of code without models into a folder; its card calls it by this name, or that of the folder.

    Raises:
        ValueError: the folder has something in it.
    """
    folder = Path(folder)
    require(
        not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
        f"{folder} is there already; name another folder, or renew the code in it by specx publish --code-only "
        f"{shlex.quote(str(folder))}.",
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_code(folder)
    (folder / CARD).write_text(_code_card(name or folder.absolute().name), encoding="utf-8")


def publish_code(
    repo_id: str, *, private: bool | None = None, token: str | bool | None = None, revision: str | None = None
) -> str:
    """Upload code without models: `custom_generate=repo_id` then serves any target with any `assistant_model=`.

    Args:
        repo_id: "owner/name"; made if it does not exist.
        private: whether it is made private; one that is there has to be so already.
        token: as in `HfApi`.
        revision: a branch, made if it does not exist; None is the main one.

    Returns:
        The commit.

    Raises:
        ValueError: the repository is a pair, or has other code in `custom_generate/`; or it is public and not
            `private`, or the other way round.
        ConnectionError: the Hub cannot be reached.
    """
    check_repository(repo_id)
    api = HfApi(token=token)
    with reaching_hub(repo_id), tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "code"
        write_code_repository(folder, repo_id)
        make_repository(api, repo_id, private)
        branch: Branch = {"repo_id": repo_id, "revision": revision}
        files, listed_branch = list_files(api, branch)
        require(
            PAIR_CONFIG_NAME not in files,
            f"{repo_id} is a pair; renew its code by specx publish --code-only {repo_id}, or name another one.",
        )
        code_files = [file for file in files if file.startswith(f"{CODE_FOLDER}/")]
        require(
            PAIR_SOURCE_FILE in files or not code_files,
            f"{repo_id} has other code, {code_files[:3]}, which this would replace; name another repository.",
        )
        keep_card_of_others(api, folder, files, listed_branch, CODE_CARD_MARKER)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        message = f"Code of hf_specx {code_version()}"
        stale = [f"{CODE_FOLDER}/*.py"]
        return api.upload_folder(folder_path=folder, commit_message=message, delete_patterns=stale, **branch).oid


def renew_code(name: str, token: str | bool | None = None) -> tuple[str | None, str]:
    """Replace the code that a published pair or a repository of code carries by that of this package.

    Nothing else of it changes: the new code names the same pair and commit as the old.

    Args:
        name: a folder, or an id on the Hub, perhaps with @ and a branch.
        token: as in `HfApi`.

    Returns:
        The version of the code that was there, None if it does not say so, and the commit, "" of a folder.

    Raises:
        ValueError: there is no code of ours.
        ConnectionError: the Hub cannot be reached.
    """
    repo_id, revision = split_revision(name)
    check_model_name(repo_id, revision)
    no_code = (
        f"{name} has no code of hf_specx (no {PAIR_SOURCE_FILE}) that could be renewed; publish a pair by specx "
        "publish PAIR owner/name, or code without models by specx publish --code owner/name."
    )
    folder = Path(repo_id)
    if folder.is_dir():
        require((folder / PAIR_SOURCE_FILE).is_file(), no_code)
        return _renew_in_folder(folder), ""
    check_repository(repo_id)
    api = HfApi(token=token)
    branch: Branch = {"repo_id": repo_id, "revision": revision}
    with reaching_hub(repo_id, "renewed"):
        files = api.list_repo_files(**branch)
        require(PAIR_SOURCE_FILE in files, no_code)
        return _renew_on_hub(api, branch, files, name)


def _renew_in_folder(folder: Path) -> str | None:
    """Replace the code in a folder; returns the version of the code that was there."""
    path = folder / PAIR_SOURCE_FILE
    earlier = read_source(path.read_text(encoding="utf-8"), str(path))
    with tempfile.TemporaryDirectory(prefix=f".{CODE_FOLDER}.", dir=folder) as work:
        write_code(Path(work), earlier["PAIR"], earlier["REVISION"], kind_of_draft(folder))
        put_in_place(Path(work) / CODE_FOLDER, folder / CODE_FOLDER, Path(work) / "old")
    return earlier["VERSION"]


def _renew_on_hub(api: HfApi, branch: Branch, files: list[str], name: str) -> tuple[str | None, str]:
    """Replace the code on a branch that has these files; returns the version of that code, and the commit."""
    text = Path(api.hf_hub_download(filename=PAIR_SOURCE_FILE, **branch)).read_text(encoding="utf-8")
    earlier = read_source(text, f"{PAIR_SOURCE_FILE} of {name}")
    with tempfile.TemporaryDirectory() as work:
        if PAIR_CONFIG_NAME in files:  # which says for which drafts the code is
            shutil.copyfile(api.hf_hub_download(filename=PAIR_CONFIG_NAME, **branch), Path(work) / PAIR_CONFIG_NAME)
        write_code(Path(work), earlier["PAIR"], earlier["REVISION"])
        message = f"Code of hf_specx {code_version()}"
        options: dict[str, Any] = {"path_in_repo": CODE_FOLDER, "commit_message": message, "delete_patterns": ["*.py"]}
        commit = api.upload_folder(folder_path=Path(work) / CODE_FOLDER, **options, **branch)
    return earlier["VERSION"], commit.oid


def read_source(text: str, where: str) -> dict[str, str | None]:
    """What published code names in `pair_source.py`: PAIR, REVISION and VERSION, each None where it names none.

    The file is read and not run; a ValueError for what no version of ours writes.
    """
    values: dict[str, str | None] = dict.fromkeys(PAIR_SOURCE_FIELDS)
    message = f"{where} is not as hf_specx writes it; publish the pair anew."
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(message) from error
    for node in body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        value = getattr(node.value, "value", "")
        is_name = node.targets[0].id in values and isinstance(node.value, ast.Constant)
        require(is_name and isinstance(value, str | None), message)
        values[node.targets[0].id] = value
    pair, revision = values["PAIR"], values["REVISION"]
    require(pair is None or HUB_ID.fullmatch(pair) is not None, message)
    require(revision is None or FULL_COMMIT.fullmatch(revision) is not None, message)
    return values


def put_in_place(new: Path, place: Path, old: Path) -> None:
    """Move a new folder to its place, and what was there to `old`; after an error all is as it was."""
    try:
        if place.exists():
            place.rename(old)
        new.rename(place)
    except BaseException:
        if old.exists():
            old.rename(place)
        raise


def list_files(api: HfApi, branch: Branch) -> tuple[list[str], Branch]:
    """The files of a branch, and the branch that has them: the main one, from which a new branch will be made."""
    try:
        return list(api.list_repo_files(**branch)), branch
    except RevisionNotFoundError:
        main_branch = {"repo_id": branch["repo_id"]}
        return list(api.list_repo_files(**main_branch)), main_branch


def keep_card_of_others(api: HfApi, folder: Path, files: list[str], branch: Branch, marker: str) -> None:
    """Take the card out of a folder to upload, with a warning, if the branch has a card without our marker."""
    if CARD not in files:
        return
    card = Path(api.hf_hub_download(filename=CARD, **branch)).read_text(errors="replace")
    if marker not in card:
        warnings.warn(
            f"the {CARD} of {branch['repo_id']} was not written by specx publish, so it stays as it is; delete it "
            "there and publish again to have the model card.",
            UserWarning,
            stacklevel=5,
        )
        (folder / CARD).unlink()


def make_repository(api: HfApi, repo_id: str, private: bool | None) -> None:
    """Make a repository if it is not there; a ValueError for one that is there and is not as private as was said."""
    api.create_repo(repo_id, private=private, exist_ok=True)
    is_private = bool(api.repo_info(repo_id).private)
    require(
        private in (None, is_private),
        f"{repo_id} is there already and is {'private' if is_private else 'public'}, which private={private} does "
        "not change; leave it out, change that in its settings on the Hub, or name another repository.",
    )


@contextmanager
def reaching_hub(repo_id: str, done: str = "published") -> Iterator[None]:
    """Raise a ConnectionError, which says what was not done to the repository, if the Hub cannot be reached."""
    try:
        yield
    except Exception as error:
        if not any(kind.__name__ == "TransportError" for kind in type(error).__mro__):  # whose library has changed
            raise
        message = f"{repo_id!r} was not {done}: the Hub cannot be reached ({error}); try again with a network."
        raise ConnectionError(message) from error


def _code_card(name: str) -> str:
    """The card of a repository of code, as it is called by this name."""
    tags = ["custom_generate", "speculative-decoding"]
    data = ModelCardData(library_name="transformers", tags=tags, license="apache-2.0")
    card = ModelCard.from_template(data, str(CODE_CARD_TEMPLATE), name=name)
    return f"{card.content}\n"
