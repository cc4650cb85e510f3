"""Scripts: what they leave alone."""

import runpy
from pathlib import Path

import pytest


def test_training_replaces_nothing_but_a_pair(tmp_path: Path):
    """It is refused before anything is trained."""
    main = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "train_pair.py"))["main"]
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is there already"):
        main(work=tmp_path / "work", out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
