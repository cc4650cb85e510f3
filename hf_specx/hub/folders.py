"""Where a pair may be written or published, and how its models are: known before anything is loaded."""

import re
import tempfile
from pathlib import Path

from hf_specx.common.errors import require


INSIDE, REFERENCE = "inside", "reference"


def check_folder(folder: Path, overwrite: bool) -> None:
    """Whether a pair may be written there."""
    free = not folder.exists() or (folder.is_dir() and (overwrite or not any(folder.iterdir())))
    told = f"{folder} is there already; name another folder, or pass overwrite=True to replace all that is in it."
    require(free, told)
    check_writable(folder.absolute().parent, folder)


def check_repository(repo_id: str) -> None:
    """Whether a repository on the Hub can have this name."""
    named = re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", repo_id, re.ASCII)
    require(bool(named), f"repo_id={repo_id!r} is no name of a repository; give 'owner/name'.")


def check_writable(folder: Path, named: Path) -> None:
    """Whether files can be made in a folder, or in the nearest one above it that is there; one is, for a moment.

    Args:
        folder: where.
        named: what the user named, for the message.
    """
    near = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=near):
            return
    except OSError as error:
        told = f"{named}: nothing can be written in {near} ({error.strerror}); name another place."
        raise ValueError(told) from error
