"""A file of results, one JSON object a line, which several processes fill and any of them may leave at any moment.

`done.jsonl` gets a line as soon as a text is known, and has them in the order of the prompts once it is complete.
`done.jsonl.arguments` says what it was made with, and carries the locks: of its first byte by the process that writes
a line, of byte i + 1 by the one that completes prompt i, of byte `PRESENT` by all that are at it, whether there are so
many bytes or not. The system frees the locks of a process that ends, however it ends, so what was not finished is free
again.
"""

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hf_specx.common.errors import brief, is_int, require
from hf_specx.hub.folders import check_out


with suppress(ImportError):  # Windows has none, and is refused
    import fcntl

OPEN: set[Path] = set()  # files that this process completes: locks of the system hold between processes only
WRITER, PRESENT = 0, 2**62  # bytes


@dataclass(frozen=True)
class NumberedText:
    """A prompt and its index among all prompts."""

    index: int
    text: str


class CompletedText(NamedTuple):
    """What became of a prompt: its text, or None and an error where it was refused."""

    prompt: NumberedText
    text: str | None
    finish_reason: str
    error: str | None = None

    def line(self) -> bytes:
        values = {"index": self.prompt.index, "prompt_hash": f"{hash_of(self.prompt.text):016x}", "text": self.text}
        values |= {"finish_reason": self.finish_reason} | ({} if self.error is None else {"error": self.error})
        return json.dumps(values, ensure_ascii=False).encode() + b"\n"


def hash_of(text: str) -> int:
    """64 bits that tell one prompt from another, never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") or 1


@contextmanager
def open_results(path: str | Path, arguments: dict[str, Any]) -> Iterator["ResultsFile"]:
    """Open a file of results, or make one; if its texts depend on other arguments than these it is refused."""
    path = Path(path).resolve()  # so that a link stays one
    told_by = check_results_path(path)
    OPEN.add(path)
    try:
        with open(told_by, "a+b", buffering=0) as file:  # closing it frees all locks
            results = ResultsFile(path, file)
            results.agree(arguments)
            yield results
    finally:
        OPEN.discard(path)


class ResultsFile:
    """The results of prompts, of which 16 bytes are kept for each; `told_by` says what made them, or is to say it."""

    def __init__(self, path: Path, told_by: FileIO):
        self.path, self.told_by = path, told_by
        self.prompts = 0  # how many there are, as far as they were claimed
        self._forget()

    def agree(self, arguments: dict[str, Any]) -> None:
        """Compare what the texts depend on with what the file was made with; a new one is made with ours.

        It stays so for as long as anybody is at it.
        """
        text = json.dumps(arguments, indent=1).encode()
        earlier: Any = None
        with self._writing() as file:
            nobody_is_at_it = self._lock(PRESENT)
            if nobody_is_at_it and os.fstat(file.fileno()).st_size == 0:
                self.told_by.truncate(0)
                self.told_by.write(text)
            self._lock(PRESENT, shared=True)
            self.told_by.seek(0)  # it stays open: a process that closes a file once loses all locks on it
            with suppress(ValueError):
                earlier = json.loads(self.told_by.read())
        ours = json.loads(text)
        told = f"{self.path} is there already, and {self.told_by.name} does not say what made it; name another file."
        require(isinstance(earlier, dict), told)
        for key in sorted(ours.keys() | earlier.keys(), key=lambda key: (key == "do_sample", key)):
            # do_sample last, which a command adds to a temperature
            then, now = (f"with {key}={brief(of[key])}" if key in of else f"without {key}" for of in (earlier, ours))
            told = f"{self.path} was made {then}, now {now}; give the same, or another file."
            require(earlier.get(key) == ours.get(key), told)

    def is_done(self, prompt: NumberedText) -> bool:
        """Whether the file is known to have the result of a prompt, and not that of another one of its index."""
        known = self.hashes[prompt.index] if prompt.index < len(self.hashes) else 0
        told = f"prompt {prompt.index} is not the one that {self.path} has a result for; give the same prompts in the "
        require(known in (0, hash_of(prompt.text)), f"{told}same order, more of them after these, or another file.")
        return known != 0

    def claimed(self, prompts: Iterable[NumberedText], elsewhere: list[NumberedText]) -> Iterator[NumberedText]:
        """Those that have no result, each locked for this process; `elsewhere` gets those that others are at."""
        for prompt in prompts:
            self.prompts = max(self.prompts, prompt.index + 1)
            if self.is_done(prompt):
                continue
            claimed = self._lock(prompt.index + 1)
            left = self.look([*elsewhere, prompt])
            if not claimed:
                elsewhere[:] = left
            elif self.is_done(prompt):
                self._unlock(prompt.index + 1)
            else:
                yield prompt

    def append(self, result: CompletedText) -> None:
        """Write the result of a prompt that was claimed; it is in the hands of the system then."""
        with self._writing() as file:
            is_ours = os.path.samestat(os.stat(self.told_by.name), os.fstat(self.told_by.fileno()))
            require(is_ours, f"another call has begun {self.path} anew; name another file.")
            if not self.is_done(result.prompt):
                file.truncate(self.end)  # a process that is killed may leave half a line
                file.write(result.line())
                file.flush()
                self._read_on(file)
        self._unlock(result.prompt.index + 1)

    def finish(self) -> None:
        """Put the results of all prompts in their order, unless they are, and on disk."""
        with self._writing() as file:
            told = f"{self.path} has {self.count} results for {self.prompts} prompts, "
            other = len(self.hashes) > self.prompts
            require(not other, f"{told}some of them for others; give the same prompts, or name another file.")
            require(self.count == self.prompts, f"{told}since some were removed meanwhile; make the same call again.")
            file.truncate(self.end)
            os.fsync(file.fileno())
            if any(start > after for start, after in pairwise(self.starts)):
                self._sort(file)

    def look(self, prompts: list[NumberedText]) -> list[NumberedText]:
        """Those of these prompts that no process has written a result of until now."""
        with self._writing():
            return [prompt for prompt in prompts if not self.is_done(prompt)]

    def _lock(self, byte: int, wait: bool = False, shared: bool = False) -> bool:
        """Lock a byte for this process; False if another one has locked it, unless we wait for that."""
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.lockf(self.told_by, kind | (0 if wait else fcntl.LOCK_NB), 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            told = f"files in {self.path.parent} cannot be locked, which out= needs; name one on another disk."
            raise ValueError(told) from error
        return True

    def _unlock(self, byte: int) -> None:
        fcntl.lockf(self.told_by, fcntl.LOCK_UN, 1, byte)

    @contextmanager
    def _writing(self) -> Iterator[BinaryIO]:
        """The open file, whose results are known, while no other process writes."""
        try:
            self._lock(WRITER, wait=True)
            try:
                with open(self.path, "a+b") as file:
                    self._read_on(file)
                    yield file
            finally:
                self._unlock(WRITER)
        except OSError as error:
            told = f"the same call goes on from the {self.count} results that are in {self.path.name}"
            raise OSError(error.errno, f"{error.strerror}; {told}", error.filename or str(self.path)) from error

    def _forget(self) -> None:
        self.inode, self.end, self.count = -1, 0, 0
        self.hashes = array("Q")  # of prompts, 0 for those without a result
        self.starts = array("Q")  # where in the file their results are

    def _read_on(self, file: BinaryIO) -> None:
        """Take note of the whole lines behind those that are known; of all where another file is in place of ours."""
        found = os.fstat(file.fileno())
        if found.st_ino != self.inode or found.st_size < self.end:  # a new file may get the number of a deleted one
            self._forget()
            self.inode = found.st_ino
        file.seek(self.end)
        for line in file:
            if not line.endswith(b"\n"):
                return
            index, prompt_hash = _index_and_hash(line)
            told = f"line {self.count + 1} of {self.path} is no result: {line[:40]!r}; delete it."
            require(index >= 0, told)
            for known in (self.hashes, self.starts):
                known.extend([0] * (index + 1 - len(known)))
            told = f"line {self.count + 1} of {self.path} is a second result for prompt {index}; delete one."
            require(self.hashes[index] == 0, told)
            self.hashes[index], self.starts[index] = prompt_hash, self.end
            self.count += 1
            self.end += len(line)

    def _sort(self, file: BinaryIO) -> None:
        """Put a file with the same lines in order in the place of this one."""
        new = self.path.with_name(f"{self.path.name}.sorting")
        try:
            with open(new, "wb") as in_order:
                shutil.copymode(self.path, new)  # others may not be allowed to read it
                for start in self.starts:
                    file.seek(start)
                    in_order.write(file.readline())
                in_order.flush()
                os.fsync(in_order.fileno())
            os.replace(new, self.path)
        finally:
            new.unlink(missing_ok=True)  # there is still one after an error only


def _index_and_hash(line: bytes) -> tuple[int, int]:
    """The index of the prompt of a line, and its `hash_of`; -1 and 0 if it is no line of ours."""
    try:
        values = json.loads(line)
        index, prompt_hash = values["index"], int(values["prompt_hash"], 16)
    except (ValueError, TypeError, KeyError):
        return -1, 0
    return (index, prompt_hash) if is_int(index) and index >= 0 and 0 < prompt_hash < 2**64 else (-1, 0)


def check_results_path(path: Path) -> Path:
    """Whether a path can be that of a file of results; returns that of the file beside it. Nothing is made there."""
    told = "out= needs the file locks of Linux or macOS; leave it out, and keep the texts yourself."
    require(os.name == "posix", told)
    path = path.resolve()
    name, told_by = f"out={str(path)!r}", path.with_name(f"{path.name}.arguments")
    require(path.is_file() or path.is_dir() or not path.exists(), f"{name} is a device; name a file.")
    check_out(path)
    known = not path.exists() or path.stat().st_size == 0 or told_by.exists()
    told = f"{name} is there already, and there is no {told_by.name} that says what made it; name another file."
    require(known, told)
    require(path not in OPEN, f"{name} is being written by another call in this process; wait for it.")
    return told_by
