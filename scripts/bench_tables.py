"""Print a file of results of `specx bench --grid` as markdown: a table for each experiment, then the verdicts."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_specx.bench.points import claims


FIGURES = {
    "tokens/s": "tokens_per_second",
    "expected tokens/s": "expected_tokens_per_second",
    "× plain": "times_plain",
    "α": "alpha",
    "tokens a round": "tokens_per_round",
    "s a round": "seconds_per_round",
    "/ bare": "round_over_bare",
    "call / bare": "call_over_bare",
    "memory-bound, s": "bandwidth_seconds_per_round",
    "limited": "forward_limited_speedup",
    "Theorem 3.8": "expected_speedup",
}
HEADINGS = ("pair", "dtype", "batch", "prompt + new", "T", "contender", *FIGURES)
OUTCOMES = {True: "holds", False: "**fails**", None: "not told"}


def lines(cells: list[dict[str, Any]]) -> Iterator[str]:
    """Of measured cells."""
    for experiment in dict.fromkeys(cell["cell"]["experiment"] for cell in cells):
        rows = [row for cell in cells if cell["cell"]["experiment"] == experiment for row in rows_of(cell)]
        if rows:
            yield f"### {experiment}\n"
            yield from table(HEADINGS, rows)
    yield "### What it must show\n"
    rows = [(str(v.point), v.what, v.wanted, number(v.found), OUTCOMES[v.holds], v.note) for v in claims(cells)]
    yield from table(("point", "claim", "wanted", "found", "", ""), rows)


def rows_of(cell: dict[str, Any]) -> list[tuple[str, ...]]:
    """One for each contender that was timed."""
    own = cell["cell"]
    pair = f"{own['pair']} (synthetic)" if cell["pair"]["synthetic"] else own["pair"]
    lengths = f"{own['prompt_tokens']} + {own['new_tokens']}"
    dtype = cell["provenance"].get("dtype", own["dtype"])  # "auto" is asked for, not measured
    cells = (pair, dtype, str(own["batch"]), lengths, f"{own['temperature']:g}")
    return [
        # older files have no ratio of medians, but the median of the ratios within turns
        (*cells, name, *(number(({"times_plain": noted.get("speedup")} | noted).get(key)) for key in FIGURES.values()))
        for name, noted in cell["contenders"].items()
        if "tokens_per_second" in noted
    ]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Its lines, the last of them empty."""
    for cells in (headings, ("---",) * len(headings), *rows):
        yield f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |"
    yield ""


def number(value: Any) -> str:
    """Three digits of a figure or of its median."""
    value = value["median"] if isinstance(value, dict) else value
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["cells"])))
