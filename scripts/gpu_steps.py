"""The steps of scripts/gpu.sh: the tests marked gpu, speeds of synthetic pairs, and a page that shows them."""

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import bench_tables
import pytest
import torch
from gpu_results import note, read, write

from hf_specx import DraftTargetPair
from hf_specx.bench.cells import Cell, cells_of, quick_cells
from hf_specx.bench.grid import results, run_grid
from hf_specx.bench.inputs import BenchPair, load_bench_pair
from hf_specx.bench.recipes import RECIPES, Recipe


ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "triton", "numpy")
CONTENDERS = ("plain", "stock-5", "block-5", "plain-compiled", "block-5-compiled")
PATIENCE = 2  # times the seconds that a cell is thought to take, after which it is given up
Plan = list[tuple[int, Cell]]


def plan() -> Plan:
    """Cells, what matters most first, and the seconds that each may well take, most of them for compiling."""
    given: dict[str, Any] = {"dtype": "bfloat16", "new_tokens": 64}
    cells: Plan = [(45, cell) for cell in cells_of("speed", "grafted-7B", (1, 8), **given)]
    for batches in ((1, 8), (4, 16)):
        for pair, seconds in (("grafted-7B", 110), ("grafted-1B", 70)):
            for batch in batches:
                names = [name for name in CONTENDERS if batch == 1 or name != "stock-5"]  # which takes one row alone
                cells += [(seconds, cell) for cell in quick_cells(pair, (batch,), names, **given)]
    return cells + [(30, cell) for cell in cells_of("speed", "grafted-1B", (1, 8), **given)]


def rehearsal() -> Plan:
    """The same in small; the pair of the first cell does not exist."""
    RECIPES["tiny"] = Recipe(64, 96, 4, 2, heads=4, kv_heads=1, vocab=256, epsilon=0.1, positions=256)
    given: dict[str, Any] = {"dtype": "float32", "new_tokens": 8, "prompt_tokens": 8, "repeats": 1}
    names = ("plain", "stock-5", "block-5")
    cells = [Cell("quick", "grafted-absent", names, **given), *cells_of("speed", "grafted-tiny", (1,), **given)]
    return [(30, cell) for cell in [*cells, *quick_cells("grafted-tiny", (2,), names, **given)]]


def note_machine(path: Path, rehearses: bool) -> None:
    """Fails where there is no CUDA device, unless it is a rehearsal."""
    if not rehearses and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; bash scripts/gpu.sh --rehearse tries the scripts on the CPU")
    found: dict[str, Any] = results(None).made | {name: _version(name) for name in PACKAGES}
    found |= {
        "cuda": torch.version.cuda,
        "commit": _said("git", "describe", "--always", "--dirty", "--abbrev=40"),
        "system": platform.platform(),
    }
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        found |= {"memory, GiB": round(facts.total_memory / 2**30, 1), "capability": f"{facts.major}.{facts.minor}"}
        found["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    note(path, machine=found, rehearsal=rehearses)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    """The output of a command; None where it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Recorder:
    """A plugin of pytest that notes each test as it ends."""

    def __init__(self, path: Path):
        self.path = path
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failures: dict[str, str] = {}
        self.recorded: dict[str, Any] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        note(self.path, running={"what": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if report.when == "call" and report.user_properties:
            self.recorded[report.nodeid] = [list(each) for each in report.user_properties]
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            errors = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E  ")]
            self.failures[report.nodeid] = (errors or [report.longreprtext])[0][:300]
        note(self.path, tests=self.counts | {"failures": self.failures, "recorded": self.recorded})


def run_tests(path: Path, asked: argparse.Namespace) -> None:
    """Those marked gpu, compiled forwards last; other files are not imported, since they may need what is not here."""
    sources = {file: file.read_text(encoding="utf-8") for file in ROOT.glob("tests/*/test_*.py")}
    marked = [file for file, text in sources.items() if "mark.gpu" in text or "on_device" in text]
    if asked.rehearse:
        os.environ["SPECX_TEST_DEVICE"] = "cpu"
        marked = [file for file in marked if file.name == "test_cuda_noise.py"]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    files = [str(file) for file in sorted(marked, key=lambda file: ("compiled" in file.name, file))]
    options = [
        "-q",
        "-mgpu",
        "--tb=short",
        "--continue-on-collection-errors",
        "-pno:cacheprovider",
        f"--rootdir={ROOT}",
    ]
    options += ["-kalone"] if asked.rehearse else []
    ended = pytest.main([*options, *files], plugins=[Recorder(path)])
    note(path, running=None)
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(int(ended))


def run_cells(path: Path, asked: argparse.Namespace) -> None:
    """Measure the cells of the plan that are not yet known, while there is time.

    An error of the device that stays with this process ends it; scripts/gpu.py starts another for the other cells.
    """
    found, store = read(path), results(None)
    known = (cell for cell in found.get("cells", []) if store.made.items() <= cell["provenance"].items())
    store.cells, failed = list(known), found["failed"]
    cells = [(n, x) for n, x in (rehearsal() if asked.rehearse else plan()) if store.find(x.to_dict()) is None]
    cells = [(seconds, cell) for seconds, cell in cells if str(cell) not in failed]
    skipped = {str(cell): "it was not reached" for _, cell in cells}
    note(path, cells=store.cells, skipped=skipped)
    for seconds, cell in cells:
        left = asked.until - time.time()
        if left < seconds:
            skipped[str(cell)] = f"it may take {seconds} s, and {max(0, left):.0f} s were left"
            note(path, skipped=skipped)
            continue
        note(path, running={"what": str(cell), "until": time.time() + PATIENCE * seconds})
        try:
            (measured,) = run_grid([cell], store, "bash scripts/gpu.sh", load)
        except Exception as error:  # any of them is a result, and the other cells can still be measured
            measured = {"failed": f"{type(error).__name__}: {error}"}
        if "failed" in measured:
            failed[str(cell)] = measured["failed"]
        del skipped[str(cell)]
        note(path, cells=store.cells, failed=failed, skipped=skipped)
        write_page(path, asked)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        note(path, running=None)


@cache
def load(name: str, dtype: str) -> BenchPair:
    """Both pairs stay, since cells of one follow cells of the other."""
    return load_bench_pair(name, dtype, lambda other, kind: DraftTargetPair.from_pretrained(other, dtype=kind))


def write_page(path: Path, asked: argparse.Namespace) -> None:
    """In gpu.md, what is noted so far."""
    write(path.with_suffix(".md"), "\n".join(page(read(path))))


def page(found: dict[str, Any]) -> Iterator[str]:
    """Its lines."""
    yield "# On a CUDA machine\n" if not found["rehearsal"] else "# A rehearsal: nothing here was measured on a GPU\n"
    yield "`bash scripts/gpu.sh`\n"
    yield from bench_tables.table(("", ""), [(name, str(value)) for name, value in found["machine"].items()])
    rows = [(x["step"], x["status"], f"{x['seconds']:.0f}", x["lost"] or "") for x in found["steps"]]
    yield from bench_tables.table(("step", "ended", "seconds", "lost"), rows)
    if "tests" in found:
        tests = found["tests"]
        yield f"## Tests\n\n{', '.join(f'{tests[name]} {name}' for name in ('passed', 'failed', 'skipped'))}\n"
        yield from (f"- **{name}**: {why}" for name, why in tests["failures"].items())
        yield ""
        told = [(name, ", ".join(f"{k} {v}" for k, v in values)) for name, values in tests["recorded"].items()]
        yield from bench_tables.table(("test", "recorded"), told)
    cells = found.get("cells", [])
    yield "## Speed\n"
    yield from bench_tables.lines(cells)
    for cell in cells:
        for name, noted in cell["contenders"].items():
            if "unavailable" in noted:
                yield f"- {name} of batch {cell['cell']['batch']} of {cell['cell']['pair']}: {noted['unavailable']}"
    for title in ("failed", "skipped"):
        yield from (f"- {title}: {name}: {why}" for name, why in found[title].items())
    yield ""


TAKE: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "tests": run_tests,
    "grid": run_cells,
    "page": write_page,
}


def main() -> None:
    """One step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=list(TAKE))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    path = asked.out / "gpu.json"
    if asked.step != "page":
        note_machine(path, asked.rehearse)
    TAKE[asked.step](path, asked)
    write_page(path, asked)


if __name__ == "__main__":
    main()
