"""scripts/gpu.sh, rehearsed on the CPU: what is measured is kept, whatever happens to the process that does it."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch


SCRIPTS = Path(__file__).parents[2] / "scripts"
LACKS = "rich typer hypothesis scipy matplotlib jinja2 evaluate datasets xdist"
ALONE = f"""
import importlib.metadata as metadata, sys
sys.modules |= dict.fromkeys({LACKS.split()!r})
known = metadata.version
def version(name):
    if name == "hf_specx":
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.version = version
"""


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch):
    """Its modules, which are siblings in a folder of their own."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu
    import gpu_results
    import gpu_steps

    monkeypatch.setitem(gpu_steps.RECIPES, "tiny", None)  # taken out again afterwards
    return argparse.Namespace(gpu=gpu, steps=gpu_steps, note=gpu_results.note, read=gpu_results.read)


@pytest.fixture
def path(kit, tmp_path: Path) -> Path:
    """A file of results as a run begins it."""
    kit.note(tmp_path / "gpu.json", machine=None, steps=[], failed={}, skipped={}, running=None)
    return tmp_path / "gpu.json"


def test_a_rehearsal_where_little_is_installed(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(ALONE)
    command = ["bash", str(SCRIPTS / "gpu.sh"), "--rehearse", "--out", str(tmp_path)]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": path, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [(x["step"], x["status"]) for x in found["steps"]] == [(x, "done") for x in ("tests", "grid", "page")], (
        ended
    )
    assert ended.returncode == 0
    assert found["machine"]["torch"] == torch.__version__
    assert found["tests"] == {"passed": 1, "failed": 0, "skipped": 0, "failures": {}, "recorded": {}}
    assert [cell["cell"]["pair"] for cell in found["cells"]] == ["grafted-tiny"] * 2
    assert [(name.split()[1], why[:10]) for name, why in found["failed"].items()] == [("grafted-absent", "ValueError")]
    page = (tmp_path / "gpu.md").read_text()
    for line in (
        "# A rehearsal",
        "| tests | done |",
        "### speed",
        "- stock-5 of batch 2",
        "- failed: quick: grafted-",
    ):
        assert f"\n{line}" in f"\n{page}"


def script(body: str, path: Path) -> list[str]:
    """A command in place of a step's, which knows where the results are."""
    head = "import os, signal, sys; from pathlib import Path; sys.path.insert(0, {!r})\n"
    tail = "from gpu_results import note, read\npath = Path({!r})\n"
    return [sys.executable, "-c", (head + tail).format(str(SCRIPTS), str(path)) + body]


def test_a_killed_cell_is_noted_and_the_others_are_measured(kit, path: Path):
    body = """
if read(path)["failed"]:
    note(path, cells=[*read(path)["cells"], "second"])
else:
    note(path, cells=["first"], running={"what": "bad"})
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert kit.gpu.take("grid", script(body, path), path, time.time() + 60) == "done"
    found = kit.read(path)
    assert (found["cells"], found["failed"]) == (["first", "second"], {"bad": "killed by signal 9"})
    assert [(x["status"], x["lost"]) for x in found["steps"]] == [("killed by signal 9", "bad"), ("done", None)]
    assert found["running"] is None


@pytest.mark.parametrize("step", ["tests", "grid"])
def test_a_step_that_dies_before_it_says_what_it_does_is_not_started_again(kit, path: Path, step: str):
    assert kit.gpu.take(step, script("sys.exit(3)", path), path, time.time() + 60) == "failed with exit code 3"
    assert len(kit.read(path)["steps"]) == 1


def test_a_cell_that_takes_too_long_is_stopped(kit, path: Path):
    body = """
if not read(path)["failed"]:
    note(path, running={"what": "slow", "until": 0})
    signal.pause()
"""
    assert kit.gpu.take("grid", script(body, path), path, time.time() + 60) == "done"
    assert kit.read(path)["failed"] == {"slow": "stopped at its time limit"}


def asked(seconds: float = 600) -> argparse.Namespace:
    return argparse.Namespace(rehearse=True, until=time.time() + seconds)


def test_without_a_cuda_device_only_a_rehearsal_runs(kit, path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--rehearse"):
        kit.steps.note_machine(path, rehearses=False)
    assert kit.read(path)["machine"] is None


def test_the_cell_that_is_measured_is_named_before(kit, path: Path, monkeypatch: pytest.MonkeyPatch):
    """So that what was lost is known; what was measured before it is in the file."""
    measure, seen = kit.steps.run_grid, []

    def interrupted(cells, *others, **more):
        seen.append(kit.read(path)["running"]["what"])
        if cells[0].batch == 2:
            raise KeyboardInterrupt
        return measure(cells, *others, **more)

    monkeypatch.setattr(kit.steps, "run_grid", interrupted)
    kit.note(path, machine={}, rehearsal=True)
    with pytest.raises(KeyboardInterrupt):
        kit.steps.run_cells(path, asked())
    found = kit.read(path)
    assert [cell["cell"]["batch"] for cell in found["cells"]] == [1]
    assert list(found["skipped"]) == [found["running"]["what"]] == seen[2:]
    monkeypatch.setattr(kit.steps, "run_grid", measure)
    kit.steps.run_cells(path, asked())  # goes on with what is not known
    again = kit.read(path)
    assert [cell["cell"]["batch"] for cell in again["cells"]] == [1, 2]
    assert again["cells"][0] == found["cells"][0]
    assert not again["skipped"]


def test_cells_that_would_not_end_in_time_are_skipped(kit, path: Path):
    kit.steps.run_cells(path, asked(seconds=2))
    found = kit.read(path)
    assert not found["cells"]
    assert len(found["skipped"]) == 3
    assert all(why.startswith("it may take 30 s, and ") for why in found["skipped"].values())


def test_measurements_of_other_code_are_not_kept(kit, path: Path):
    kit.note(path, cells=[{"cell": {}, "provenance": kit.steps.results(None).made | {"code": "another"}}])
    kit.steps.run_cells(path, asked(seconds=0))
    assert kit.read(path)["cells"] == []


def test_the_plan_has_what_matters_first_and_no_cell_twice(kit):
    cells = [cell for _, cell in kit.steps.plan()]
    assert [(cell.pair, cell.batch) for cell in cells[:4]] == [("grafted-7B", 1), ("grafted-7B", 8)] * 2
    assert len({str(cell) for cell in cells}) == len(cells)
    sizes = {
        (cell.pair, cell.batch) for cell in cells if set(cell.contenders) >= {"plain-compiled", "block-5-compiled"}
    }
    assert sizes == {(pair, batch) for pair in ("grafted-1B", "grafted-7B") for batch in (1, 4, 8, 16)}
