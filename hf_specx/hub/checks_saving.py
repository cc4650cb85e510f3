"""Checks of saving and publishing a pair."""

from collections.abc import Collection
from pathlib import Path

from hf_specx.common.errors import refusal
from hf_specx.pair_files.checks_pairs import HUB_ID


@refusal
def folder_in_use(folder: Path, overwrite: bool) -> str | None:
    if not folder.exists() or (folder.is_dir() and (overwrite or not any(folder.iterdir()))):
        return None
    return f"{folder} is there already; name another folder, or pass overwrite=True to replace all that is in it."


@refusal
def place_of_no_kind(role: str, where: str, known: Collection[str]) -> str | None:
    if where in known:
        return None
    return f"{role}={where!r} is unknown; save the {role} {' or by '.join(repr(x) for x in known)}."


@refusal
def reference_to_a_folder(role: str, name: str | None, loaded_from: str) -> str | None:
    if name is not None:
        return None
    origin = f"loaded from {loaded_from!r}" if loaded_from else "made here"
    return (
        f"the {role} was {origin}, which is no repository on the Hub or not known at which commit; save it with "
        f"{role}='inside', or load the pair with DraftTargetPair.from_pretrained, which notes the commit."
    )


@refusal
def repository_of_no_name(repo_id: str) -> str | None:
    if HUB_ID.fullmatch(repo_id) and "/" in repo_id:
        return None
    return f"repo_id={repo_id!r} is no name of a repository; give 'owner/name'."


def check_folder(folder: Path, overwrite: bool) -> None:
    """Whether a pair may be written there."""
    folder_in_use(folder, overwrite)


def check_choice(role: str, where: str, known: Collection[str]) -> None:
    """Whether a model is wanted inside or by reference."""
    place_of_no_kind(role, where, known)


def check_reference_known(role: str, name: str | None, loaded_from: str) -> None:
    """Whether a model can be found again by its name."""
    reference_to_a_folder(role, name, loaded_from)


def check_repository(repo_id: str) -> None:
    """Whether a repository can have this name."""
    repository_of_no_name(repo_id)
