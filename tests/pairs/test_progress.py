"""How far `complete` is."""

import io
import sys

import pytest

from hf_specx.pairs.complete import Progress


@pytest.mark.parametrize(("total", "shown"), [(100, "60 of 100 prompts in "), (None, "60 prompts in ")])
def test_how_fast_and_how_long(monkeypatch: pytest.MonkeyPatch, total: int | None, shown: str):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress(total, 40) as progress:
        progress.emitted, progress.drafted, progress.accepted = 1000, 400, 300
        progress.reach(50)
        assert sys.stderr.getvalue() == ""  # not for every one
        progress.delay = progress.mininterval = 0
        progress.reach(60)
    assert shown in sys.stderr.getvalue()
    assert "tokens/s, 75% of candidates accepted" in sys.stderr.getvalue()
