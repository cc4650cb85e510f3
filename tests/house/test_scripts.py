"""Scripts: what they leave alone, that the synthetic pairs are what they claim to be, and how large the house is."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_specx.hub.flatten import PACKAGE


MOST = {"call": 11_100, "package": 20_550, "tests": 27_250, "scripts": 1_200}  # lines, as they are: it may only fall
MOST |= {"files": 31, "functions": 230, "calls": 350}  # of a call of `generate`


@pytest.fixture
def script(monkeypatch):
    """Imports one by its name."""
    monkeypatch.syspath_prepend(str(PACKAGE.parent / "scripts"))
    return importlib.import_module


def test_the_house_and_a_call_stay_small(script):
    count = script("count")
    found = count.count_lines() | count.count_call()
    assert {name: found[name] for name, most in MOST.items() if found[name] > most} == {}


def test_training_replaces_nothing_but_a_pair(script, tmp_path: Path):
    """It is refused before anything is trained."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is there already"):
        script("train_pair").main(work=tmp_path / "work", out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def tiny_recipe(grafted, **changes):
    recipe = grafted.Recipe(64, 96, 6, 2, heads=4, kv_heads=1, vocab=256, epsilon=0.1)
    return replace(recipe, **changes)


def test_grafted_pairs(script):
    """The draft is the target's first layers, and α falls with ε, which is found for one that is asked for."""
    grafted, before = script("grafted"), torch.get_rng_state()
    target, draft, _ = grafted.graft(tiny_recipe(grafted))
    shared, own = ({weight.untyped_storage().data_ptr() for weight in x.parameters()} for x in (draft, target))
    assert shared < own  # in memory once
    alphas = [grafted.graft(tiny_recipe(grafted, epsilon=epsilon)).alpha for epsilon in (1e-4, 0.02, 0.1, 0.5, 1.0)]
    assert alphas == sorted(alphas, reverse=True)
    assert grafted.graft(tiny_recipe(grafted, epsilon=None, alpha=0.5)).alpha == pytest.approx(0.5, abs=0.011)
    assert grafted.graft(tiny_recipe(grafted, unrelated=True)).alpha < 0.2
    assert torch.equal(torch.get_rng_state(), before)


def test_the_bench_of_grafted_pairs(script, monkeypatch, tmp_path, capsys):
    grafted, out = script("grafted"), tmp_path / "speed.json"
    monkeypatch.setitem(grafted.RECIPES, "tiny", tiny_recipe(grafted))
    options = f"tiny --batch 1 2 --contender plain stock-2 block-2 --new-tokens 4 --repeats 1 --out {out}"
    monkeypatch.setattr(sys, "argv", ["grafted.py", *options.split()])
    grafted.main()
    assert [cell["cell"]["batch"] for cell in json.loads(out.read_text())["cells"]] == [1, 2]
    assert "grafted-tiny in float32, batch 2, 64 prompt and 4 new tokens (synthetic, α 0." in capsys.readouterr().out


def test_two_commits_are_asked_the_same(script):
    """200 calls of every kind, none twice."""
    same = script("same")
    calls = [json.dumps(call) for call, _ in zip(same.calls(), range(same.CALLS), strict=False)]
    assert len(set(calls)) == same.CALLS
    assert {json.loads(call)["mode"] for call in calls} == {"greedy", "coupled", "token", "block"}
    assert same.text_of(json.loads(calls[0])) == same.text_of(json.loads(calls[0]))


def test_a_page_without_its_markers_is_refused(script, tmp_path):
    """Before anything is measured."""
    pytest.importorskip("outlines")
    (tmp_path / "page.md").write_text("no markers")
    with pytest.raises(ValueError, match="the page must have one <!-- speed_table.py begins"):
        script("speed_table").main(readme=tmp_path / "page.md", out=tmp_path / "speed.json")
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
