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
def locked(path: Path, remedy: str = "wait until it has ended, or name another file") -> Iterator[None]:
    """Hold the lock of a path; if another process has it, raise a ValueError that says which, and since when.

    The system frees the lock when its process ends, however it ends. The lock is a file beside the path, which stays:
    removing it would let two processes lock one name.
    """
    lock, holder = path.with_name(path.name + LOCK), path.with_name(path.name + HOLDER)
    try:
        with FileLock(lock, timeout=0):
            now = datetime.now().astimezone().isoformat(" ", "seconds")
            holder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}))
            try:
                yield
            finally:
                holder.unlink(missing_ok=True)
    except Timeout as error:
        if Path(error.lock_file) != lock:  # one that was asked for while this was held
            raise
        raise ValueError(f"{path} is in use by {_described(holder)}; {remedy}.") from error


def _described(holder: Path) -> str:
    try:
        process = json.loads(holder.read_text())
        return f"process {process['pid']} on {process['host']}, since {process['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has just begun, or just ended
        return "another process"
