"""A pair of two tiny models, in a folder that is saved once and left as it is."""

from pathlib import Path

import pytest
from completing import load, save

from hf_specx import DraftTargetPair


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pair(folder: Path) -> DraftTargetPair:
    return load(folder)
