"""Publishing from a source tree that nobody has installed."""

import shutil
import subprocess
import sys
from pathlib import Path

from hf_specx.hub.flatten import PACKAGE, published_code
from hf_specx.hub.publish import NEEDS


HIDDEN = """
import importlib.metadata as metadata, pathlib, sys

found = metadata.distribution

def hidden(name):
    if name.replace("_", "-").lower() == "hf-specx":
        raise metadata.PackageNotFoundError(name)
    return found(name)

metadata.distribution = hidden
from hf_specx.hub.publish import write_code
import hf_specx
assert hf_specx.__file__.startswith(sys.argv[1])
write_code(pathlib.Path(sys.argv[1]), "org/pair")
"""


def test_code_is_written_where_the_package_is_not_installed(tmp_path: Path):
    shutil.copytree(PACKAGE, tmp_path / "hf_specx", ignore=shutil.ignore_patterns("embedded", "__pycache__"))
    command = [sys.executable, "-c", HIDDEN, str(tmp_path)]
    subprocess.run(command, check=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    written = {path.name: path.read_text() for path in (tmp_path / "custom_generate").iterdir()}
    assert written.pop("requirements.txt").splitlines() == list(NEEDS)
    assert "PAIR = 'org/pair'" in written.pop("pair_source.py")
    assert written == {f"{room}.py": text for room, text in published_code().items()}
    for text in written.values():
        assert text.startswith('"""From hf_specx ')
