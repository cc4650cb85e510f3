"""Where commands read prompts: arguments, files, standard input."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from hf_specx.common.errors import require


HELP_FILE = 'Prompts: one a line, or in a .jsonl file one {"prompt": ...} a line.'
PromptFile = Annotated[Path | None, typer.Option("--file", "--prompts", help=HELP_FILE, exists=True, dir_okay=False)]


class FilePrompts:
    """The prompts of a file, read one by one each time; lines without any are passed over.

    Args:
        path: one prompt a line; in a file that ends in .jsonl one JSON object a line, with a "prompt".

    Raises:
        ValueError: while they are read, for a line that has no prompt.
    """

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[str]:
        for number, line in self._lines():
            yield self._prompt(number, line) if self.path.suffix == ".jsonl" else line

    def __len__(self) -> int:
        return sum(1 for _ in self._lines())

    def _lines(self) -> Iterator[tuple[int, str]]:
        with open(self.path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line.removesuffix("\n")

    def _prompt(self, number: int, line: str) -> str:
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        prompt = values.get("prompt") if isinstance(values, dict) else None
        told = f'line {number} of {self.path} has no prompt: {line[:40]!r}; write {{"prompt": "..."}}.'
        require(isinstance(prompt, str), told)
        assert isinstance(prompt, str)
        return prompt


def given_prompts(prompts: list[str], file: Path | None, others: str, demo: bool = False) -> Iterable[str]:
    """The prompts, from the arguments, a file or standard input; [] for the demo, which has its own.

    Args:
        prompts: the arguments.
        file: see `FilePrompts`.
        others: the ways to give prompts, for the error.
        demo: whether the demo was asked for.

    Raises:
        ValueError: there are no prompts, or they were given in several ways.
    """
    ways = bool(prompts) + demo + (file is not None)
    require(ways <= 1, "prompts were given in more than one way; use arguments, --file or --demo.")
    if prompts or demo:
        return prompts
    found: FilePrompts | list[str] = []
    if file is not None:
        found = FilePrompts(file)
    elif not sys.stdin.isatty():
        found = [line for line in sys.stdin.read().splitlines() if line.strip()]
    require(len(found) > 0, f"no prompts; give them {others}.")
    return found


def read_prompts(prompts: list[str], file: Path | None, others: str, demo: bool = False) -> list[str]:
    """All of `given_prompts`, read at once."""
    return list(given_prompts(prompts, file, others, demo))
