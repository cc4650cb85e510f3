"""Where prompts come from: arguments, standard input, or a file of any size."""

import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_specx.common.errors import require

from .options import Prompted


Messages = list[dict[str, Any]]  # of a chat, each with a role and its content
Prompts = Sequence[str | Messages]
PROMPT_KEYS = ("prompt", "text", "messages")
JSON_LINES = (".jsonl", ".ndjson")


class FilePrompts:
    """The prompts of a file, read anew each time, or of standard input, which can be read once.

    One per line; in a .jsonl file each line is a text in quotes, or an object. Lines of white space are passed over.
    """

    def __init__(self, path: Path | None):
        self.path, self.name = path, "standard input" if path is None else str(path)

    def __iter__(self) -> Iterator[str | Messages]:
        as_json = self.path is not None and self.path.suffix in JSON_LINES
        for number, line in enumerate(self._lines(), 1):
            yield prompt_of(line, f"{self.name}, prompt {number}") if as_json else line

    def __len__(self) -> int:
        return sum(1 for _ in self._lines())

    def _lines(self) -> Iterator[str]:
        if self.path is None and sys.stdin.isatty():  # nobody would know that something is waited for
            return
        how: Any = {"encoding": "utf-8-sig", "newline": "\n"}
        with io.TextIOWrapper(sys.stdin.buffer, **how) if self.path is None else open(self.path, **how) as lines:
            try:
                yield from (line.rstrip("\r\n") for line in lines if line.strip())
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.name} is not text in UTF-8; convert it, as by iconv.") from error


def prompt_of(line: str, where: str) -> str | Messages:
    """The prompt in a line of JSON: a text, or an object with one of `PROMPT_KEYS`."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: the line is not JSON ({error}).") from error
    if isinstance(found, dict):
        found = next((found[key] for key in PROMPT_KEYS if key in found), None)
    chat = isinstance(found, list) and bool(found)
    chat = chat and all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in found)
    told = f"{where}: give a text in quotes, or an object with {', '.join(PROMPT_KEYS[:-1])} or {PROMPT_KEYS[-1]}."
    require(isinstance(found, str) or chat, told)
    return found


def read_prompts(given: Prompted, others: str) -> Prompts | FilePrompts:
    """The prompts of --prompts, one by one, or of a pipe, which can be read once: all of them.

    Without --chat none is a list of messages; `others` says how to give prompts, where there are none.
    """
    found: Prompts | FilePrompts = FilePrompts(given.file)
    if given.file is None or not given.file.is_file():
        found = list(iter(found))  # `list(found)` would ask for the length first, and so read it all
    require(len(found) > 0, f"no prompts; give them {others}.")
    told = "a prompt is a list of messages; add --chat, which puts them into the chat template."
    require(given.chat or all(isinstance(prompt, str) for prompt in found), told)
    return found


def prompts_of_file(given: Prompted) -> Prompts:
    """The prompts of --prompts, [] without it; --chat is for them alone."""
    told = "--chat is for the prompts of --prompts FILE; give it, or leave --chat out."
    require(given.file is not None or not given.chat, told)
    return [] if given.file is None else list(read_prompts(given, "with --prompts FILE"))
