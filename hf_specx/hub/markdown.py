"""Markdown for text that is not trusted: it cannot end a table cell, a code span or a fenced block."""

import re
from collections.abc import Iterable


def one_line(text: str) -> str:
    """The text with each run of white space as one space."""
    return " ".join(text.split())


def escaped(text: str) -> str:
    """The text in one line, with all characters escaped that mean something to markdown or HTML."""
    return re.sub(r"([\\`*_\[\]<>#|&~])", r"\\\1", one_line(text))


def code(text: str | int | None) -> str:
    """A code span in one line; "" for an empty text and for None."""
    line = one_line("" if text is None else str(text))
    ticks = "`" * (_longest_run(line) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{space}{line}{space}{ticks}" if line else ""


def fence(text: str, language: str) -> str:
    """A fenced block."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text.strip()}\n{ticks}"


def row(cells: Iterable[str]) -> str:
    """A row of a table; bars within its cells, which have no line breaks, are escaped."""
    bars = (re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", cell) for cell in cells)
    return f"| {' | '.join(bars)} |"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall(r"`+", text)), default=0)
