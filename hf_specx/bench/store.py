"""What was measured, in a JSON file that is whole at any time, and where it was measured."""

import json
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import hf_specx
from hf_specx.common.devices import execution_device, hardware
from hf_specx.common.errors import require
from hf_specx.hub.folders import check_out
from hf_specx.hub.locks import locked


FILE_VERSION = 1
LACKS = {
    "schema": "has no results of this version of the bench",
    "check": "is no interrupted check of this version",
}


class Store:
    """Cells of a file, each written as soon as it is known: "cell" (name or settings), "provenance", figures.

    The file need not be there, and None keeps the cells in memory. Its key `kind` says what it is, one of `LACKS`. A
    cell is taken from it if its "provenance" has all of that of the store. A file of results is locked until the store
    is closed or gone; an unfinished check, which others do not name, is not.

    Raises:
        ValueError: the file is something else, or another process writes it.
    """

    def __init__(self, path: Path | None, kind: str, provenance: dict[str, Any]):
        self.path, self.kind, self.provenance = path, kind, provenance
        self.lock = ExitStack()
        if path is not None and kind == "schema":
            self.lock.enter_context(locked(path))
        self.cells = read_cells(path, kind)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: object) -> None:
        """Let others write the file."""
        self.lock.close()

    def add(self, cell: dict[str, Any]) -> None:
        """Add a cell, in place of an earlier one of the same name or settings."""
        others = [other for other in self.cells if other["cell"] != cell["cell"]]
        self.cells = [*others, cell]
        if self.path is not None:
            part = self.path.with_name(f"{self.path.name}.part")
            text = json.dumps({self.kind: FILE_VERSION, "cells": self.cells}, indent=1)
            part.write_text(f"{text}\n", encoding="utf-8")
            os.replace(part, self.path)

    def get_or_compute(self, name: str, compute: Callable[[], Any]) -> Any:
        """The value of a name, computed if it is not stored; as a file would have it, so that both give the same."""
        for cell in self.cells:
            if cell["cell"] == name and self.provenance.items() <= cell["provenance"].items():
                return cell["value"]
        self.add(json.loads(json.dumps({"cell": name, "provenance": self.provenance, "value": compute()})))
        return self.cells[-1]["value"]


def read_cells(path: Path | None, kind: str) -> list[dict[str, Any]]:
    """The cells of a file; [] where there is none yet. A ValueError for one of another kind, or where none can be."""
    check_out(path)
    if path is None or not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    cells: Any = None
    if isinstance(content, dict) and content.get(kind) == FILE_VERSION:
        cells = content.get("cells")
    require(isinstance(cells, list), f"{path} is there already and {LACKS[kind]}; name another file.")
    return list(cells)


def provenance(model: PreTrainedModel) -> dict[str, Any]:
    """Where a number was made: versions, device, and the precision of a model."""
    device = execution_device(model)
    return {
        "hf_specx": hf_specx.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} ({hardware(device)})",
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
