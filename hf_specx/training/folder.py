"""The folder of a training: its settings, its texts, and the checkpoints from which it goes on when interrupted."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from hf_specx.common.errors import brief, is_out_of_memory, require
from hf_specx.hub.locks import HOLDER, LOCK, locked


SETTINGS_FILE, TEXTS, CHECKPOINTS = "specx_distill.json", "texts", "checkpoints"  # all that is written into it
COMPLETE = "complete"  # an empty file in a checkpoint that was written to its end
PART = ".part"  # of a file that is being written
IGNORED = (PART, LOCK, HOLDER)  # ends of the names of files that may be there before any training
DISK_FULL = ("No space left on device", "PytorchStreamWriter failed")


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """A context with the folder of a training, which is made and locked.

    Raises:
        ValueError: another process trains there, or the folder has files but no training. Nothing is changed then.
    """
    names = {file.name for file in folder.iterdir() if file.suffix not in IGNORED} if folder.exists() else set()
    require(
        SETTINGS_FILE in names or not names,
        f"{folder} has no training to go on with, but other files ({brief(sorted(names))}); name another folder.",
    )
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / SETTINGS_FILE, "wait until it has ended, or name another folder"):
        yield


def prepare_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a training into its folder; they may change until there is a checkpoint.

    Raises:
        ValueError: the folder has a checkpoint of another training. Nothing is changed then.
    """
    path, new_settings = folder / SETTINGS_FILE, json.loads(json.dumps(settings, default=str))
    if path.exists() and last_checkpoint(folder) is not None:
        old_settings = json.loads(path.read_text())
        changed = ", ".join(name for name in new_settings if old_settings.get(name) != new_settings[name])
        require(
            not changed,
            f"{folder} has a training with another {changed} (see its {SETTINGS_FILE}); give the same to go on with "
            "it, name another folder, or delete it.",
        )
    write_whole(path, json.dumps(new_settings, indent=1))
    (folder / CHECKPOINTS).mkdir(exist_ok=True)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, None without one; newer ones that are incomplete are deleted."""
    checkpoints = folder / CHECKPOINTS
    while checkpoints.is_dir():
        newest = get_last_checkpoint(checkpoints)
        if newest is None:
            return None
        if (Path(newest) / COMPLETE).exists():
            return Path(newest)
        shutil.rmtree(newest)
    return None


def write_whole(file: Path, content: str) -> None:
    """Write a file completely or not at all, even if the process is killed; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(PART)
    with part.open("w", encoding="utf-8") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)


@contextmanager
def explained_lack_of_room(folder: Path, batch_size: int) -> Iterator[None]:
    """A context that raises a ValueError with the remedy where memory or the disk is full."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if is_out_of_memory(error):
            message = (
                f"memory is not enough with batch_size={batch_size}; lower it, lower max_new_tokens, or use lora. A "
                f"training with a checkpoint keeps its settings: name another folder. torch said: {text}"
            )
        elif any(sign in text for sign in DISK_FULL):
            message = f"the disk of {folder} is full; make room and start again: it goes on from the last checkpoint."
        else:
            raise
        raise ValueError(message) from error
