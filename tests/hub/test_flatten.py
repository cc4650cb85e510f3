"""Publishing from a source tree that nobody has installed."""

import importlib.metadata as metadata
from pathlib import Path

import pytest

from hf_specx.hub.flatten import published_code
from hf_specx.hub.publish import NEEDS, write_code


def test_code_is_written_where_the_package_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing is asked of it as of an installed one."""
    found = metadata.distribution

    def hidden(name: str) -> metadata.Distribution:
        if name.replace("_", "-").lower() == "hf-specx":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "distribution", hidden)
    write_code(tmp_path, "org/pair")
    written = {path.name: path.read_text() for path in (tmp_path / "custom_generate").iterdir()}
    assert written.pop("requirements.txt").splitlines() == list(NEEDS)
    assert "PAIR = 'org/pair'" in written.pop("pair_source.py")
    assert written == {f"{room}.py": text for room, text in published_code().items()}
    assert all(text.startswith('"""From hf_specx ') for text in written.values())
