"""`scripts/gpu.sh` to its end on the emulated accelerator, by `support/rehearsal.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
UNAVAILABLE = {  # on the emulation, or at all; why
    "block-5-compiled": ["compile=True needs Triton"],
    "assisted-5": ["not linked with support for cuda", "only supported for batch_size = 1"],
}


@pytest.mark.slow
def test_every_command_of_the_script_runs(tmp_path: Path):
    # without Dynamo what transformers compiles runs as it is
    python = f'exec env TORCHDYNAMO_DISABLE=1 {sys.executable} {ROOT}/tests/support/rehearsal.py "$@"'
    for name, command in {"python": python, "timeout": 'shift; exec "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    path, script = f"{tmp_path}:{os.environ['PATH']}", ROOT / "scripts" / "gpu.sh"
    done = subprocess.run(["bash", script, tmp_path], env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "passed" in (tmp_path / "tests.txt").read_text()
    asked = [line.split() for line in script.read_text().splitlines() if line.startswith("bench ")]
    rows = [line.split("|") for line in (tmp_path / "speed.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[1].strip() not in ("method", "---")]
    assert len(rows) == 2 * sum(len(line[3:]) for line in asked), done.stderr[-4000:]  # batches of 1 and 8
    for _, method, *_, told, _ in rows:
        why = UNAVAILABLE.get(method.strip())
        assert any(reason in told for reason in why) if why else not told.strip(), (method, told)
