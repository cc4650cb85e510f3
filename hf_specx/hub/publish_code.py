"""The code that a repository carries in `custom_generate/`: of a pair, or alone for any two models; how it is renewed.

transformers runs it for `custom_generate="owner/name"`, with nothing of this package installed.
"""

import ast
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import RevisionNotFoundError

from hf_specx.common.drafts import HUB_ID, check_model_name, split_revision
from hf_specx.common.errors import require
from hf_specx.common.model_files import FULL_COMMIT

from . import pair_source
from .flatten import SOURCE, code_version, kind_of_draft, published_code
from .folders import OF_A_PAIR, check_repository


CODE = "custom_generate"
# as in pyproject.toml; transformers reads one bound of a version a line
NEEDS = ("torch>=2.6", "transformers>=5.17", "transformers<6")
CARD, LICENSE = "README.md", Path(__file__).with_name("LICENSE")
CARD_OF_CODE = Path(__file__).with_name("code_card.md.jinja")
SOURCE_FILE = f"{CODE}/{SOURCE}.py"  # by which code of ours is told from that of others
NAMED_IN_SOURCE = ("PAIR", "REVISION", "VERSION")
OF_CODE_CARD = "# Speculative sampling for any two models"  # in the card of each repository of code


def write_code(
    folder: Path, repo_id: str | None = None, revision: str | None = None, draft: str | None = None
) -> None:
    """Write the `custom_generate` folder of a pair with an id on the Hub and a commit; of one in a folder, or of no
    pair, without these.

    It is for such a `draft` as `published_code` takes; None is that of the pair in the folder, or any where none is.
    """
    code = folder / CODE
    code.mkdir()
    values = dict(zip(NAMED_IN_SOURCE, (repo_id, revision, code_version()), strict=True))
    source = f'"""{pair_source.__doc__}"""\n\n'
    source += "".join(f"{name} = {value!r}\n" for name, value in values.items())
    for module, text in (published_code(draft or kind_of_draft(folder)) | {SOURCE: source}).items():
        (code / f"{module}.py").write_text(text, encoding="utf-8")
    (code / "requirements.txt").write_text("".join(f"{bound}\n" for bound in NEEDS), encoding="utf-8")
    shutil.copyfile(LICENSE, code / LICENSE.name)


def write_code_alone(folder: str | Path, name: str | None = None) -> None:
    """Write a repository of the code alone, with a card that calls it by this name, into a folder that is empty or
    not there.

    Raises:
        ValueError: the folder has something in it.
    """
    folder = Path(folder)
    message = f"{folder} is there already; name another folder, or renew the code in it by specx publish --code-only."
    require(not folder.exists() or (folder.is_dir() and not any(folder.iterdir())), message)
    folder.mkdir(parents=True, exist_ok=True)
    write_code(folder)
    (folder / CARD).write_text(_code_card(name or folder.absolute().name), encoding="utf-8")


def publish_code(
    repo_id: str, *, private: bool | None = None, token: str | bool | None = None, revision: str | None = None
) -> str:
    """Upload the code alone: `custom_generate=repo_id` then serves any target, with `assistant_model=` a draft for it.

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
        write_code_alone(folder, repo_id)
        make_repository(api, repo_id, private)
        to: dict[str, Any] = {"repo_id": repo_id, "revision": revision}
        names, source = names_in(api, to)
        message = f"{repo_id} is a pair; renew its code by specx publish --code-only {repo_id}, or name another one."
        require(OF_A_PAIR not in names, message)
        others = [name for name in names if name.startswith(f"{CODE}/")]
        message = f"{repo_id} has other code, {others[:3]}, which this would replace; name another repository."
        require(SOURCE_FILE in names or not others, message)
        keep_card_of_others(api, folder, names, source, OF_CODE_CARD)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        message = f"Code of hf_specx {code_version()}"
        stale = [f"{CODE}/*.py"]
        return api.upload_folder(folder_path=folder, commit_message=message, delete_patterns=stale, **to).oid


def renew_code(name: str, token: str | bool | None = None) -> tuple[str | None, str]:
    """Put the code of this package in the place of that which a published pair carries, or a repository of code.

    Nothing else of it changes: the new code names the same pair and commit as the old.

    Args:
        name: a folder, or an id on the Hub, perhaps with @ and a branch.
        token: as in `HfApi`.

    Returns:
        The version that it was of, None for a version that did not say so, and the commit, "" of a folder.

    Raises:
        ValueError: there is no code of ours.
        ConnectionError: the Hub cannot be reached.
    """
    first, revision = split_revision(name)
    check_model_name(first, revision)
    folder = Path(first)
    message = f"{name} has no code of hf_specx (no {SOURCE_FILE}); publish the pair, as by specx publish PAIR --out "
    message += "FOLDER, or code alone by specx publish --code."
    if folder.is_dir():
        require((folder / SOURCE_FILE).is_file(), message)
        source = read_source((folder / SOURCE_FILE).read_text(encoding="utf-8"), str(folder / SOURCE_FILE))
        with tempfile.TemporaryDirectory(prefix=f".{CODE}.", dir=folder) as work:
            write_code(Path(work), source["PAIR"], source["REVISION"], kind_of_draft(folder))
            put_in_place(Path(work) / CODE, folder / CODE, Path(work) / "old")
        return source["VERSION"], ""
    check_repository(first)
    api = HfApi(token=token)
    to: dict[str, Any] = {"repo_id": first, "revision": revision}
    with reaching_hub(first), tempfile.TemporaryDirectory() as work:
        names = api.list_repo_files(**to)
        require(SOURCE_FILE in names, message)
        if OF_A_PAIR in names:
            shutil.copyfile(api.hf_hub_download(filename=OF_A_PAIR, **to), Path(work) / OF_A_PAIR)
        text = Path(api.hf_hub_download(filename=SOURCE_FILE, **to)).read_text(encoding="utf-8")
        source = read_source(text, f"{SOURCE_FILE} of {name}")
        write_code(Path(work), source["PAIR"], source["REVISION"])
        message = f"Code of hf_specx {code_version()}"
        options: dict[str, Any] = {"path_in_repo": CODE, "commit_message": message, "delete_patterns": ["*.py"]}
        return source["VERSION"], api.upload_folder(folder_path=Path(work) / CODE, **options, **to).oid


def read_source(text: str, where: str) -> dict[str, str | None]:
    """What published code names in `pair_source.py`: PAIR, REVISION and VERSION, each None where it names none.

    The file is read and not run; a ValueError for what no version of ours writes.
    """
    values: dict[str, str | None] = dict.fromkeys(NAMED_IN_SOURCE)
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


def names_in(api: HfApi, to: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The files of a branch, and where they are; one that is still to be made begins with those of the main one."""
    try:
        return list(api.list_repo_files(**to)), to
    except RevisionNotFoundError:
        main = {"repo_id": to["repo_id"]}
        return list(api.list_repo_files(**main)), main


def keep_card_of_others(api: HfApi, folder: Path, names: list[str], source: dict[str, Any], marker: str) -> None:
    """Take the card out of a folder to upload, with a warning, where that in the repository is not one of ours."""
    if CARD not in names:
        return
    card = Path(api.hf_hub_download(filename=CARD, **source)).read_text(errors="replace")
    if marker not in card:
        message = (
            f"the {CARD} of {source['repo_id']} was not written by specx publish, so it stays as it is; delete it "
        )
        warnings.warn(f"{message}there and publish again to have the model card.", UserWarning, stacklevel=5)
        (folder / CARD).unlink()


def make_repository(api: HfApi, repo_id: str, private: bool | None) -> None:
    """Make a repository if it is not there; a ValueError for one that is there and is not as private as was said."""
    api.create_repo(repo_id, private=private, exist_ok=True)
    is_private = bool(api.repo_info(repo_id).private)
    message = (
        f"{repo_id} is there already and is {'private' if is_private else 'public'}, which private={private} "
        "does not change; leave it out, change that in its settings on the Hub, or name another repository."
    )
    require(private in (None, is_private), message)


@contextmanager
def reaching_hub(repo_id: str) -> Iterator[None]:
    """Raise a ConnectionError that names the repository where the Hub cannot be reached."""
    try:
        yield
    except Exception as error:
        if not any(kind.__name__ == "TransportError" for kind in type(error).__mro__):  # whose library has changed
            raise
        message = f"{repo_id!r} was not published: the Hub cannot be reached ({error}); try again with a network."
        raise ConnectionError(message) from error


def _code_card(name: str) -> str:
    """The card of a repository of code, as it is called by this name."""
    tags = ["custom_generate", "speculative-decoding"]
    data = ModelCardData(library_name="transformers", tags=tags, license="apache-2.0")
    card = ModelCard.from_template(data, str(CARD_OF_CODE), name=name)
    return f"{card.content}\n"
