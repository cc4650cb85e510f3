"""A saved pair, which tests of the room change."""

import shutil
from pathlib import Path

import pytest
from repositories import pair


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved once, and left as it is."""
    folder = tmp_path_factory.mktemp("good") / "pair"
    pair().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy for one test."""
    return Path(shutil.copytree(good, tmp_path / "pair"))
