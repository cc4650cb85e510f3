"""Each room's README names each of its files, and no other."""

import re
from pathlib import Path

import pytest

from hf_specx.hub.flatten import PACKAGE


@pytest.mark.parametrize("readme", sorted(PACKAGE.glob("*/README.md")), ids=lambda path: path.parent.name)
def test_a_room_lists_its_files(readme: Path):
    rows = [line.split("|")[1] for line in readme.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    listed = {name for row in rows for name in re.findall(r"`(\w+\.py)`", row)}
    assert listed == {path.name for path in readme.parent.glob("[!_]*.py")}
