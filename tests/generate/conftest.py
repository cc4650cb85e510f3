"""Fixtures of tests that call in every form."""

from types import SimpleNamespace

import pytest
from forms import make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return make_world(tmp_path_factory.mktemp("entries"))
