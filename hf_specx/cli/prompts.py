"""Where prompts come from: arguments, standard input, or a file of any size."""

import io
import json
import sys
from collections.abc import Iterator
from typing import Any

from hf_specx.common.errors import require

from .options import Prompted


Prompt = str | list[dict[str, Any]]  # a text, or the messages of a chat, each with a role and its content
PROMPT_KEYS = ("prompt", "text", "messages")
JSON_LINES = (".jsonl", ".ndjson")


class FilePrompts:
    """The prompts of a file, read anew each time, or of standard input, which can be read once.

    One per line; in a .jsonl file each line is a text in quotes, or an object. Lines of white space are passed over.
    """

    def __init__(self, given: Prompted):
        self.path, self.chat = given.file, given.chat
        self.name = "standard input" if given.file is None else str(given.file)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Prompt]:
        if self.path is None and sys.stdin.isatty():  # nobody would know that something is waited for
            return
        how: Any = {"encoding": "utf-8-sig", "newline": "\n"}
        as_json = self.path is not None and self.path.suffix.lower() in JSON_LINES
        with io.TextIOWrapper(sys.stdin.buffer, **how) if self.path is None else open(self.path, **how) as lines:
            try:
                for number, line in enumerate((line.rstrip("\r\n") for line in lines if line.strip()), 1):
                    prompt = prompt_of(line, f"{self.name}, prompt {number}") if as_json else line
                    yield as_asked(prompt, self.chat)
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.name} is not text in UTF-8; convert it, as by iconv.") from error


Prompts = list[Prompt] | FilePrompts


def prompt_of(line: str, where: str) -> Prompt:
    """The prompt in a line of JSON: a text, or an object with one of `PROMPT_KEYS`."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: the line is not JSON ({error}).") from error
    if isinstance(found, dict):
        found = next((found[key] for key in PROMPT_KEYS if key in found), None)
    chat = isinstance(found, list) and bool(found)
    chat = chat and all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in found)
    told = f"{where}: give a text in quotes, or an object with {', '.join(PROMPT_KEYS[:-1])} or {PROMPT_KEYS[-1]}, "
    told += "messages being one or more, each with its role and content."
    require(isinstance(found, str) or chat, told)
    return found


def as_asked(prompt: Prompt, chat: bool) -> Prompt:
    """A prompt as messages with --chat, and without it as a text, which messages are not."""
    told = "a prompt is a list of messages; add --chat, which puts them into the chat template."
    require(chat or isinstance(prompt, str), told)
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


def read_prompts(given: Prompted, others: str) -> Prompts:
    """The prompts of --prompts, one by one, or of a pipe, which can be read once: all of them.

    `others` says how to give prompts, where there are none.
    """
    found = FilePrompts(given)
    again = given.file is not None and given.file.is_file()
    prompts = found if again else list(iter(found))  # `list(found)` would ask for the length first, and so read it all
    require(len(prompts) > 0, f"no prompts; give them {others}.")
    return prompts


def prompts_of_file(given: Prompted) -> list[Prompt]:
    """The prompts of --prompts, [] without it; --chat is for them alone."""
    told = "--chat is for the prompts of --prompts FILE; give it, or leave --chat out."
    require(given.file is not None or not given.chat, told)
    return [] if given.file is None else list(read_prompts(given, "with --prompts FILE"))
