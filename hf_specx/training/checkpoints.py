"""The folder of a training: its settings, its texts, and checkpoints from which an interrupted one goes on."""

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_specx.common.errors import require

from .texts import write_whole


SETTINGS_FILE, TEXTS, COMPLETE, STATE = "settings.json", "texts", "complete", "trainer_state.json"
CHECKPOINTS_KEPT = 3  # checkpoints at a time: the last, the best, and the one that is being written


def mark_complete(checkpoint: Path) -> None:
    """Say that all files of a checkpoint are written."""
    write_whole(checkpoint / COMPLETE, "")


def discard_broken(folder: Path) -> None:
    """Delete checkpoints that were not written to their end."""
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


def check_same_training(folder: Path, settings: dict[str, Any]) -> None:
    """Note the settings of a training in its folder.

    Raises:
        ValueError: the folder has those of another training, or other files than texts.
    """
    path, now = folder / SETTINGS_FILE, json.loads(json.dumps(settings))
    if not path.exists():
        others = [file.name for file in folder.iterdir() if file.name != TEXTS] if folder.exists() else []
        told = (
            f"{folder} has no training to go on with, but has other files, such as {others[:1]}; name another folder."
        )
        require(not others, told)
        write_whole(path, json.dumps(now, indent=1))
    then = json.loads(path.read_text())
    changed = [f"{name} {then.get(name)!r}, now {now[name]!r}" for name in now if then.get(name) != now[name]]
    told = f"{folder} has a training with other settings ({'; '.join(changed)}); give the same ones to go on with it, "
    require(not changed, told + "name another folder, or delete it.")


def check_space(folder: Path, weights: int, itemsize: int) -> None:
    """Whether there is room for checkpoints and the draft.

    Args:
        folder: where they will be.
        weights: of the draft; checkpoints have them in float32, with two moments.
        itemsize: bytes of a weight that is saved in the end.

    Raises:
        ValueError: there is not.
    """
    near = next(path for path in [folder.resolve(), *folder.resolve().parents] if path.exists())
    needed, free = weights * (CHECKPOINTS_KEPT * 3 * 4 + itemsize), shutil.disk_usage(near).free
    told = f"{folder} needs about {needed / 1e9:.1f} GB for checkpoints and the draft, and {free / 1e9:.1f} GB are "
    require(free >= needed, told + "free; make room, or name a folder on another disk.")


@contextmanager
def enough_room(folder: Path, batch_size: int) -> Iterator[None]:
    """Say what to do where memory or the disk is full.

    Raises:
        ValueError: in place of the error that torch or the system raised.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        told = f"the disk of {folder} is full; make room and start again: it goes on from the last checkpoint."
        raise ValueError(told) from error
    except RuntimeError as error:
        text = str(error)
        if "No space left" in text or "PytorchStreamWriter failed" in text:
            told = f"the disk of {folder} is full; make room and start again: it goes on from the last checkpoint."
            raise ValueError(told) from error
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in text:
            raise
        told = f"memory is not enough with batch_size={batch_size}; lower it (with training={{'gradient_accumulation_"
        told += "steps': ...} raised as much, the result is the same within rounding), lower max_new_tokens, or use "
        raise ValueError(f"{told}lora. torch said: {text.splitlines()[0]}") from error
