"""The folders of the `evaluate` modules, and what acceptance and sequence equality say of small examples."""

from pathlib import Path

import pytest
import torch
from metric_modules import load
from rounds import made_round
from tiny import near, prompts, tiny

from hf_specx import SpeculativeDecoding, metrics
from hf_specx.engine.report import SpeculationReport


def test_paths_are_those_of_the_folders():
    files = {file.stem for file in Path(metrics.__file__).parent.glob("*/*.py")}
    assert files == set(metrics.NAMES)
    for name in metrics.NAMES:
        assert Path(metrics.path(name)).is_absolute()
        assert load(name).name == name


def test_acceptance_by_hand():
    """Two rows: 2 of 4, 1 of 1 and a plain step; 0 of 4."""
    found = load("acceptance").compute(predictions=[[2, 1, 0], [0]], references=[[4, 1, 0], [4]])
    assert found == {
        "alpha": 3 / 5,
        "acceptance_rate": 3 / 9,
        "per_position": [2 / 3, 1 / 2, 0.0, 0.0],
        "tokens_per_round": 2.0,
        "rounds": 3,
        "overlap": None,
    }


def test_acceptance_with_overlaps():
    counts = {"predictions": [[2], [0]], "references": [[4], [1]]}
    found = load("acceptance").compute(**counts, overlaps=[[0.9, 0.8, 0.4], [0.1]])
    assert found["alpha"] == found["overlap"] == pytest.approx(0.55)
    assert found["acceptance_rate"] == 2 / 5


@pytest.mark.parametrize("rows", [[[]], [[0, 0]]])
def test_acceptance_of_nothing(rows: list):
    found = load("acceptance").compute(predictions=rows, references=rows)
    assert found["per_position"] == []
    assert [found[name] for name in ("alpha", "acceptance_rate", "tokens_per_round", "rounds")] == [0, 0, 1, 0]


def test_acceptance_is_that_of_the_report():
    report = SpeculationReport("token", "ragged", "", rows=2)
    shared = [[0.9, 0.7, 0.5], [0.8, 0.2, 0.6]]
    report.observe(made_round([0, 0], [0, 0]))
    report.observe(made_round([3, 3], [2, 0], overlap=[shared[0], [0.8, 0.4, 0.4]]))  # two are not judged
    report.observe(made_round([2], [1], rows=[1], overlap=[shared[1][1:]]))
    accepted, drafted = ([[getattr(r, n) for r in row] for row in report.history] for n in ("accepted", "drafted"))
    found = load("acceptance").compute(predictions=accepted, references=drafted, overlaps=shared)
    assert found["alpha"] == pytest.approx(report.alpha)
    assert found["acceptance_rate"] == report.acceptance_rate
    assert found["tokens_per_round"] == report.tokens_per_round == report.mean_acceptance_length
    pairs = zip(report.accepted_per_position, report.drafted_per_position, strict=True)
    assert found["per_position"] == [kept / number for kept, number in pairs]


def test_acceptance_of_a_call():
    """Without overlaps it estimates α under token verification: some thousand judged, so within 0.05."""
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.3), num_draft_tokens=4, verification="token")
    torch.manual_seed(0)
    target.generate(**prompts(32), do_sample=True, max_new_tokens=40, custom_generate=strategy)
    history = strategy.report.history
    accepted, drafted = ([[getattr(r, n) for r in row] for row in history] for n in ("accepted", "drafted"))
    found = load("acceptance").compute(predictions=accepted, references=drafted)
    assert found["rounds"] == sum(strategy.report.rounds_per_row)
    assert strategy.report.judged > 1000
    assert 0.2 < found["alpha"] < 0.95
    assert found["alpha"] == pytest.approx(strategy.report.alpha, abs=0.05)


@pytest.mark.parametrize(
    ("accepted", "drafted", "overlaps", "message"),
    [
        ([[1, 2]], [[4]], None, r"accepted=\[1, 2\] of drafted=\[4\]; give"),
        ([[0], [5]], [[4], [4]], None, r"accepted=\[5\] of drafted=\[4\]"),
        ([[-1]], [[4]], None, "0 to all of the candidates"),
        ([[1]], [[4]], [[0.5] * 3], "0 to 1, of the 2 judged candidates and no others"),
        ([[1]], [[4]], [[0.5, 1.5]], "0 to 1, of the 2 judged"),
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
        ([4, 2], [5, 2], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [7], 0),
    ],
)
def test_first_difference(left: list, right: list, difference: int):
    metric = load("sequence_equality")
    found = metric.compute(predictions=[left, [9]], references=[right, [9]])
    equal = difference == -1
    assert found == {"exact_match": (1 + equal) / 2, "equal": [equal, True], "first_difference": [difference, -1]}


def test_sequences_may_be_added_in_batches():
    metric = load("sequence_equality")
    metric.add_batch(predictions=torch.tensor([[1, 2], [3, 4]]), references=torch.tensor([[1, 2], [3, 5]]))
    metric.add(prediction=[1], reference=[1])
    assert metric.compute()["first_difference"] == [-1, 1, -1]
