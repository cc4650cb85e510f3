"""The prompts of a file of any size, read one by one."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_specx.common.errors import require

from .options import JSON_LINES, Messages, prompt_of, read_prompts


Prompts = list[str | Messages]


def given_prompts(prompts: list[str], file: Path | None, others: str, demo: bool) -> "Prompts | FilePrompts":
    """As `read_prompts`, but those of a file are read one by one; a pipe, which can be read once, is read whole."""
    if file is None or prompts or demo or not file.is_file():
        return read_prompts(prompts, file, others, demo)
    found = FilePrompts(file)
    require(len(found) > 0, f"no prompts; give them {others}.")
    return found


def prompts_of_file(file: Path | None, chat: bool) -> Prompts:
    """The prompts of --file, [] without one; --chat is for them alone."""
    require(file is not None or not chat, "--chat is for prompts of --file; give it, or leave --chat out.")
    prompts = [] if file is None else read_prompts([], file, "with --file")
    check_messages(prompts, chat)
    return prompts


def check_messages(prompts: "Iterable[str | Messages]", chat: bool) -> None:
    """Raise a ValueError, before models are loaded, if prompts are messages and --chat was not given."""
    told = "a prompt is a list of messages; add --chat, which puts them into the chat template."
    require(chat or all(isinstance(prompt, str) for prompt in prompts), told)


class FilePrompts:
    """The prompts of a file, read anew each time; its length is the number of prompts.

    Args:
        path: one prompt per line; in a .jsonl file each line is a text in quotes, or an object. Lines of white space
            are passed over.

    Raises:
        ValueError: for a line that is no prompt, when it is read.
    """

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[str | Messages]:
        for number, line in enumerate(self._lines(), 1):
            found = self.path.suffix in JSON_LINES
            yield prompt_of(line, f"{self.path}, prompt {number}") if found else line

    def __len__(self) -> int:
        return sum(1 for _ in self._lines())

    def _lines(self) -> Iterator[str]:
        with open(self.path, encoding="utf-8-sig", newline="\n") as lines:
            try:
                yield from (line.rstrip("\r\n") for line in lines if line.strip())
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.path} is not text in UTF-8; convert it, as by iconv.") from error
