"""The `evaluate` modules: where they are, and what acceptance and sequence equality say of small examples."""

import socket
from pathlib import Path

import evaluate
import pytest
from metric_modules import load

from hf_specx import metrics


def test_acceptance_by_hand():
    """Two rows: 2 of 4, 1 of 1 and a plain step; 0 of 4."""
    result = load("acceptance").compute(predictions=[[2, 1, 0], [0]], references=[[4, 1, 0], [4]])
    assert result == {
        "alpha": 3 / 5,
        "acceptance_rate": 3 / 9,
        "per_position": [2 / 3, 1 / 2, 0.0, 0.0],
        "tokens_per_round": 2.0,
        "rounds": 3,
        "overlap": None,
    }
    counts = {"predictions": [[2], [0]], "references": [[4], [1]]}
    result = load("acceptance").compute(**counts, overlaps=[[0.9, 0.8, 0.4], [0.1]])
    assert result["alpha"] == result["overlap"] == pytest.approx(0.55)
    assert result["acceptance_rate"] == 2 / 5


@pytest.mark.parametrize("rows", [[[]], [[0, 0]]])
def test_acceptance_of_nothing(rows: list):
    result = load("acceptance").compute(predictions=rows, references=rows)
    assert result["per_position"] == []
    assert [result[name] for name in ("alpha", "acceptance_rate", "tokens_per_round", "rounds")] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("accepted", "drafted", "overlaps", "message"),
    [
        ([[1, 2]], [[4]], None, "drafted"),
        ([[1]], [[4]], [[0.5] * 3], "2 judged"),
        ([[1]], [[4]], [[0.5, 1.5]], "2 judged"),
    ],
)
def test_acceptance_of_what_does_not_fit(accepted: list, drafted: list, overlaps: list | None, message: str):
    with pytest.raises(ValueError, match=message):
        load("acceptance").compute(predictions=accepted, references=drafted, overlaps=overlaps)


@pytest.mark.parametrize(
    ("left", "right", "difference"),
    [
        ([1, 2, 3], [1, 2, 3], -1),
        ([], [], -1),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([], [7], 0),
    ],
)
def test_first_difference(left: list, right: list, difference: int):
    metric = load("sequence_equality")
    result = metric.compute(predictions=[left, [9]], references=[right, [9]])
    equal = difference == -1
    assert result == {"exact_match": (1 + equal) / 2, "equal": [equal, True], "first_difference": [difference, -1]}


def test_all_modules_load_and_combine_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a connection was tried")

    for place, name in ((socket.socket, "connect"), (socket, "create_connection"), (socket, "getaddrinfo")):
        monkeypatch.setattr(place, name, refuse)
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path)
    assert {file.stem for file in Path(metrics.__file__).parent.glob("*/*.py")} == set(metrics.NAMES)
    combined = evaluate.combine([metrics.path(name) for name in ("sequence_equality", "acceptance")])
    result = combined.compute(predictions=[[1, 2]] * 20, references=[[1, 2]] * 19 + [[1, 3]])
    assert (result["exact_match"], result["rounds"]) == (0.95, 40)
    assert all(evaluate.load(metrics.path(name)).name == name for name in metrics.NAMES)
