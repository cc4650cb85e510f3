"""The table of speed: runs of all hours in one, and a page that else stays as it was."""

import importlib
import json
from pathlib import Path

import pytest
from tiny import near, tiny
from tiny_tokenizer import tiny_tokenizer

from hf_specx import DraftTargetPair


SCRIPTS = Path(__file__).parents[2] / "scripts"
CASES = {  # of a run: what is generated, batch, tokens a second, and times plain
    ("code", 1): (100.4, {"stock": 1.204, "ours": 1.5}),
    ("code", 8): (500.0, {"ours": 1.25}),
    ("JSON", 1): (90.0, {"stock": None, "ours": 2.0}),
}


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("outlines")
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("speed_table")


def run(hour: int, faster: float, **other: str) -> dict:
    rows = []
    for (label, batch), (plain, times) in CASES.items():
        known = {name: each and each * faster for name, each in times.items()}
        rows.append({"label": label, "batch": batch, "plain": plain * faster, "times": known})
    date = f"2026-11-23T{hour}:00+00:00"
    made = {"date": date, "hardware": "Some", "instructions": ["avx2", "sve"], "torch": "2", "transformers": "5"}
    return {"made": made | other, "rows": rows}


def test_the_least_and_the_largest_over_runs_that_were_made_alike(script):
    """Rows are found by name, also where cases were put in another order; what refuses batches, and what fails."""
    earlier = run(13, 1.1)
    earlier["rows"] = earlier["rows"][::-1]
    lines = script.table([run(14, 1.0), earlier, run(12, 9.0, torch="1"), run(15, 1.05)]).split("\n")
    assert lines[0].startswith(
        "The pair in the package, Some (avx2, sve), torch 2, transformers 5: the least and the largest of 3 runs, "
        "2026-11-23 13:00 to 2026-11-23 15:00 UTC. "
    )
    assert lines[4:] == [
        "| code | 1 | 100 to 110 | 1.20 to 1.32 | **1.50 to 1.65** |",
        "| code | 8 | 500 to 550 | refused | **1.25 to 1.38** |",
        "| JSON | 1 | 90 to 99 | fails | **2.00 to 2.20** |",
    ]
    assert script.table([run(14, 1.0)]).split("\n")[4] == "| code | 1 | 100 | 1.20 | **1.50** |"


def test_a_page_without_its_markers_is_refused(script, tmp_path):
    """Before anything is measured."""
    (tmp_path / "page.md").write_text(script.BEGIN)
    with pytest.raises(ValueError, match="the page must have one <!-- speed_table.py begins"):
        script.main(readme=tmp_path / "page.md", out=tmp_path / "speed.json")
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


def test_the_whole_of_it(script, monkeypatch, tmp_path):
    """A second run is added to the first; the rest of the page stays as it was. With a pair that is no faster."""
    target = tiny(vocab_size=280, eos_token_id=0, pad_token_id=1)
    pair = DraftTargetPair(target, near(target, 0.05), tiny_tokenizer())
    pair.config.prompts = ["the cat", "a dog sat on the mat", "on"]
    monkeypatch.setattr(DraftTargetPair, "embedded", lambda: pair)
    monkeypatch.setattr(script, "CASES", [script.CASES[place] for place in (0, 3, 4, 6)])
    readme, out = tmp_path / "page.md", tmp_path / "speed.json"
    readme.write_bytes(f"before\r\n{script.BEGIN}old{script.END}\r\nafter".encode())
    for runs in (1, 2):
        script.main(repeats=1, new_tokens=4, out=out, readme=readme)
        found = json.loads(out.read_text(encoding="utf-8"))["runs"]
        assert len(found) == runs
        page = f"before\r\n{script.BEGIN}\n{script.table(found)}\n{script.END}\r\nafter"
        assert readme.read_bytes().decode() == page
    rivals = [[*row["times"].items()][:-1] for row in found[0]["rows"]]
    assert [[name for name, _ in each] for each in rivals] == [["stock"], [], ["lookup-10"], ["stock"]]
    assert rivals[-1] == [("stock", None)]  # transformers' own fails with outlines' processor
