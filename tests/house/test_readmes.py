"""Each room's README names each of its files, and no other; numbers in the main one that a table of ours gives."""

import re
from pathlib import Path

import pytest

from hf_specx.hub.flatten import PACKAGE


ROOT = PACKAGE.parent


@pytest.mark.parametrize("readme", sorted(PACKAGE.glob("*/README.md")), ids=lambda path: path.parent.name)
def test_a_room_lists_its_files(readme: Path):
    rows = [line.split("|")[1] for line in readme.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    listed = {name for row in rows for name in re.findall(r"`(\w+\.py)`", row)}
    assert listed == {path.name for path in readme.parent.glob("[!_]*.py")}


def test_the_number_of_model_types_is_that_of_the_table():
    """A type may have several rows."""
    table = (ROOT / ".github" / "ARCHITECTURES.md").read_text(encoding="utf-8")
    exact = set(re.findall(r"^\| \w+ \| ([\w-]+) \| exact \|", table, re.MULTILINE))
    assert f"over {len(exact)} model types" in (ROOT / "README.md").read_text(encoding="utf-8")
