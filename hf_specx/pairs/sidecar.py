"""The file beside a file of results: what the texts depend on, and which process is at which prompt.

Its bytes are locked: byte i by the process that completes prompt i, others as said below. The system frees the locks
of a process that ends, however it ends; so nothing has to be cleaned up, and what was not finished is free again.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_specx.common.errors import brief, require


try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

WRITER = 2**62  # the byte of the process that writes results
PRESENT = WRITER + 1  # shared by all processes that are at the results


def check_locks() -> None:
    """Check that there are locks which end with their process."""
    require(
        fcntl is not None, "out= needs the file locks of Linux or macOS; leave it out, and keep the texts yourself."
    )


class Sidecar:
    """The open file; another call in the same process must not open it too, which the locks do not keep out.

    Args:
        path: of the file; made if it is not there.
    """

    def __init__(self, path: Path):
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def close(self) -> None:
        """Free all locks of this process."""
        os.close(self.file)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which no other process writes; it is waited for.

        Raises:
            OSError: the disk has no locks.
        """
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX, 1, WRITER)
        except OSError as error:
            told = f"files in {self.path.parent} cannot be locked, which out= needs; name one on another disk"
            raise OSError(error.errno, f"{told} ({error.strerror})") from error
        try:
            yield
        finally:
            self.unlock(WRITER)

    def try_lock(self, index: int) -> bool:
        """Lock a byte, unless another process has."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, index: int) -> None:
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, index)

    def agree(self, arguments: dict[str, Any], name: str, is_empty: bool) -> None:
        """Compare what the texts depend on with what is in the file; call it within `writing`.

        Args:
            arguments: plain values. They are written if there are no results, and no other process is at them.
            name: of the file of results, for errors; `is_empty`: whether it has none.

        Raises:
            ValueError: the results are those of other arguments.
        """
        text = os.pread(self.file, os.fstat(self.file).st_size, 0)
        try:
            earlier = json.loads(text) if text else None
        except ValueError:
            earlier = None  # cut off when it was written, so there is no result
        ours = json.loads(json.dumps(arguments))
        if earlier != ours and is_empty and self.try_lock(PRESENT):
            os.ftruncate(self.file, 0)
            write_all(self.file, json.dumps(ours, indent=1).encode())
            os.fsync(self.file)
            earlier = ours
        told = f"{name} is there already, and {self.path.name} does not say what made it; name another file."
        require(isinstance(earlier, dict), told)
        assert earlier is not None
        for key in sorted(ours.keys() | earlier.keys()):
            then, now = earlier.get(key), ours.get(key)
            told = f"{name} was made with {key}={brief(then)}, now it is {brief(now)}; give the same, or another file."
            require(then == now, told)
        fcntl.lockf(self.file, fcntl.LOCK_SH, 1, PRESENT)


def write_all(file: int, data: bytes) -> None:
    """Write all of the data to an open file."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
