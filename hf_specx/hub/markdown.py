"""Markdown in which text from elsewhere stays text: it cannot end a cell, a code span or a fenced block."""

import re
from collections.abc import Iterable


def one_line(text: str) -> str:
    """White space of any kind as single spaces."""
    return " ".join(text.split())


def escaped(text: str) -> str:
    """One line that means nothing to markdown or HTML."""
    return re.sub(r"([\\`*_\[\]<>#|&~])", r"\\\1", one_line(text))


def code(text: str) -> str:
    """A code span of one line; nothing for no text."""
    line = one_line(text)
    ticks = "`" * (_longest_run(line) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{space}{line}{space}{ticks}" if line else ""


def fence(text: str, language: str) -> str:
    """A fenced block."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text.strip()}\n{ticks}"


def row(cells: Iterable[str]) -> str:
    """A row of a table, of cells of one line; their bars do not end them."""
    bars = (re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", cell) for cell in cells)
    return f"| {' | '.join(bars)} |"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall(r"`+", text)), default=0)
