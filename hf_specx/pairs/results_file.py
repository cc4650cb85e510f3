"""Results of many prompts, one JSON object a line: a file that a process fills and may leave at any moment.

`done.jsonl` gets a line as soon as a text is ready, and has them in the order of the prompts once it is complete.
`done.jsonl.arguments` says what it was made with. Of several processes each completes the prompts of its share, the
first one to `done.jsonl` and process i to `done.jsonl.rank<i>`; whatever any of these files holds is done. At the end
the first process waits for the others, and moves their lines to `done.jsonl`. One call at a time has a file: beside
each is a lock, which the system frees when its process ends, however it ends.
"""

import glob
import hashlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hf_specx.common.errors import brief, is_int, require
from hf_specx.hub.folders import check_out
from hf_specx.hub.locks import LOCK, check_free, locked


LOOK_EVERY = 0.2  # seconds, while the first process is waited for
LOOKS, SURE = 10, 3  # looks for each try of the first process's lock, and how often it has to be free


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
def open_results(
    path: str | Path,
    arguments: dict[str, Any],
    rank: int = 0,
    world_size: int = 1,
    together: Callable[[Callable[[], Iterable[Any]]], Any] = lambda begin: begin(),
) -> Iterator["Results"]:
    """Open a file of results, or make one; if its texts depend on other arguments than these it is refused.

    Args:
        path: of the file.
        arguments: what its texts depend on.
        rank, world_size: of this process among those that make the call.
        together: calls a function on all these processes, waits for them, and raises the error of one in all.
    """
    path = Path(path).resolve()  # so that a link stays one
    arguments_path = check_results_path(path)
    filled = path if rank == 0 else part_path(path, rank)
    with ExitStack() as stack:

        def begin() -> Iterable[Any]:
            stack.enter_context(locked(filled))
            if rank > 0:
                filled.touch()  # before the first process may end, which waits for what is there
            else:
                for part in parts_of(path, world_size):  # of an earlier call, with more processes
                    check_free(part)
                if not _is_begun(path):
                    new = arguments_path.with_name(f"{arguments_path.name}.new")
                    new.write_text(json.dumps(arguments, indent=1))
                    os.replace(new, arguments_path)
            return ()

        together(begin)
        made_with = stack.enter_context(open(arguments_path, "rb"))  # open, so that a later one is another inode
        results = Results(path, filled, made_with, rank, world_size)
        results.read()
        results.check_arguments(arguments)
        yield results


def part_path(path: Path, rank: int) -> Path:
    """The file that a process fills which is not the first one."""
    return path.with_name(f"{path.name}.rank{rank}")


def parts_of(path: Path, first: int = 1) -> list[Path]:
    """The files beside a file of results that processes from `first` on have filled, or fill."""
    name = f"{path.name}.rank"
    paths = path.parent.glob(f"{glob.escape(name)}*")
    ranks = sorted(int(rank) for rank in (each.name.removeprefix(name) for each in paths) if rank.isdecimal())
    return [part_path(path, rank) for rank in ranks if rank >= first]


class ResultLines:
    """The lines of one file, of which 16 bytes are kept for each prompt."""

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.inode, self.end, self.count = -1, 0, 0
        self.hashes = array("Q")  # of prompts, 0 for those without a result
        self.starts = array("Q")  # where in the file their results are

    def hash_at(self, index: int) -> int:
        """The hash of the prompt that has a result of this index, else 0."""
        return self.hashes[index] if index < len(self.hashes) else 0

    def read(self, file: BinaryIO) -> None:
        """Read the whole lines behind those that were read; all where another file is in place of ours."""
        status = os.fstat(file.fileno())
        if status.st_ino != self.inode or status.st_size < self.end:  # a new file may get the number of a deleted one
            self._forget()
            self.inode = status.st_ino
        file.seek(self.end)
        for line in file:
            if not line.endswith(b"\n"):
                return
            index, prompt_hash = _index_and_hash(line)
            where = f"line {self.count + 1} of {self.path}"
            require(index >= 0, f"{where} is no result: {line[:40]!r}; delete it.")
            for numbers in (self.hashes, self.starts):
                numbers.extend([0] * (index + 1 - len(numbers)))
            require(self.hashes[index] == 0, f"{where} is a second result for prompt {index}; delete one.")
            self.hashes[index], self.starts[index] = prompt_hash, self.end
            self.count += 1
            self.end += len(line)

    def append(self, file: BinaryIO, line: bytes) -> None:
        """Write a line behind those that were read; it is in the hands of the system then."""
        file.truncate(self.end)  # a process that is killed may leave half a line
        file.write(line)
        file.flush()
        self.read(file)

    def of(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """The lines that were read, by the indices of their prompts."""
        for index, (prompt_hash, start) in enumerate(zip(self.hashes, self.starts, strict=True)):
            if prompt_hash:
                file.seek(start)
                yield index, file.readline()


class Results:
    """The results of prompts in all files of a call, of which this process fills one."""

    def __init__(self, path: Path, filled: Path, made_with: BinaryIO, rank: int, world_size: int):
        self.path, self.made_with, self.rank, self.world_size = path, made_with, rank, world_size
        self.filled = ResultLines(filled)
        self.others: list[ResultLines] = []  # as they were when this call began
        self.prompts = 0  # how many there are, as far as they were read

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise ValueError if the file was made with other arguments than these."""
        earlier: Any = None
        self.made_with.seek(0)
        with suppress(ValueError):
            earlier = json.loads(self.made_with.read())
        now = json.loads(json.dumps(arguments))
        unsaid = f"{self.made_with.name} does not say what made it; name another file."
        require(isinstance(earlier, dict), f"{self.path} is there already, and {unsaid}")
        for key in sorted(now.keys() | earlier.keys(), key=lambda key: (key == "do_sample", key)):
            # do_sample last, which a command adds to a temperature
            both = (f"with {key}={brief(of[key])}" if key in of else f"without {key}" for of in (earlier, now))
            message = f"{self.path} was made {', now '.join(both)}; give the same, or another file."
            require(earlier.get(key) == now.get(key), message)

    def read(self) -> None:
        """Read what all files hold, and make that of this process if there is none."""
        with self._opened() as file:
            self.filled.read(file)
        self.others = [ResultLines(each) for each in (self.path, *parts_of(self.path)) if each != self.filled.path]
        for lines in self.others:
            with suppress(FileNotFoundError), open(lines.path, "rb") as file:
                lines.read(file)

    def is_done(self, prompt: NumberedText) -> bool:
        """Whether there is a result of a prompt; a ValueError if there is one of another prompt of its index."""
        hashes = {lines.hash_at(prompt.index) for lines in (self.filled, *self.others)} - {0}
        message = f"prompt {prompt.index} is not the one that {self.path} has a result for; give the same prompts in "
        message += "the same order, more of them after these, or another file."
        require(hashes <= {hash_of(prompt.text)}, message)
        return bool(hashes)

    def missing(self, prompts: Iterable[NumberedText]) -> Iterator[NumberedText]:
        """Those of the share of this process that have no result."""
        for prompt in prompts:
            self.prompts = max(self.prompts, prompt.index + 1)
            if not self.is_done(prompt) and prompt.index % self.world_size == self.rank:
                yield prompt

    def count_of_share(self) -> int:
        """How many prompts of the share of this process had a result when the files were read."""
        longest = max(len(lines.hashes) for lines in (self.filled, *self.others))
        share = range(self.rank, longest, self.world_size)
        return sum(any(lines.hash_at(index) for lines in (self.filled, *self.others)) for index in share)

    def append(self, result: CompletedText) -> None:
        """Write the result of a prompt."""
        with self._opened() as file:
            same = os.path.samestat(os.stat(self.made_with.name), os.fstat(self.made_with.fileno()))
            require(same, f"another call has begun {self.path} anew; name another file.")
            self.filled.read(file)
            if not self.is_done(result.prompt):
                self.filled.append(file, result.line())

    def finish(self) -> None:
        """Take up the lines of the other processes once these have ended, and put all in order, on disk."""
        parts = parts_of(self.path)
        for part in parts:
            with locked(part, wait=True):
                self._take_up(part)
        lines = self.filled
        with self._opened() as file:
            lines.read(file)
            state = f"{self.path} has {lines.count} results for {self.prompts} prompts, "
            other = len(lines.hashes) > self.prompts
            require(not other, f"{state}some of them for others; give the same prompts, or name another file.")
            lost = "since some were removed meanwhile, or a process ended early; make the same call again."
            require(lines.count == self.prompts, f"{state}{lost}")
            file.truncate(lines.end)
            os.fsync(file.fileno())
            if any(start > after for start, after in pairwise(lines.starts)):
                self._sort(file)
        for part in parts:  # now, since a process whose file is gone returns, and may call again
            part.with_name(part.name + LOCK).unlink(missing_ok=True)
            part.unlink()

    def wait_for_first(self) -> None:
        """Wait until the first process has taken up the file of this one, which has closed it."""
        part, looks, free = self.filled.path, 0, 0
        while part.exists():
            time.sleep(LOOK_EVERY)
            looks += 1
            if looks % LOOKS:  # the lock is seldom tried, since whoever tries it has it for a moment
                continue
            try:
                check_free(self.path)
                free += 1
            except ValueError:  # the first process has it
                free = 0
            message = f"the first process ended before {self.path} was complete; make the same call again."
            # more than once: a lock that is just made or given back may look free
            require(free < SURE or not part.exists(), message)

    def _take_up(self, part: Path) -> None:
        """Append the lines of another process, but those of prompts that have a result."""
        lines = ResultLines(part)
        with open(part, "rb") as source, self._opened() as file:
            lines.read(source)
            self.filled.read(file)
            for index, line in lines.of(source):
                if not self.filled.hash_at(index):
                    self.filled.append(file, line)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """The file that this process fills, which may have been taken away meanwhile."""
        try:
            with open(self.filled.path, "a+b") as file:
                yield file
        except OSError as error:
            message = f"the same call goes on from the {self.filled.count} results that are in {self.filled.path.name}"
            filename = error.filename or str(self.filled.path)
            raise OSError(error.errno, f"{error.strerror}; {message}", filename) from error

    def _sort(self, file: BinaryIO) -> None:
        """Put a file with the same lines in order in the place of this one."""
        new = self.path.with_name(f"{self.path.name}.sorting")
        try:
            with open(new, "wb") as in_order:
                shutil.copymode(self.path, new)  # others may not be allowed to read it
                in_order.writelines(line for _, line in self.filled.of(file))
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
    """Raise ValueError if a path cannot be that of a file of results; returns that of the file beside it.

    Nothing is made there.
    """
    path = path.resolve()
    name, arguments_path = f"out={str(path)!r}", path.with_name(f"{path.name}.arguments")
    require(path.is_file() or path.is_dir() or not path.exists(), f"{name} is a device; name a file.")
    check_out(path)
    unsaid = f"there is no {arguments_path.name} that says what made it; name another file."
    require(arguments_path.exists() or not _is_begun(path), f"{name} is there already, and {unsaid}")
    return arguments_path


def _is_begun(path: Path) -> bool:
    """Whether a file of results, or one beside it that another process fills, has anything in it."""
    return any(each.exists() and each.stat().st_size for each in (path, *parts_of(path)))
