"""Scripts: what they leave alone."""

import runpy
from pathlib import Path

import pytest
from bench_cases import speed


def test_training_replaces_nothing_but_a_pair(tmp_path: Path):
    """It is refused before anything is trained."""
    main = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "train_pair.py"))["main"]
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is there already"):
        main(work=tmp_path / "work", out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_tables_of_the_bench():
    lines = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "bench_tables.py"))["lines"]
    shown = "\n".join(lines([speed()]))
    assert "| grafted-30M (synthetic) | float32 | 1 | 5 + 8 | 1 | block-5 | 20 | - | 2 | 0.8 |" in shown
    assert "| 1 | median round over bare forwards: 30M float32, batch 1 | <= 1.08 | 1.05 | holds |" in shown
    assert len({line.count("|") for line in shown.split("### What")[0].splitlines() if "|" in line}) == 1
