"""The folder of a training: its settings, its texts, and checkpoints from which an interrupted one goes on."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_specx.common.errors import brief, require

from .texts import PART, write_whole


SETTINGS_FILE, TEXTS, COMPLETE, STATE = "settings.json", "texts", "complete", "trainer_state.json"
CHECKPOINTS_KEPT = 3  # checkpoints at a time: the last, the best, and the one that is being written


def mark_complete(checkpoint: Path) -> None:
    """Say that all files of a checkpoint are written."""
    write_whole(checkpoint / COMPLETE, "")


def discard_broken(folder: Path) -> None:
    """Delete checkpoints of a training of ours that were not written to their end."""
    if not (folder / SETTINGS_FILE).is_file():
        return
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if not (path / COMPLETE).exists():
            shutil.rmtree(path)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint; None if there is none."""
    found = {int(path.name.rpartition("-")[2]): path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    return found[max(found)] if found else None


def state_of(checkpoint: Path) -> TrainerState:
    """How far the training was."""
    return TrainerState.load_from_json(str(checkpoint / STATE))


def check_same_training(folder: Path, settings: dict[str, Any], parts: dict[str, str]) -> None:
    """Note the settings of a training in its folder; as long as it has no checkpoint, they may change.

    Args:
        folder: of the training.
        settings: plain values.
        parts: hashes of what else it is made of.

    Raises:
        ValueError: the folder has a checkpoint of another training, or other files than a training has.
    """
    path, now = folder / SETTINGS_FILE, json.loads(json.dumps(settings | parts))
    files = folder.iterdir() if folder.exists() else ()
    others = {file.name for file in files if file.suffix != PART} - {TEXTS}
    told = f"{folder} has no training to go on with, but other files ({brief(sorted(others))}); name another folder."
    require(path.exists() or not others, told)
    then = now if last_checkpoint(folder) is None else json.loads(path.read_text())
    changed = [name for name in now if then.get(name) != now[name]]
    shown = [
        f"another {name}" if name in parts else f"{name} {then.get(name)!r}, now {now[name]!r}" for name in changed
    ]
    told = f"{folder} has a training with other settings ({'; '.join(shown)}); give the same ones to go on with it, "
    require(not changed, told + "name another folder, or delete it.")
    write_whole(path, json.dumps(now, indent=1))


def check_space(folder: Path, trained: int, saved: int) -> None:
    """Whether there is room for checkpoints, those that are there already included, and the draft.

    Args:
        folder: where they will be.
        trained: weights that checkpoints have, in float32 and with two moments.
        saved: bytes of the draft that is saved in the end.

    Raises:
        ValueError: there is not, or nothing can be written there.
    """
    near = next(path for path in [folder.resolve(), *folder.resolve().parents] if path.exists())
    told = f"{folder}: nothing can be written in {near}; name another folder for texts and checkpoints."
    require(near.is_dir() and os.access(near, os.W_OK), told)
    there = sum(file.stat().st_size for file in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/*"))
    needed, free = max(0, trained * CHECKPOINTS_KEPT * 3 * 4 - there) + saved, shutil.disk_usage(near).free
    unit, name = (1e9, "GB") if needed >= 1e9 else (1e6, "MB")
    told = f"{folder} needs about {needed / unit:.1f} {name} for checkpoints and the draft, and {free / unit:.1f} "
    require(free >= needed, f"{told}{name} are free; make room, or name a folder on another disk.")


@contextmanager
def enough_room(folder: Path, batch_size: int) -> Iterator[None]:
    """Say what to do where memory or the disk is full.

    Raises:
        ValueError: in place of the error that torch or the system raised.
    """
    try:
        yield
    except Exception as error:  # safetensors has a kind of its own
        told = _remedy(error, folder, batch_size)
        if told is None:
            raise
        raise ValueError(told) from error


def _remedy(error: Exception, folder: Path, batch_size: int) -> str | None:
    """What to do about an error; None where that is not known."""
    text = str(error)
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if full or "No space left" in text or "PytorchStreamWriter failed" in text:
        return f"the disk of {folder} is full; make room and start again: it goes on from the last checkpoint."
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        same = "with training={'gradient_accumulation_steps': ...} raised as much, the result is the same"
        told = f"memory is not enough with batch_size={batch_size}; lower it ({same} within rounding), lower "
        told += "max_new_tokens, or use lora. A training with a checkpoint keeps its settings: name another folder. "
        return f"{told}torch said: {text.splitlines()[0]}"
    return None
