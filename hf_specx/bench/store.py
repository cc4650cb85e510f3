"""The JSON file of results, which is complete at any moment, and where a figure was measured."""

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


FILE_VERSION = 2
KEYS = {"schema": "settings", "check": "part"}  # by kind of file: what in a record tells it from the others
LACKS = {
    "schema": "has no results of this version of the bench",
    "check": "is no interrupted check of this version",
}


class Store:
    """The records of a JSON file, which is written anew with each record that is added.

    There are two kinds of file: results of `specx bench` ("schema"), whose records have "settings", and the unfinished
    parts of `specx check` ("check"), whose records have the name of a "part" and its "value". Each record also has its
    "provenance". A file of results is locked until the store is closed or gone; an unfinished check, which no other
    command names, is not.

    Args:
        path: of the file, which need not exist; None keeps the records in memory.
        kind: "schema" or "check", which is also the key of the version in the file.
        provenance: what a stored part has to agree with to be used again.

    Raises:
        ValueError: the file is something else, or another process writes it.
    """

    def __init__(self, path: Path | None, kind: str, provenance: dict[str, Any]):
        self.path, self.kind, self.provenance = path, kind, provenance
        self.lock = ExitStack()
        if path is not None and kind == "schema":
            self.lock.enter_context(locked(path))
        self.records = read_records(path, kind)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: object) -> None:
        """Unlock the file."""
        self.lock.close()

    def add(self, record: dict[str, Any]) -> None:
        """Add a record, in place of an earlier one with the same settings or of the same part."""
        key = KEYS[self.kind]
        others = [other for other in self.records if other[key] != record[key]]
        self.records = [*others, record]
        if self.path is not None:
            part = self.path.with_name(f"{self.path.name}.part")
            text = json.dumps({self.kind: FILE_VERSION, "records": self.records}, indent=1)
            part.write_text(f"{text}\n", encoding="utf-8")
            os.replace(part, self.path)

    def get_or_compute(self, name: str, compute: Callable[[], Any]) -> Any:
        """The value of a part, computed if it is not stored; as JSON has it, so that both give the same."""
        for record in self.records:
            if record["part"] == name and self.provenance.items() <= record["provenance"].items():
                return record["value"]
        self.add(json.loads(json.dumps({"part": name, "provenance": self.provenance, "value": compute()})))
        return self.records[-1]["value"]


def read_records(path: Path | None, kind: str) -> list[dict[str, Any]]:
    """The records of a file; [] where there is none yet. A ValueError for a file of another kind."""
    check_out(path)
    if path is None or not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    records: Any = None
    if isinstance(content, dict) and content.get(kind) == FILE_VERSION:
        records = content.get("records")
    require(isinstance(records, list), f"{path} is there already and {LACKS[kind]}; name another file.")
    return list(records)


def provenance(model: PreTrainedModel) -> dict[str, Any]:
    """The versions, the device and the precision with which a model is measured."""
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
