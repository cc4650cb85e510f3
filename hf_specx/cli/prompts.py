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

    def __init__(self, source: Prompted):
        self.path, self.chat = source.file, source.chat
        self.name = "standard input" if source.file is None else str(source.file)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Prompt]:
        if self.path is None and sys.stdin.isatty():  # nobody would know that something is waited for
            return
        is_json = self.path is not None and self.path.suffix.lower() in JSON_LINES
        with self._open() as file:
            try:
                lines = (line.rstrip("\r\n") for line in file if line.strip())
                for number, line in enumerate(lines, 1):
                    prompt = prompt_of(line, f"{self.name}, prompt {number}") if is_json else line
                    yield apply_chat_option(prompt, self.chat)
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.name} is not text in UTF-8; convert it, as by iconv.") from error

    def _open(self) -> io.TextIOWrapper:
        if self.path is None:
            return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", newline="\n")
        return open(self.path, encoding="utf-8-sig", newline="\n")


Prompts = list[Prompt] | FilePrompts


def prompt_of(line: str, where: str) -> Prompt:
    """The prompt in a line of JSON: a text, or an object with one of `PROMPT_KEYS`."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: the line is not JSON ({error}).") from error
    if isinstance(value, dict):
        value = next((value[key] for key in PROMPT_KEYS if key in value), None)
    require(
        isinstance(value, str) or is_chat(value),
        f"{where}: give a text in quotes, or an object with {', '.join(PROMPT_KEYS[:-1])} or {PROMPT_KEYS[-1]}, "
        "messages being one or more, each with its role and content.",
    )
    return value


def is_chat(value: Any) -> bool:
    """Whether a value is one or more messages."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)


def apply_chat_option(prompt: Prompt, chat: bool) -> Prompt:
    """A prompt as messages with --chat, and without it as a text, which messages are not."""
    require(
        chat or isinstance(prompt, str),
        "a prompt is a list of messages; add --chat, which puts them into the chat template.",
    )
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


def read_prompts(source: Prompted, others: str) -> Prompts:
    """The prompts of --prompts, one by one, or of a pipe, which can be read once: all of them.

    `others` says how to give prompts, where there are none.
    """
    prompts: Prompts = FilePrompts(source)
    if source.file is None or not source.file.is_file():  # it can be read once
        prompts = list(iter(prompts))  # `list(prompts)` would ask for the length first, and so read it all
    require(len(prompts) > 0, f"no prompts; give them {others}.")
    return prompts


def prompts_of_file(source: Prompted) -> list[Prompt]:
    """The prompts of --prompts, [] without it; --chat is for them alone."""
    require(
        source.file is not None or not source.chat,
        "--chat is for the prompts of --prompts FILE; give it, or leave --chat out.",
    )
    return [] if source.file is None else list(read_prompts(source, "with --prompts FILE"))
