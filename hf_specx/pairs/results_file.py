"""Results of many prompts, one JSON object a line: a file that a process appends to, and may be killed at any moment.

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
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hf_specx.common.chats import is_chat
from hf_specx.common.errors import brief, is_int, require, shortened
from hf_specx.hub.folders import check_out
from hf_specx.hub.locks import LOCK, check_free, locked


LOOK_EVERY = 0.2  # seconds, while the first process is waited for
LOOKS_PER_TRY = 10  # how often the file is looked for between two tries of the first process's lock
FREE_TRIES = 3  # how often in a row the lock has to be free until the first process is taken to have ended
PROMPT_KEYS = ("prompt", "text", "messages")  # of an object that is a prompt with other fields
RESULT_KEYS = ("index", "prompt_hash", "text", "finish_reason", "error")  # of a line of results
LONG_BEGINNING = 40  # characters of a value; half of them are shown
JSON_VALUES = (str, int, float, bool, list, dict, type(None))


@dataclass(frozen=True)
class NumberedText:
    """A prompt and its index among all prompts; the other fields of its line, which its result gives back."""

    index: int
    text: str
    fields: dict[str, Any] = field(default_factory=dict, compare=False)


class CompletedText(NamedTuple):
    """The result of a prompt: its text, or None and an error if it was refused."""

    prompt: NumberedText
    text: str | None
    finish_reason: str
    error: str | None = None

    def line(self) -> bytes:
        """The line of JSON in the file."""
        values = {"index": self.prompt.index, "prompt_hash": f"{hash_of(self.prompt.text):016x}", "text": self.text}
        values |= {"finish_reason": self.finish_reason} | ({} if self.error is None else {"error": self.error})
        values |= self.prompt.fields
        return json.dumps(values, ensure_ascii=False).encode() + b"\n"


def prompt_and_fields(value: Any, where: str) -> tuple[str | list[dict[str, Any]], dict[str, Any]]:
    """A prompt, and of an object its other fields; the prompt is under the first of `PROMPT_KEYS` that it has.

    Raises:
        ValueError: the prompt is no text and no list of messages, or a line of JSON does not hold the fields; the
            message begins with `where`.
    """
    prompt: Any = value
    fields: dict[str, Any] = {}
    if isinstance(value, dict):
        key = next((key for key in PROMPT_KEYS if key in value), None)
        require(key is not None, f"{where} has none of the fields {', '.join(PROMPT_KEYS)}; give one of them.")
        prompt = value[key]
        fields = _fields_of_line({name: other for name, other in value.items() if name != key}, where)
    require(
        isinstance(prompt, str) or is_chat(prompt),
        f"{where} is {brief(prompt)}; give a text, or one or more messages, each with its role and content.",
    )
    return prompt, fields


def _fields_of_line(values: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of a prompt's line as its result gives them back: those that it has of its own as "input_...".

    A ValueError for what a line of JSON does not hold.
    """
    fields: dict[str, Any] = {}
    for name, value in values.items():
        while name in RESULT_KEYS or name in fields:
            name = f"input_{name}"
        fields[name] = value
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        message = (
            f"{where}: its fields come back in a line of JSON, which does not hold them ({error}); leave them out."
        )
        raise ValueError(message) from error
    return fields


def hash_of(text: str) -> int:
    """64 bits that tell one prompt from another, never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") or 1


@contextmanager
def open_results(
    path: str | Path,
    arguments: dict[str, Any],
    rank: int = 0,
    world_size: int = 1,
    on_all_processes: Callable[[Callable[[], Iterable[Any]]], Any] = lambda function: function(),
) -> Iterator["Results"]:
    """Open a file of results, or make one; if its texts depend on other arguments than these it is refused.

    Args:
        path: of the file.
        arguments: what its texts depend on.
        rank, world_size: of this process among those that make the call.
        on_all_processes: calls a function on all these processes, waits for them, and raises the error of one in all.
    """
    path = Path(path).resolve()  # so that a link stays one
    arguments_path = check_results_path(path)
    own_path = path if rank == 0 else part_path(path, rank)
    with ExitStack() as stack:

        def lock_files() -> Iterable[Any]:
            stack.enter_context(locked(own_path))
            if rank > 0:
                own_path.touch()  # before the first process may end, which waits for what is there
            else:
                for part in parts_of(path, world_size):  # of an earlier call, with more processes
                    check_free(part)
                if not _is_begun(path):
                    new = arguments_path.with_name(f"{arguments_path.name}.new")
                    new.write_text(json.dumps(arguments, indent=1))
                    os.replace(new, arguments_path)
            return ()

        on_all_processes(lock_files)
        arguments_file = stack.enter_context(open(arguments_path, "rb"))  # open, so that a later one is another inode
        results = Results(path, own_path, arguments_file, rank, world_size)
        results.read()
        results.check_arguments(arguments)
        yield results


def part_path(path: Path, rank: int) -> Path:
    """The file that a process writes to which is not the first one."""
    return path.with_name(f"{path.name}.rank{rank}")


def parts_of(path: Path, first: int = 1) -> list[Path]:
    """The files beside a file of results that processes from `first` on write to, or have written to."""
    prefix = f"{path.name}.rank"
    endings = [part.name.removeprefix(prefix) for part in path.parent.glob(f"{glob.escape(prefix)}*")]
    ranks = sorted(int(ending) for ending in endings if ending.isdecimal())
    return [part_path(path, rank) for rank in ranks if rank >= first]


class ResultLines:
    """The lines of one file, of which 16 bytes are kept for each prompt."""

    def __init__(self, path: Path):
        self.path = path
        self._reset()

    def _reset(self) -> None:
        """Begin with no lines."""
        self.inode = -1
        self.end = 0  # of the lines that were read, in bytes
        self.count = 0  # of these lines
        self.hashes = array("Q")  # of prompts, 0 for those without a result
        self.starts = array("Q")  # where in the file their results are

    def hash_at(self, index: int) -> int:
        """The hash of the prompt that has a result of this index, else 0."""
        return self.hashes[index] if index < len(self.hashes) else 0

    def read(self, file: BinaryIO) -> None:
        """Read the complete lines that were added since the last call; all of them if the file was replaced."""
        status = os.fstat(file.fileno())
        if status.st_ino != self.inode or status.st_size < self.end:  # a new file may get the number of a deleted one
            self._reset()
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
        """Append a line after those that were read, and flush it to the system."""
        file.truncate(self.end)  # a process that is killed may leave half a line
        file.write(line)
        file.flush()
        self.read(file)

    def in_order(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """The lines that were read in the order of their prompts, each with its prompt's index."""
        for index, (prompt_hash, start) in enumerate(zip(self.hashes, self.starts, strict=True)):
            if prompt_hash:
                file.seek(start)
                yield index, file.readline()


class Results:
    """The results of prompts in all files of a call, of which this process writes to one.

    Attributes:
        path: of the file that has all results in the end.
        own_lines: of the file that this process writes to.
        other_lines: of the other files, as they were when this call began.
        num_prompts: how many there are, as far as they were read.
    """

    def __init__(self, path: Path, own_path: Path, arguments_file: BinaryIO, rank: int, world_size: int):
        self.path, self.arguments_file = path, arguments_file
        self.rank, self.world_size = rank, world_size
        self.own_lines = ResultLines(own_path)
        self.other_lines: list[ResultLines] = []
        self.num_prompts = 0

    @property
    def all_lines(self) -> list[ResultLines]:
        """The lines of all files."""
        return [self.own_lines, *self.other_lines]

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raise ValueError if the file was made with other arguments than these."""
        earlier: Any = None
        self.arguments_file.seek(0)
        with suppress(ValueError):
            earlier = json.loads(self.arguments_file.read())
        now = json.loads(json.dumps(arguments))
        require(
            isinstance(earlier, dict),
            f"{self.path} is there already, and {self.arguments_file.name} does not say what made it; name another "
            "file.",
        )
        for key in sorted(now.keys() | earlier.keys(), key=lambda key: (key == "do_sample", key)):
            # do_sample last, which a command adds to a temperature
            require(
                earlier.get(key) == now.get(key),
                f"{self.path} was made {_argument(key, earlier, now)}, now {_argument(key, now, earlier)}; give the "
                "same, or another file.",
            )

    def read(self) -> None:
        """Read the lines of all files; the file of this process is made if it does not exist."""
        with self._opened() as file:
            self.own_lines.read(file)
        paths = [self.path, *parts_of(self.path)]
        self.other_lines = [ResultLines(path) for path in paths if path != self.own_lines.path]
        for lines in self.other_lines:
            with suppress(FileNotFoundError), open(lines.path, "rb") as file:
                lines.read(file)

    def is_done(self, prompt: NumberedText) -> bool:
        """Whether there is a result of a prompt; a ValueError if there is one of another prompt of its index."""
        hashes = {lines.hash_at(prompt.index) for lines in self.all_lines} - {0}
        require(
            hashes <= {hash_of(prompt.text)},
            f"prompt {prompt.index} is not the one that {self.path} has a result for; give the same prompts in the "
            "same order, more of them after these, or another file.",
        )
        return bool(hashes)

    def missing(self, prompts: Iterable[NumberedText]) -> Iterator[NumberedText]:
        """Yield the prompts in the share of this process that have no result yet."""
        for prompt in prompts:
            self.num_prompts = max(self.num_prompts, prompt.index + 1)
            if not self.is_done(prompt) and prompt.index % self.world_size == self.rank:
                yield prompt

    def count_of_share(self) -> int:
        """The number of prompts in the share of this process that had a result when the files were read."""
        largest = max(len(lines.hashes) for lines in self.all_lines)
        share = range(self.rank, largest, self.world_size)
        return sum(any(lines.hash_at(index) for lines in self.all_lines) for index in share)

    def append(self, result: CompletedText) -> None:
        """Write the result of a prompt."""
        with self._opened() as file:
            status = os.fstat(self.arguments_file.fileno())
            is_same = os.path.samestat(os.stat(self.arguments_file.name), status)
            require(is_same, f"another call has begun {self.path} anew; name another file.")
            self.own_lines.read(file)
            if not self.is_done(result.prompt):
                self.own_lines.append(file, result.line())

    def finish(self) -> None:
        """Wait for the other processes, move their lines into the file, and sort it by prompt."""
        parts = parts_of(self.path)
        for part in parts:
            with locked(part, wait=True):
                self._merge(part)
        lines = self.own_lines
        with self._opened() as file:
            lines.read(file)
            state = f"{self.path} has {lines.count} results for {self.num_prompts} prompts, "
            require(
                len(lines.hashes) <= self.num_prompts,
                f"{state}some of them for others; give the same prompts, or name another file.",
            )
            require(
                lines.count == self.num_prompts,
                f"{state}since some were removed meanwhile, or a process ended early; make the same call again.",
            )
            file.truncate(lines.end)
            os.fsync(file.fileno())
            if any(start > after for start, after in pairwise(lines.starts)):
                self._sort(file)
        for part in parts:  # now, since a process whose file is gone returns, and may call again
            part.with_name(part.name + LOCK).unlink(missing_ok=True)
            part.unlink()

    def wait_for_first(self) -> None:
        """Wait until the first process has moved the lines of this one into its file."""
        part = self.own_lines.path
        looks = 0
        free_tries = 0
        while part.exists():
            time.sleep(LOOK_EVERY)
            looks += 1
            if looks % LOOKS_PER_TRY:  # the lock is seldom tried, since whoever tries it has it for a moment
                continue
            try:
                check_free(self.path)
                free_tries += 1
            except ValueError:  # the first process has it
                free_tries = 0
            # more than once: a lock that is just made or given back may look free
            require(
                free_tries < FREE_TRIES or not part.exists(),
                f"the first process ended before {self.path} was complete; make the same call again.",
            )

    def _merge(self, part: Path) -> None:
        """Append the lines of another process, except those of prompts that have a result already."""
        lines = ResultLines(part)
        with open(part, "rb") as source, self._opened() as file:
            lines.read(source)
            self.own_lines.read(file)
            for index, line in lines.in_order(source):
                if not self.own_lines.hash_at(index):
                    self.own_lines.append(file, line)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """A context with the file that this process writes to; an OSError says how to go on."""
        path = self.own_lines.path
        try:
            with open(path, "a+b") as file:
                yield file
        except OSError as error:
            message = f"{error.strerror}; the same call goes on from the {self.own_lines.count} results in {path.name}"
            raise OSError(error.errno, message, error.filename or str(path)) from error

    def _sort(self, file: BinaryIO) -> None:
        """Replace the file by one with its lines in the order of prompts."""
        new = self.path.with_name(f"{self.path.name}.sorting")
        try:
            with open(new, "wb") as sorted_file:
                shutil.copymode(self.path, new)  # others may not be allowed to read it
                sorted_file.writelines(line for _, line in self.own_lines.in_order(file))
                sorted_file.flush()
                os.fsync(sorted_file.fileno())
            os.replace(new, self.path)
        finally:
            new.unlink(missing_ok=True)  # there is still one after an error only


def _argument(name: str, arguments: dict[str, Any], others: dict[str, Any]) -> str:
    """The words "with NAME=VALUE", or "without NAME"; a long beginning that others have too is left out."""
    if name not in arguments:
        return f"without {name}"
    text, other = repr(arguments[name]), repr(others.get(name))
    num_shared = len(list(takewhile(lambda both: both[0] == both[1], zip(text, other, strict=False))))
    if num_shared > LONG_BEGINNING:
        text = f"...{text[num_shared - LONG_BEGINNING // 2 :]}"
    return f"with {name}={shortened(text)}"


def _index_and_hash(line: bytes) -> tuple[int, int]:
    """The index of the prompt of a line, and its `hash_of`; -1 and 0 if it is no line of ours."""
    try:
        values = json.loads(line)
        index, prompt_hash = values["index"], int(values["prompt_hash"], 16)
    except (ValueError, TypeError, KeyError):
        return -1, 0
    if not is_int(index) or index < 0 or not 0 < prompt_hash < 2**64:
        return -1, 0
    return index, prompt_hash


def check_results_path(path: Path) -> Path:
    """Raise ValueError if a path cannot be that of a file of results; returns the path of its arguments.

    Nothing is made there.
    """
    path = path.resolve()
    arguments_path = path.with_name(f"{path.name}.arguments")
    option = f"out={str(path)!r}"
    require(path.is_file() or path.is_dir() or not path.exists(), f"{option} is a device; name a file.")
    check_out(path)
    require(
        arguments_path.exists() or not _is_begun(path),
        f"{option} is there already, and there is no {arguments_path.name} that says what made it; name another file.",
    )
    return arguments_path


def _is_begun(path: Path) -> bool:
    """Whether a file of results, or one beside it that another process writes to, has anything in it."""
    return any(file.exists() and file.stat().st_size for file in (path, *parts_of(path)))
