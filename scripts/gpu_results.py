"""The file of results of scripts/gpu.sh, which each of its processes adds to."""

import json
import os
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """What is noted so far."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def note(path: Path, **changes: Any) -> None:
    """Put these entries in place of those of the same names."""
    write(path, json.dumps(read(path) | changes, indent=1) + "\n")


def write(path: Path, text: str) -> None:
    """A file, whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
