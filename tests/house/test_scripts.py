"""Scripts: what they leave alone."""

import importlib
from pathlib import Path

import pytest

from hf_specx.hub.flatten import PACKAGE


@pytest.fixture
def script(monkeypatch):
    """Imports one by its name."""
    monkeypatch.syspath_prepend(str(PACKAGE.parent / "scripts"))
    return importlib.import_module


def test_training_replaces_nothing_but_a_pair(script, tmp_path: Path):
    """It is refused before anything is trained."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is there already"):
        script("train_pair").main(work=tmp_path / "work", out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
