"""A grid is run cell by cell into one file, which says where and how each number was made; a run can be resumed."""

import datetime
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_specx.hub.flatten import core_modules

from .bench import provenance
from .bench_pairs import BenchPair
from .cells import Cell
from .checks_bench import check_results
from .probes import compare_contexts, measure_memory
from .turns import Advance, take_turns


SCHEMA = 1
MACHINE = ("hf_specx", "torch", "transformers", "python", "device", "threads", "code")
MEASURES: dict[str, Callable[[Cell, BenchPair, Advance], dict[str, Any]]] = {
    "context": compare_contexts,
    "memory": measure_memory,
}  # the others take turns
Load = Callable[[str, str], BenchPair]


class Results:
    """Measured cells, as a file has them.

    Args:
        path: of the file, which need not be there; None keeps them in memory alone.

    Attributes:
        cells: {"cell": settings, "pair": facts, "provenance": where and when, and what was measured} each.

    Raises:
        ValueError: for a file that is something else.
    """

    def __init__(self, path: Path | None):
        self.path, self.cells = path, []
        if path is not None and path.exists():
            text = path.read_text(encoding="utf-8")
            check_results(path, text, SCHEMA)
            self.cells = json.loads(text)["cells"]

    def find(self, cell: Cell, machine: dict[str, Any]) -> dict[str, Any] | None:
        """What was measured with the same settings on the same machine, versions and core."""
        settings = cell.to_dict()
        alike = (x for x in self.cells if x["cell"] == settings and _machine(x["provenance"]) == machine)
        return next(alike, None)

    def add(self, measured: dict[str, Any]) -> None:
        """Take a cell in, in place of an earlier measurement of the same, and write the file whole or not at all."""
        self.cells = [x for x in self.cells if x["cell"] != measured["cell"]] + [measured]
        if self.path is None:
            return
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(json.dumps({"schema": SCHEMA, "cells": self.cells}, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path)


def machine() -> dict[str, Any]:
    """What has to be the same for two measurements to belong together."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return _machine(provenance(device) | {"code": code_digest()})


def _machine(noted: dict[str, Any]) -> dict[str, Any]:
    return {name: noted[name] for name in MACHINE}


def code_digest() -> str:
    """Of the files that a call and its measurement run: a measurement of other code is none of this."""
    digest = hashlib.sha256()
    for path in (*(module.path for module in core_modules()), *sorted(Path(__file__).parent.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def run_grid(
    cells: Sequence[Cell],
    results: Results,
    command: str,
    load: Load,
    advance: Advance = lambda: None,
    say: Callable[[str], object] = lambda text: None,
) -> list[dict[str, Any]]:
    """Measure the cells that `results` does not have.

    Args:
        cells: cells of the same pair in sequence are measured on one copy of it.
        results: gets each cell as soon as it is measured.
        command: what the measurements say that they were made by.
        load: makes a pair from its name and a dtype.
        advance: called `sum(cell.turns for cell in cells)` times, as work is done.
        say: told each cell before it is measured.

    Returns:
        What was measured of each cell, now or before; where a pair or a cell failed as a whole, {"failed": why}.
    """
    here, found = machine(), []
    loaded: tuple[tuple[str, str], BenchPair] | None = None
    for cell in cells:
        known = results.find(cell, here)
        steps = Steps(cell.turns, advance)
        if known is None:
            say(str(cell))
            try:
                if loaded is None or loaded[0] != (cell.pair, cell.dtype):
                    loaded = None  # so that its memory is free before the next takes its own
                    loaded = (cell.pair, cell.dtype), load(cell.pair, cell.dtype)
                known = measure(cell, loaded[1], command, steps)
            except (RuntimeError, OSError) as error:  # memory, most likely; the others can still be measured
                known = {"cell": cell.to_dict(), "failed": f"{type(error).__name__}: {error}", "contenders": {}}
            else:
                results.add(known)
        steps.finish()
        found.append(known)
    return found


def measure(cell: Cell, pair: BenchPair, command: str, advance: Advance) -> dict[str, Any]:
    """One cell, with where and how it was made."""
    started = datetime.datetime.now(datetime.timezone.utc)
    measured = MEASURES.get(cell.experiment, take_turns)(cell, pair, advance)
    torch.compiler.reset()
    made = provenance(pair.target) | {"code": code_digest(), "seed": cell.seed, "command": command}
    made["date"] = started.isoformat(timespec="seconds")
    made["seconds"] = round((datetime.datetime.now(datetime.timezone.utc) - started).total_seconds(), 1)
    return {"cell": cell.to_dict(), "pair": pair.facts, "provenance": made} | measured


class Steps:
    """Counts the steps of a cell, so that a bar moves by all of them also where some were not needed."""

    def __init__(self, total: int, advance: Advance):
        self.left, self.advance = total, advance

    def __call__(self) -> None:
        if self.left > 0:
            self.left -= 1
            self.advance()

    def finish(self) -> None:
        """Make the steps that are left."""
        while self.left > 0:
            self()
