"""Figures: written for what there is, and refused without matplotlib."""

from xml.etree import ElementTree

import pytest
from bench_cases import measured, ours, plain, small, speed

from hf_specx.bench import plots as bench_plots
from hf_specx.bench.cells import AUTO_NUMBERS, TEMPERATURES
from hf_specx.bench.checks import check_plots


pytest.importorskip("matplotlib")


def cells():
    fixed = {f"block_{number}": ours(20.0, 1 + number / 8) for number in AUTO_NUMBERS}
    auto = measured(small("plain", experiment="auto"), plain=plain(), block_auto=ours(1.0, 1.5), **fixed)
    warm = [
        measured(small("plain", experiment="temperature", temperature=t), plain=plain(), block_auto=ours(9.0, 1.2))
        for t in TEMPERATURES
    ]
    return [speed(), speed(batch=8), auto, *warm, measured(small("plain", batch=4)) | {"failed": "no memory"}]


def test_all_figures(tmp_path):
    written = bench_plots.plot(cells(), tmp_path / "new")
    assert [path.name for path in written] == [
        f"{name}.svg" for name in ("batch", "alpha", "gamma", "temperature", "rounds")
    ]
    for path in written:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert not bench_plots.pyplot.get_fignums()


def test_only_what_there_is_data_for(tmp_path):
    assert [path.name for path in bench_plots.plot(cells()[2:3], tmp_path)] == ["alpha.svg", "gamma.svg"]
    assert bench_plots.plot([], tmp_path / "empty") == []
    assert not bench_plots.pyplot.get_fignums()


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_specx.bench.checks.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="figures need matplotlib: pip install"):
        check_plots(tmp_path / "new")
    assert not (tmp_path / "new").exists()
