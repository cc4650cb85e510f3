"""One process at a time: a lock beside a file or in a folder, and which process holds it."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout


LOCK, HOLDER = ".lock", ".lock-holder"  # what is behind the name of what is locked


@contextmanager
def locked(
    path: Path, remedy: str = "wait until it has ended, or name another file", wait: bool = False
) -> Iterator[None]:
    """Hold the lock of a path; if it is in use, wait, or raise a ValueError that says by whom, and since when.

    The system frees the lock when its process ends, however it ends. The lock is a file beside the path, which stays:
    removing it would let two processes lock one name.
    """
    lock = FileLock(path.with_name(path.name + LOCK))
    holder = path.with_name(path.name + HOLDER)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout as error:
        raise ValueError(f"{path} is in use by {_described(holder)}; {remedy}.") from error
    except (OSError, NotImplementedError) as error:
        message = f"files in {path.parent} cannot be locked ({error}), which this needs; name one on another disk."
        raise ValueError(message) from error
    try:
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        holder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}))
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def check_free(path: Path | None) -> None:
    """Raise ValueError if the lock of a path is in use; one that is not there is not made."""
    if path is not None and path.with_name(path.name + LOCK).exists():
        with locked(path):
            pass


def _described(holder: Path) -> str:
    """The process that a file says to hold a lock, in words."""
    try:
        process = json.loads(holder.read_text())
        return f"process {process['pid']} on {process['host']}, since {process['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has just begun, or just ended
        return "another process"
