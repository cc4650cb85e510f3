"""Where prompts come from: arguments, standard input, a file of any size, or a dataset."""

import importlib.util
import io
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_specx.common.errors import require
from hf_specx.pairs.results_file import JSON_VALUES, PROMPT_KEYS, prompt_and_fields

from .console import imports
from .options import PromptOptions


Prompt = str | list[dict[str, Any]]  # a text, or the messages of a chat, each with a role and its content
Fields = dict[str, Any]  # what else a line or row has, which results give back
JSON_LINES = (".jsonl", ".ndjson")
TRAIN = "train"  # the split of a dataset where none is named
ON_DISK = ("state.json", "dataset_dict.json")  # in a folder that `save_to_disk` of datasets has written


class PromptSource(ABC):
    """Prompts that are read one by one, each time anew."""

    @abstractmethod
    def lines(self) -> Iterator[tuple[Prompt, Fields]]:
        """Each prompt, with the other fields of its line."""

    def __iter__(self) -> Iterator[Prompt]:
        return (prompt for prompt, _ in self.lines())

    def __len__(self) -> int:
        return sum(1 for _ in self)


class FilePrompts(PromptSource):
    """The prompts of a file, or of standard input, which can be read once.

    One per line; in a .jsonl file each line is a text in quotes, or an object. Lines of white space are passed over.
    """

    def __init__(self, source: PromptOptions):
        self.path, self.chat = source.file, source.chat
        self.name = "standard input" if source.file is None else str(source.file)

    def lines(self) -> Iterator[tuple[Prompt, Fields]]:
        """Each prompt, with the other fields of its line."""
        if self.path is None and sys.stdin.isatty():  # nobody would know that something is waited for
            return
        is_json = self.path is not None and self.path.suffix.lower() in JSON_LINES
        with self._open() as file:
            try:
                lines = (line.rstrip("\r\n") for line in file if line.strip())
                for number, line in enumerate(lines, 1):
                    where = f"{self.name}, prompt {number}"
                    prompt, fields = prompt_and_fields(from_json(line, where) if is_json else line, where)
                    yield apply_chat_option(prompt, self.chat), fields
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.name} is not text in UTF-8; convert it, as by iconv.") from error

    def _open(self) -> io.TextIOWrapper:
        if self.path is None:
            return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", newline="\n")
        return open(self.path, encoding="utf-8-sig", newline="\n")


class DatasetPrompts(PromptSource):
    """The rows of a split of a dataset, by the package datasets: of the Hub, or in a folder."""

    def __init__(self, source: PromptOptions):
        self.name, self.chat = f"{source.dataset}, split {source.split or TRAIN}", source.chat
        self.column = source.column
        self.rows = load_rows(str(source.dataset), source.split)
        columns = list(self.rows.column_names)
        keys = PROMPT_KEYS if self.column is None else (self.column,)
        require(
            any(key in columns for key in keys),
            f"{self.name} has the columns {', '.join(columns)}, and none of {', '.join(keys)}; name the one with "
            "prompts, as by --column question.",
        )

    def lines(self) -> Iterator[tuple[Prompt, Fields]]:
        """Each prompt, with the other columns of its row that JSON can hold."""
        for number, row in enumerate(self.rows):
            fields = {name: value for name, value in row.items() if isinstance(value, JSON_VALUES)}
            if self.column is not None:
                if self.column != "prompt" and "prompt" in fields:  # another column, which is none
                    fields["input_prompt"] = fields.pop("prompt")
                fields = {"prompt": row[self.column]} | {x: y for x, y in fields.items() if x != self.column}
            prompt, fields = prompt_and_fields(fields, f"{self.name}, row {number}")
            yield apply_chat_option(prompt, self.chat), fields

    def __len__(self) -> int:
        return len(self.rows)


class ReadPrompts(PromptSource):
    """Prompts that were read from what can be read once."""

    def __init__(self, source: PromptSource):
        self.read = list(source.lines())

    def lines(self) -> Iterator[tuple[Prompt, Fields]]:
        """Each prompt, with the other fields of its line."""
        return iter(self.read)

    def __len__(self) -> int:
        return len(self.read)


Prompts = list[Prompt] | PromptSource


class WithFields:
    """Prompts as `complete` takes them with the other fields of their lines: as objects."""

    def __init__(self, prompts: Prompts):
        self.prompts = prompts

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.prompts, list):
            yield from self.prompts
        else:
            yield from ({"prompt": prompt} | fields if fields else prompt for prompt, fields in self.prompts.lines())

    def __len__(self) -> int:
        return len(self.prompts)


def load_rows(name: str, split: str | None) -> Any:
    """A split of a dataset, which is named by a folder, or an id on the Hub, perhaps with ":" and a configuration."""
    is_installed = importlib.util.find_spec("datasets") is not None
    require(is_installed, "--dataset needs the package datasets, which is not installed; pip install datasets.")
    with imports():
        import datasets
    folder, split = Path(name), split or TRAIN
    configuration: str | None = None
    if not folder.is_dir():
        name, _, configuration = name.partition(":")
    try:
        if folder.is_dir() and any((folder / file).is_file() for file in ON_DISK):
            rows: Any = datasets.load_from_disk(name)
            if isinstance(rows, dict):
                require(split in rows, f"it has the splits {', '.join(rows)}")
                rows = rows[split]
            return rows
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # of many types, also of packages below it
        raise ValueError(
            f"--dataset {name}: the split {split!r} cannot be loaded: {error}; give --split and, after the name, "
            ":CONFIGURATION as the dataset has them."
        ) from error


def from_json(line: str, where: str) -> Any:
    """The value in a line of JSON."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: the line is not JSON ({error}).") from error


def apply_chat_option(prompt: Prompt, chat: bool) -> Prompt:
    """A prompt as messages with --chat, and without it as a text, which messages are not."""
    require(
        chat or isinstance(prompt, str),
        "a prompt is a list of messages; add --chat, which puts them into the chat template.",
    )
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


def read_prompts(source: PromptOptions, others: str) -> Prompts:
    """The prompts of --prompts or --dataset, one by one, or of a pipe, which can be read once: all of them.

    `others` says how to give prompts, where there are none.
    """
    prompts: PromptSource = FilePrompts(source) if source.dataset is None else DatasetPrompts(source)
    if source.dataset is None and (source.file is None or not source.file.is_file()):  # it can be read once
        prompts = ReadPrompts(prompts)
    require(len(prompts) > 0, f"no prompts; give them {others}.")
    return prompts


def prompts_of_file(source: PromptOptions) -> list[Prompt]:
    """The prompts of --prompts or --dataset, [] without both; --chat is for them alone."""
    require(
        source.is_named or not source.chat,
        "--chat is for the prompts of --prompts FILE; give it, or leave --chat out.",
    )
    return list(read_prompts(source, "with --prompts FILE")) if source.is_named else []
