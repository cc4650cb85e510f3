"""Runs the steps of gpu_steps.py on a CUDA machine, each in a process of its own, within a time limit.

What is found is in FOLDER/gpu.json as soon as it is known. A process that is killed loses the test or the cell that it
was at: that is noted, and the rest goes on. A second run goes on with the cells that the first one had no time for.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_results import note, read


STEPS = Path(__file__).with_name("gpu_steps.py")
SECONDS = 540  # of a run
LIMITS = {"tests": 210, "grid": SECONDS, "page": 60}  # seconds of each step, at most
PAGE = 20  # seconds that are kept for the last step


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every step came to its end and no test failed."""
    asked = parse(arguments)
    path = asked.out / "gpu.json"
    asked.out.mkdir(parents=True, exist_ok=True)
    until = time.time() + asked.seconds
    note(path, schema=1, machine=None, steps=[], failed={}, skipped={}, running=None)
    command = [sys.executable, str(STEPS), f"--out={asked.out}", *(["--rehearse"] if asked.rehearse else [])]
    statuses = []
    for step in (*asked.steps, "page"):
        end = min(time.time() + LIMITS[step], until - (0 if step == "page" else PAGE))
        statuses.append(take(step, command, path, end))
        if read(path)["machine"] is None:
            return 1
    return int(set(statuses) != {"done"} or bool(read(path).get("tests", {}).get("failures")))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/gpu.sh")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="tests or grid; else both")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="else scripts/results")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of the whole run; else %(default)s")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU, into build")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.steps) - {"tests", "grid"}:
        parser.error(f"there is no step {unknown.pop()}; give tests or grid")
    asked.steps = asked.steps or ["tests", "grid"]
    asked.out = (asked.out or Path("build" if asked.rehearse else "scripts/results")).resolve()
    return asked


def take(step: str, command: Sequence[str], path: Path, until: float) -> str:
    """Run a step until it ends or its time has come; one that is lost in a cell is started anew without this cell.

    Args:
        step: its name.
        command: of gpu_steps.py, less the step.
        path: of the results.
        until: seconds since the epoch.

    Returns:
        How it ended: "done", or why not.
    """
    while True:
        started = time.time()
        status = watch([*command, f"--until={until}", step], path, until)
        found = read(path)
        running = found["running"] or {}
        taken = {"step": step, "status": status, "seconds": round(time.time() - started, 1)}
        note(path, steps=[*found["steps"], taken | {"lost": running.get("what")}], running=None)
        print(f"{step}: {status}", flush=True)
        if step != "grid" or not running or time.time() > until:
            return status
        note(path, failed=found["failed"] | {running["what"]: status})


def watch(command: Sequence[str], path: Path, until: float) -> str:
    """Run a command until it ends, or until its own time or that of what it says to be running has come."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        while process.poll() is None:
            running = read(path)["running"] or {}
            if time.time() > min(until, running.get("until", until)):
                return "stopped at its time limit"
            try:
                process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also compilers that it has started
        process.wait()
    code = process.returncode
    return "done" if code == 0 else f"killed by signal {-code}" if code < 0 else f"failed with exit code {code}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it has started ends with it
    sys.exit(main())
