"""Figures of a check: drawn for what there is, true to the numbers, and nothing of pyplot is touched."""

import io
import subprocess
import sys

import numpy
import pytest
from page_cases import ACCEPTANCE, SPEED, made
from scipy import stats

from hf_specx.equivalence import plots as check_plots
from hf_specx.equivalence.plots import by_verification, interval, plots


pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def drawn():
    return {plot.name: plot for plot in plots(made().to_dict())}


def test_all_figures(drawn):
    assert list(drawn) == ["acceptance", "lengths", "speed"]
    for plot in drawn.values():
        with Image.open(io.BytesIO(plot.png)) as opened:
            pixels = numpy.asarray(opened.convert("RGB"))
        assert pixels.shape == (700, 880, 3)
        assert (pixels[0, 0] == 255).all()  # on white in both schemes
        assert (pixels != 255).any(axis=-1).mean() > 0.02  # something is drawn
        assert {len(row) for row in plot.rows} == {len(plot.header)}


def test_only_what_there_is_data_for():
    assert [plot.name for plot in plots(made(speed={}).to_dict())] == ["acceptance", "lengths"]
    assert [plot.name for plot in plots(made(cells={}).to_dict())] == ["speed"]
    assert plots(made(cells={"token": {"quality": {}}}, speed={}).to_dict()) == []


def test_numbers_of_acceptance(drawn):
    plot = drawn["acceptance"]
    assert plot.header == ["", "α", "tokens a round", "kept at 1", "kept at 2", "kept at 3"]
    assert plot.rows[2] == ["token, batch 1", "0.731", "2.80", "0.750 of 40", "0.800 of 30", "0.750 of 24"]
    assert "token 0.75 at the first position and 0.75 at the last" in plot.alt


def test_numbers_of_lengths(drawn):
    plot = drawn["lengths"]
    assert plot.header == ["rounds that kept", "0", "1", "2", "3"]
    assert plot.rows[0] == ["greedy, batch 1", "10", "6", "6", "18"]
    assert "coupled none in 25% and 3 in 45%" in plot.alt


def test_numbers_of_speed(drawn):
    plot = drawn["speed"]
    assert len(plot.rows) == len(SPEED["numbers"]) == 8
    assert plot.rows[3] == ["4", "1.50", "1.00", "1.75", "1.55", "1.60", "2.33", "64.0"]
    assert "measured 1.10 to 1.50, best at 4; limited by the forwards 1.55 to 1.55" in plot.alt
    assert "A measurement, and no part of the verdict: 3 runs" in plot.caption
    assert "1 row of at most 64 new tokens" in plot.caption
    assert "α = 0.751 and c = 0.183" in plot.caption
    assert "61.5 tokens a second" in plot.caption


def test_what_is_drawn(monkeypatch):
    """Lines and bars are at the numbers that they stand for."""
    figures = []
    png = check_plots._png
    monkeypatch.setattr(check_plots, "_png", lambda figure: figures.append(figure) or png(figure))
    plots(made().to_dict())
    acceptance, lengths, speed = (figure.axes[0] for figure in figures)
    (greedy, *_), _ = acceptance.containers[0], None
    assert list(greedy.get_ydata()) == pytest.approx([0.75, 0.8, 0.75])
    assert [bar.get_height() for bar in lengths.containers[2]] == pytest.approx([0.25, 0.15, 0.15, 0.45])
    measured, *_ = speed.containers[0]
    assert list(measured.get_ydata()) == [each["times_plain"] for each in SPEED["numbers"]]
    limit, theorem = (
        next(x for x in speed.lines if x.get_label() == name) for name in ("limited by the forwards", "Theorem 3.8")
    )
    assert list(limit.get_ydata()) == [1.55] * 8
    assert list(theorem.get_ydata()) == [1.6] * 8


def test_batch_sizes_are_pooled():
    longer = {
        "accepted_lengths": [1, 2, 3, 4, 5],
        "judged_per_position": [9, 8, 7, 6],
        "accepted_per_position": [8, 7, 6, 5],
    }
    pooled = by_verification({"token, batch 1": ACCEPTANCE, "token, batch 8": longer, "block, batch 1": longer})
    assert pooled == {
        "token": {
            "accepted_lengths": [11, 8, 9, 22, 5],
            "judged_per_position": [49, 38, 31, 6],
            "accepted_per_position": [38, 31, 24, 5],
        },
        "block": longer,
    }


@pytest.mark.parametrize(("kept", "judged"), [(0, 5), (5, 5), (3, 7), (180, 400)])
def test_intervals_are_those_of_wilson(kept, judged):
    expected = stats.binomtest(kept, judged).proportion_ci(method="wilson")
    share, low, high = interval(kept, judged)
    assert share == kept / judged
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-4)
    assert 0 <= low <= share <= high <= 1


def test_pyplot_is_left_alone():
    """In a process of its own, since other tests use it."""
    code = """
import sys
import matplotlib
sys.path.insert(0, "tests/equivalence")
from page_cases import made
from hf_specx.equivalence.plots import plots

def settings():
    return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}  # looks for one

before = settings()
plots(made().to_dict())
print("matplotlib.pyplot" in sys.modules, before == settings())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
