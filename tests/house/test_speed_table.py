"""The table of speed: runs of one machine and its versions together, each row by its name."""

import importlib
from pathlib import Path

import pytest


pytest.importorskip("outlines")
MADE = {"hardware": "Some, 2 threads", "instructions": ["avx2"], "torch": "2", "transformers": "5"}
CODE = {"label": "code, float32", "batch": 1, "plain": 100.0, "times": {"stock": 1.25, "ours": 1.5}}
JSON = {"label": "JSON, float32", "batch": 8, "plain": 400.0, "times": {"ours": 1.2}}


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "scripts")
        yield importlib.import_module("speed_table")


def run(hour: int, *rows: dict, **made: str) -> dict:
    return {"made": {"date": f"2026-01-01T{hour:02}:00+00:00", "commit": f"c{hour}"} | MADE | made, "rows": [*rows]}


def shown(script, *runs: dict) -> list[str]:
    return [line for line in script.table([*runs]).split("\n") if line.startswith("| ")][2:]


def test_runs_of_one_machine_are_one_table(script):
    faster = CODE | {"plain": 120.0, "times": {"stock": None, "ours": 1.75}}
    assert shown(script, run(1, CODE, JSON), run(2, faster, JSON)) == [
        "| code, float32 | 1 | 100 to 120 | 1.25 | **1.50 to 1.75** |",
        "| JSON, float32 | 8 | 400 | refused | **1.20** |",
    ]
    assert "largest of 2 runs, 2026-01-01 01:00 to 2026-01-01 02:00 UTC." in script.table([run(1, CODE), run(2, CODE)])


@pytest.mark.parametrize("other", [{"hardware": "Another"}, {"torch": "3"}])
def test_runs_of_another_machine_or_version_are_left_out(script, other):
    other = run(1, CODE | {"plain": 9.0}, **other)
    assert shown(script, other, run(2, CODE)) == shown(script, run(2, CODE))


def test_rows_are_found_by_name_and_batch_not_by_position(script):
    """The cases of the script may have changed between two runs."""
    assert shown(script, run(1, JSON, CODE), run(2, CODE, JSON)) == shown(script, run(2, CODE, JSON))
    assert shown(script, run(1, JSON), run(2, CODE, JSON)) == shown(script, run(2, CODE, JSON))
    assert shown(script, run(1, JSON | {"batch": 1}), run(2, JSON)) == shown(script, run(2, JSON))
