"""The `evaluate` modules from a wheel: loaded by path and combined in a process that cannot reach a network."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hf_specx.metrics import NAMES


CODE = """
import socket
import sys

def refuse(*args, **kwargs):
    raise AssertionError("a connection was tried")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
sys.path.insert(0, sys.argv[1])
import hf_specx.metrics
assert "evaluate" not in sys.modules and "datasets" not in sys.modules
assert hf_specx.__file__.startswith(sys.argv[1])
import evaluate

modules = {name: evaluate.load(hf_specx.metrics.path(name)) for name in hf_specx.metrics.NAMES}
assert [module.name for module in modules.values()] == list(hf_specx.metrics.NAMES)
assert modules["acceptance"].compute(predictions=[[1]], references=[[2]])["alpha"] == 0.5
pair = ["sequence_equality", "acceptance"]
rows = {"predictions": [[1, 2]] * 20, "references": [[1, 2]] * 19 + [[1, 3]]}
for both in ([hf_specx.metrics.path(name) for name in pair], {name: modules[name] for name in pair}):
    found = evaluate.combine(both).compute(**rows)
    assert found["exact_match"] == 0.95, found
    assert found["rounds"] == 40, found
print("loaded and combined")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree without the pair in it, unpacked."""
    root, folder = Path(__file__).parents[2], tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(root / "hf_specx", source / "hf_specx", ignore=shutil.ignore_patterns("embedded", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_the_wheel_has_all_files_of_each(site: Path):
    for name in NAMES:
        files = {path.name for path in (site / "hf_specx" / "metrics" / name).iterdir()}
        assert files == {f"{name}.py"}


def test_the_wheel_has_the_parts_of_the_report(site: Path):
    found = {path.name for path in (site / "hf_specx" / "equivalence").glob("page.*")}
    assert found == {f"page.{kind}" for kind in ("css", "html", "js", "py")}


def test_they_load_and_combine_offline(site: Path, tmp_path: Path):
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
    caches = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env = caches | offline | {"HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", CODE, str(site)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("loaded and combined\n")
