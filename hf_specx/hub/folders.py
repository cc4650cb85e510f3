"""Where a pair may be written or published, and how its models are: known before anything is loaded."""

import os
import re
import shlex
import tempfile
from contextlib import suppress
from pathlib import Path

from hf_specx.common.drafts import HUB_ID, PAIR_CONFIG_NAME
from hf_specx.common.errors import require

from .secrets import without_secrets


PAIR_CARD_MARKER = "- draft-model"  # among the tags of each card of a pair
MARKER_BYTES = 2**20  # bytes at the beginning of a file in which a marker is looked for
INSIDE, REFERENCE = "inside", "reference"


def check_folder(folder: Path, overwrite: bool, how: str = "overwrite=True") -> None:
    """Raise ValueError unless a pair may be written there: nothing but another pair is ever replaced.

    `how` is what the caller's user passes for `overwrite`.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        require(
            overwrite,
            f"{folder} is there already; name another folder, or pass {how} to replace all that is in it.",
        )
        require(
            (folder / PAIR_CONFIG_NAME).is_file(),
            f"{folder} is no pair, as it has no {PAIR_CONFIG_NAME}, so nothing in it is replaced; name another "
            "folder.",
        )
    check_writable(folder.absolute().parent, folder)


def check_repository(repo_id: str) -> None:
    """Raise ValueError unless a repository on the Hub can have this name."""
    is_name = "/" in repo_id and HUB_ID.fullmatch(repo_id) is not None
    require(is_name, f"repo_id={repo_id!r} is no name of a repository; give 'owner/name'.")


def check_out(path: Path | None, marker: str = "") -> None:
    """Raise ValueError unless a file could be written at a path; one that is there has to have the `marker` in it."""
    if path is None:
        return
    require(not path.is_dir(), f"{path} is a folder; name a file in it.")
    folder = path.resolve().parent
    require(folder.is_dir(), f"{path}: there is no folder {folder}; make it, or name another file.")
    writable = not path.exists() or os.access(path, os.W_OK)
    require(writable, f"{path} is there and cannot be written; name another file.")
    if marker and path.is_file():
        with path.open("rb") as file:
            beginning = file.read(MARKER_BYTES)
        require(
            not beginning or marker.encode() in beginning,
            f"{path} is there already, is another kind of file, and is not overwritten; name another file.",
        )
    check_writable(folder, path)


def check_writable(folder: Path, named: Path) -> None:
    """Raise ValueError unless files can be made in a folder, or in the nearest one above it that is there; `named` is
    what the message names."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            return
    except OSError as error:
        message = f"{named}: nothing can be written in {existing} ({error.strerror}); name another place."
        raise ValueError(message) from error


def without_folders(command: str) -> str:
    """A command as others may see it: without secrets, and of each path on this machine its last part alone."""
    lines = without_secrets(command).split("\n")
    for number, line in enumerate(lines):
        with suppress(ValueError):  # a quote that does not end
            words = shlex.split(line)
            shown = [_without_folder(word) for word in words]
            lines[number] = line if shown == words else shlex.join(shown)
    return "\n".join(lines)


def _without_folder(word: str) -> str:
    """An option or an argument, with the last part of its value if that is a path; an id on the Hub is none."""
    option = re.match(r"(--[\w-]+=)?", word)[0]  # type: ignore[index]
    value = word[len(option) :]
    is_path = re.match(r"[/~\\]|\.\.?[/\\]|[A-Za-z]:[/\\]", value) or len(re.findall(r"[/\\]", value)) > 1
    if not is_path or "://" in value:
        return word
    return option + re.split(r"[/\\]", value.rstrip("/\\"))[-1]
