"""The folders of the `evaluate` modules, and what acceptance and sequence equality say of small examples."""

import ast
import re
import runpy
import sys
from pathlib import Path

import evaluate
import pytest
import torch
from huggingface_hub import metadata_load
from metric_modules import load
from rounds import made_round
from tiny import near, prompts, tiny

from hf_specx import SpeculativeDecoding, metrics
from hf_specx.engine.report import SpeculationReport


def test_paths_are_those_of_the_folders():
    folders = {path.parent.name for path in Path(metrics.__file__).parent.glob("*/README.md")}
    assert folders == set(metrics.NAMES)
    for name in metrics.NAMES:
        assert Path(metrics.path(name)).is_absolute()
        assert (Path(metrics.path(name)) / f"{name}.py").exists()


@pytest.mark.parametrize("name", metrics.NAMES)
def test_each_is_a_space(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Its card says what evaluate's own Spaces say, and its page shows the module beside it."""
    folder, shown = Path(metrics.path(name)), []
    front = metadata_load(folder / "README.md")
    assert (front["sdk"], front["app_file"]) == ("gradio", "app.py")
    assert {"evaluate", "metric"} <= set(front["tags"])
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path)
    monkeypatch.setattr(evaluate.utils, "launch_gradio_widget", shown.append)
    runpy.run_path(str(folder / "app.py"))
    (module,) = shown
    assert module.name == name
    assert module.info.description in " ".join((folder / "README.md").read_text().split())


@pytest.mark.parametrize("name", metrics.NAMES)
def test_each_needs_what_it_says(name: str):
    """It is published alone, so it imports nothing of ours."""
    folder = Path(metrics.path(name))
    needed = set()
    for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            needed |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            needed.add(node.module.split(".")[0])
    listed = set(re.findall(r"^[a-z_]+", (folder / "requirements.txt").read_text(), re.MULTILINE))
    assert needed - sys.stdlib_module_names == listed


@pytest.mark.parametrize("name", metrics.NAMES)
def test_the_example_of_a_card_runs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path)
    text = (Path(metrics.path(name)) / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    assert "assert" in example
    exec(example, {})


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
        ([[1, 2]], [[4]], None, r"row 0 has accepted=\[1, 2\] for drafted=\[4\]; give"),
        ([[0], [5]], [[4], [4]], None, r"row 1 has accepted=\[5\] of drafted=\[4\]; it must be"),
        ([[-1]], [[4]], None, "it must be 0 to all of them"),
        ([[1]], [[4]], [[0.5] * 3], "row 0 has 3 overlaps for 2 judged candidates; leave out"),
        ([[1]], [[4]], [], "overlaps has 0 rows and predictions 1; give"),
        ([[1]], [[4]], [[0.5, 1.5]], "overlaps of row 0 are not within 0 and 1; give"),
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
