"""What a check has found so far, in a file that is taken up by the same settings, models, versions and code only."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_specx.hub.flatten import PACKAGE

from .checks_check import check_place


SCHEMA = 1
NUMBERS = 64  # of each weight, that tell one model from another


class Store:
    """Values by name, each written as soon as it is known.

    Args:
        path: of the file, which need not be there; None keeps all in memory.
        identity: what has to be the same for a value to be taken from the file; plain values. A file of another check
            is begun anew.

    Raises:
        ValueError: for a file that is something else.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any]):
        self.path, self.identity = path, _plain(identity)
        self.known: dict[str, Any] = {}
        check_place(path, SCHEMA)
        if path is not None and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.get("identity") == self.identity:
                self.known = found["known"]

    def take(self, name: str, make: Callable[[], Any]) -> Any:
        """The value of a name, made if it is not known; as a file would have it, so that both ways give the same."""
        if name not in self.known:
            self.known[name] = _plain(make())
            self._write()
        return self.known[name]

    def _write(self) -> None:
        """The whole file, or nothing."""
        if self.path is None:
            return
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(json.dumps({"check": SCHEMA, "identity": self.identity, "known": self.known}) + "\n")
        os.replace(part, self.path)


def weights_digest(model: PreTrainedModel) -> str:
    """Tells one model from another by its config and the first numbers of each weight that is at hand."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        if weight.device.type != "meta":
            digest.update(repr(weight.detach().flatten()[:NUMBERS].tolist()).encode())
    return digest.hexdigest()[:16]


def package_digest() -> str:
    """Of all code of this package."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
