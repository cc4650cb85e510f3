"""A file of results, one JSON object a line, which several processes fill and any of them may leave at any moment.

`done.jsonl` gets a line as soon as a text is known, and has them in the order of the prompts once it is complete.
`done.jsonl.arguments` says what it was made with. `done.jsonl.lock` is locked by the process that writes, and
`done.jsonl.lock.5` by the one that completes prompt 5. The system frees the locks of a process that ends, however it
ends, so what was not finished is free again.
"""

import glob
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, SoftFileLock, Timeout

from hf_specx.common.errors import brief, require

from .results import CompletedText, NumberedText, hash_of, index_and_hash


OPEN: set[Path] = set()  # files that this process completes; a call would wait for ever for one that it is in


class ResultsFile:
    """The results of prompts, used as a context. It keeps 8 bytes for each prompt in memory.

    Args:
        path: of the file; made if it is not there.
        arguments: what the texts depend on, plain values.

    Attributes:
        count: results that are known to be in the file.

    Raises:
        ValueError: at the start, if there can be no such file, or if it was made with other arguments.
        OSError: the system does not let us write.
    """

    def __init__(self, path: str | Path, arguments: dict[str, Any]):
        self.path = Path(path).resolve()  # so that a link stays one
        self.arguments = json.dumps(arguments, indent=1)
        self.lock = self._lock("")
        self.claims: dict[int, FileLock] = {}
        self._forget()

    def __enter__(self) -> "ResultsFile":
        check_results_path(self.path)
        OPEN.add(self.path)
        try:
            with self._writing() as file:
                told = f"files in {self.path.parent} cannot be locked, which out= needs; name one on another disk."
                require(not isinstance(self.lock, SoftFileLock), told)  # such a lock outlives its process
                self._agree(is_new=os.fstat(file.fileno()).st_size == 0 and not self._anybody())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        OPEN.discard(self.path)
        for index in [*self.claims]:
            self._release(index)

    def is_done(self, prompt: NumberedText) -> bool:
        """Whether the file is known to have the result of a prompt.

        Raises:
            ValueError: it has that of another prompt of this index.
        """
        known = self.hashes[prompt.index] if prompt.index < len(self.hashes) else 0
        told = f"prompt {prompt.index} is not the one that {self.path} has a result for; give the same prompts in the "
        require(known in (0, hash_of(prompt.text)), f"{told}same order, more of them after these, or another file.")
        return known != 0

    def claimed(self, prompts: Iterable[NumberedText], elsewhere: list[NumberedText]) -> Iterator[NumberedText]:
        """The prompts that have no result, each locked for this process until its result is appended.

        Args:
            prompts: any of them; taken one by one.
            elsewhere: gets those that other processes are at.
        """
        for prompt in prompts:
            if self._claim(prompt):
                yield prompt
            elif not self.is_done(prompt):
                elsewhere[:] = [*self.without_result(elsewhere), prompt]

    def without_result(self, prompts: Iterable[NumberedText]) -> list[NumberedText]:
        """Those of these prompts that are known to have none."""
        return [prompt for prompt in prompts if not self.is_done(prompt)]

    def append(self, result: CompletedText) -> None:
        """Write the result of a prompt that was claimed; it is in the hands of the system then.

        Raises:
            ValueError: another call has begun the file anew.
            OSError: it could not be written.
        """
        with self._writing() as file:
            told = f"another call has begun {self.path} anew, with other arguments; name another file."
            require(arguments_file(self.path).read_text() == self.arguments, told)
            if not self.is_done(result.prompt):
                file.truncate(self.end)  # a process that is killed may leave half a line
                file.write(result.line())
                file.flush()
                self._read_on(file)
        self._release(result.prompt.index)

    def finish(self, prompts: int) -> None:
        """Put the results of all prompts in their order, unless they are, and on disk.

        Raises:
            ValueError: the file does not have exactly these results.
        """
        with self._writing() as file:
            told = f"{self.path} has {self.count} results for {prompts} prompts, "
            other = len(self.hashes) > prompts
            require(not other, f"{told}some of them for others; give the same prompts, or name another file.")
            require(self.count == prompts, f"{told}since some were removed meanwhile; make the same call again.")
            file.truncate(self.end)
            os.fsync(file.fileno())
            if not self.in_order:
                self._sort(file)
            Path(self.lock.lock_file).unlink(missing_ok=True)

    def _lock(self, which: str) -> FileLock:
        return FileLock(f"{self.path}.lock{which}", thread_local=False)

    def _claim(self, prompt: NumberedText) -> bool:
        """Lock a prompt for this process, unless it has a result or another process is at it."""
        if self.is_done(prompt):
            return False
        lock = self._lock(f".{prompt.index}")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return False
        self.claims[prompt.index] = lock
        self.look()
        if self.is_done(prompt):  # since the last look
            self._release(prompt.index)
            return False
        return True

    def _release(self, index: int) -> None:
        lock = self.claims.pop(index)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()

    def look(self) -> None:
        """Take note of the results that any process has written since the last time."""
        with self._writing():
            pass

    @contextmanager
    def _writing(self) -> Iterator[BinaryIO]:
        """The open file, whose results are known, while no other process writes."""
        try:
            with self.lock, open(self.path, "a+b") as file:
                self._read_on(file)
                yield file
        except OSError as error:
            told = f"the same call goes on from the {self.count} results that are in {self.path.name}"
            raise OSError(error.errno, f"{error.strerror}; {told}", error.filename or str(self.path)) from error

    def _anybody(self) -> bool:
        """Whether a process is at a prompt."""
        for path in self.path.parent.glob(f"{glob.escape(self.path.name)}.lock.*"):
            try:
                FileLock(path).acquire(blocking=False).lock.release()
            except Timeout:
                return True
        return False

    def _agree(self, is_new: bool) -> None:
        """Compare what the texts depend on with what the file was made with; a new one is made with ours."""
        told_by, ours = arguments_file(self.path), json.loads(self.arguments)
        try:
            earlier = json.loads(told_by.read_text())
        except (OSError, ValueError):
            earlier = None
        if is_new:
            told_by.write_text(self.arguments)
            return
        told = f"{self.path} is there already, and {told_by.name} does not say what made it; name another file."
        require(isinstance(earlier, dict), told)
        for key in sorted(ours.keys() | earlier.keys()):
            then, now = earlier.get(key), ours.get(key)
            told = f"{self.path} was made with {key}={brief(then)}, now it is {brief(now)}; give the same, or another "
            require(then == now, f"{told}file.")
        self.arguments = told_by.read_text()

    def _forget(self) -> None:
        self.inode, self.end, self.count, self.in_order = -1, 0, 0, True
        self.hashes = array("Q")  # of prompts, 0 for those without a result

    def _read_on(self, file: BinaryIO) -> None:
        """Take note of the whole lines behind those that are known; of all where another file is in place of ours.

        Raises:
            ValueError: a line is no result, or a prompt has two.
        """
        inode = os.fstat(file.fileno()).st_ino
        if inode != self.inode:
            self._forget()
            self.inode = inode
        file.seek(self.end)
        for line in file:
            if not line.endswith(b"\n"):
                return
            told = f"line {self.count + 1} of {self.path} is no result: {line[:40]!r}; delete it."
            index, prompt_hash = index_and_hash(line) or (-1, 0)
            require(index >= 0, told)
            self.hashes.extend([0] * (index + 1 - len(self.hashes)))
            told = f"line {self.count + 1} of {self.path} is a second result for prompt {index}; delete one."
            require(self.hashes[index] == 0, told)
            self.hashes[index] = prompt_hash
            self.in_order = self.in_order and index == self.count
            self.count += 1
            self.end += len(line)

    def _sort(self, file: BinaryIO) -> None:
        """Put a file with the same lines in order in the place of this one."""
        starts, position = array("Q", bytes(8 * self.count)), 0
        file.seek(0)
        for line in file:
            index, _ = index_and_hash(line) or (0, 0)
            starts[index] = position
            position += len(line)
        new = self.path.with_name(f"{self.path.name}.sorting")
        try:
            with open(new, "wb") as in_order:
                for start in starts:
                    file.seek(start)
                    in_order.write(file.readline())
                in_order.flush()
                os.fsync(in_order.fileno())
            os.replace(new, self.path)
        finally:
            new.unlink(missing_ok=True)  # there is still one after an error only


def arguments_file(path: Path) -> Path:
    """The file beside a file of results that says what it was made with."""
    return path.with_name(f"{path.name}.arguments")


def check_results_path(path: Path) -> None:
    """Whether a path can be that of a file of results; nothing is made there.

    Raises:
        ValueError: it cannot.
    """
    told = "out= needs the file locks of Linux or macOS; leave it out, and keep the texts yourself."
    require(os.name == "posix", told)
    path = path.resolve()
    name = f"out={str(path)!r}"
    require(path.parent.is_dir(), f"{name}: there is no folder {path.parent}; make it, or name another.")
    require(not path.is_dir(), f"{name} is a folder; name a file in it.")
    require(path.is_file() or not path.exists(), f"{name} is a device; name a file.")
    told_by = arguments_file(path)
    known = not path.exists() or path.stat().st_size == 0 or told_by.exists()
    told = f"{name} is there already, and there is no {told_by.name} that says what made it; name another file."
    require(known, told)
    require(path not in OPEN, f"{name} is being written by another call in this process; wait for it.")
