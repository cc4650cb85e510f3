"""A file of results, one JSON object a line, which several processes fill and any of them may leave at any moment.

Results are written as they come. A file that is complete has them in the order of the prompts.
"""

import os
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_specx.common.errors import require

from .results import CompletedText, NumberedText, hash_of, index_and_hash
from .sidecar import Sidecar, check_locks, write_all


CHUNK = 2**20  # bytes read at once
SYNC_EVERY = 10  # seconds; the system loses nothing when a process is killed, but may when a machine is
OPEN: set[str] = set()  # files that this process writes


class ResultsFile:
    """The results of prompts, used as a context. It keeps 8 bytes for each prompt in memory.

    Args:
        path: of the file; made if it is not there. Beside it is its `Sidecar`, of the same name and ".arguments".
        arguments: what the texts depend on, plain values.

    Attributes:
        count: results that are known to be in the file.

    Raises:
        ValueError: at the start, if there can be no such file, or if it was made with other arguments.
        OSError: the system does not let us write.
    """

    def __init__(self, path: str | Path, arguments: dict[str, Any]):
        self.path = Path(path).resolve()  # so that a link stays one
        self.arguments, self.file = arguments, -1
        self.hashes, self.known, self.count, self.ordered = array("Q"), 0, 0, True
        self.synced = time.monotonic()
        self.sidecar: Sidecar | None = None

    def __enter__(self) -> "ResultsFile":
        check_results_path(self.path)
        path = sidecar_of(self.path)
        OPEN.add(str(self.path))
        try:
            self.sidecar = Sidecar(path)
            with self.sidecar.writing(), self._told_of_errors(path):
                self._open()
                self.sidecar.agree(self.arguments, str(self.path), os.fstat(self.file).st_size == 0)
                self.read_on()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.file != -1:
            os.close(self.file)
        if self.sidecar is not None:
            self.sidecar.close()
        self.file, self.sidecar = -1, None
        OPEN.discard(str(self.path))

    def is_done(self, prompt: NumberedText) -> bool:
        """Whether the file is known to have the result of a prompt.

        Raises:
            ValueError: it has that of another prompt of this index.
        """
        known = self.hashes[prompt.index] if prompt.index < len(self.hashes) else 0
        told = f"prompt {prompt.index} is not the one that {self.path} has a result for; give the same prompts in the "
        require(known in (0, hash_of(prompt.text)), f"{told}same order, more of them after these, or another file.")
        return known != 0

    def claim(self, prompt: NumberedText) -> bool:
        """Whether this process may complete a prompt: it is not done, and no other process is at it."""
        assert self.sidecar is not None
        if self.is_done(prompt) or not self.sidecar.try_lock(prompt.index):
            return False
        self.read_on()
        if self.is_done(prompt):  # since the last look
            self.sidecar.unlock(prompt.index)
            return False
        return True

    def append(self, result: CompletedText) -> None:
        """Write the result of a prompt that was claimed; it is in the hands of the system then.

        Raises:
            OSError: it could not be written; the file is as it was before.
        """
        with self._writing() as sidecar, self._told_of_errors(self.path):
            try:
                write_all(self.file, result.line())
            except OSError:
                os.ftruncate(self.file, self.known)
                raise
            if time.monotonic() > self.synced + SYNC_EVERY:
                os.fsync(self.file)
                self.synced = time.monotonic()
            self.read_on()
        sidecar.unlock(result.prompt.index)

    def finish(self, prompts: int) -> None:
        """Put the results of all prompts in their order, unless they are, and on disk.

        Raises:
            ValueError: the file does not have exactly these results.
        """
        with self._writing():
            told = f"{self.path} has {self.count} results for {prompts} prompts, "
            other = len(self.hashes) > prompts
            require(not other, f"{told}some of them for others; give the same prompts, or name another file.")
            require(self.count == prompts, f"{told}since some were removed meanwhile; make the same call again.")
            if not self.ordered:
                self._sort()
            else:
                os.fsync(self.file)

    def read_on(self) -> None:
        """Take note of the results that were written since the last time, by any process.

        A last line that is broken, as a process leaves it that is killed, is passed over; the next writer cuts it.

        Raises:
            ValueError: a line before the last is no result, or a prompt has two.
        """
        for line in self._whole_lines():
            found = index_and_hash(line)
            if found is None:
                is_last = self.known + len(line) + 1 == os.fstat(self.file).st_size
                told = f"line {self.count + 1} of {self.path} is no result: {line[:40]!r}; delete it."
                require(is_last, told)
                return
            index, prompt_hash = found
            self.hashes.extend([0] * (index + 1 - len(self.hashes)))
            told = f"line {self.count + 1} of {self.path} is a second result for prompt {index}; delete one."
            require(self.hashes[index] == 0, told)
            self.hashes[index] = prompt_hash
            self.ordered = self.ordered and index == self.count
            self.count += 1
            self.known += len(line) + 1

    def _whole_lines(self) -> Iterator[bytes]:
        """The lines after those that are known, without their ends; not one that has none."""
        rest, position = b"", self.known
        while chunk := os.pread(self.file, CHUNK, position):
            position += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines

    @contextmanager
    def _writing(self) -> Iterator[Sidecar]:
        """A context in which no other process writes, and the file ends after the last whole line."""
        assert self.sidecar is not None
        with self.sidecar.writing():
            self._open()
            self.read_on()
            if self.known < os.fstat(self.file).st_size:
                os.ftruncate(self.file, self.known)
            yield self.sidecar

    def _open(self) -> None:
        """Open the file, unless it is; if there is another one in its place by now, that one is read anew."""
        if self.file != -1:
            if self.path.exists() and os.path.samestat(os.stat(self.path), os.fstat(self.file)):
                return
            os.close(self.file)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self.hashes, self.known, self.count, self.ordered = array("Q"), 0, 0, True

    @contextmanager
    def _told_of_errors(self, path: Path) -> Iterator[None]:
        """Errors of the system in this context say what to do."""
        try:
            yield
        except OSError as error:
            told = (
                f"{error.strerror}; the same call goes on from the {self.count} results that are in {self.path.name}"
            )
            raise OSError(error.errno, told, str(path)) from error

    def _sort(self) -> None:
        """Put a file with the same lines in order in the place of this one."""
        starts, position = array("Q", bytes(8 * len(self.hashes))), 0
        new = self.path.with_name(f"{self.path.name}.sorting")
        with open(self.path, "rb") as unsorted:
            for line in unsorted:
                found = index_and_hash(line)
                assert found is not None
                starts[found[0]] = position
                position += len(line)
            try:
                with self._told_of_errors(new), open(new, "wb") as in_order:
                    for start in starts:
                        unsorted.seek(start)
                        in_order.write(unsorted.readline())
                    in_order.flush()
                    os.fsync(in_order.fileno())
                os.replace(new, self.path)
            finally:
                new.unlink(missing_ok=True)  # there is still one after an error only


def sidecar_of(path: Path) -> Path:
    """The file beside a file of results."""
    return path.with_name(f"{path.name}.arguments")


def check_results_path(path: Path) -> None:
    """Whether a path can be that of a file of results; nothing is made there.

    Raises:
        ValueError: it cannot.
    """
    check_locks()
    path, sidecar = path.resolve(), sidecar_of(path.resolve())
    name = f"out={str(path)!r}"
    require(path.parent.is_dir(), f"{name}: there is no folder {path.parent}; make it, or name another.")
    require(not path.is_dir(), f"{name} is a folder; name a file in it.")
    require(path.is_file() or not path.exists(), f"{name} is a device; name a file.")
    known = not path.exists() or path.stat().st_size == 0 or sidecar.exists()
    told = f"{name} is there already, and there is no {sidecar.name} that says what made it; name another file."
    require(known, told)
    require(str(path) not in OPEN, f"{name} is being written by another call in this process; wait for it.")
