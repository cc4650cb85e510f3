"""Scripts: what they leave alone, and how large the house is."""

import importlib
from pathlib import Path

import pytest

from hf_specx.hub.flatten import PACKAGE


MOST = {
    "call": 11_326,
    "heads": 1_783,
    "package": 22_246,
    "tests": 23_301,
    "scripts": 1_200,
}  # lines: more are for what is new alone, never for what was there
MOST |= {"files": 28, "functions": 225, "calls": 280}  # of a call of `generate`


@pytest.fixture
def script(monkeypatch):
    """Imports one by its name."""
    monkeypatch.syspath_prepend(str(PACKAGE.parent / "scripts"))
    return importlib.import_module


def test_the_house_and_a_call_stay_small(script):
    count = script("count")
    found = count.count_lines() | count.count_call()
    assert {name: found[name] for name, most in MOST.items() if found[name] > most} == {}


def test_training_replaces_nothing_but_a_pair(script, tmp_path: Path):
    """It is refused before anything is trained."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is there already"):
        script("train_pair").main(work=tmp_path / "work", out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
