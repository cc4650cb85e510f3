"""Scripts: what they leave alone, and that the synthetic pairs are what they claim to be."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch


SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    """Imports one by its name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def test_training_replaces_nothing_but_a_pair(script, tmp_path: Path):
    """It is refused before anything is trained."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is there already"):
        script("train_pair").main(work=tmp_path / "work", out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def tiny_recipe(grafted, **changes):
    recipe = grafted.Recipe(64, 96, 6, 2, heads=4, kv_heads=1, vocab=256, epsilon=0.1)
    return replace(recipe, **changes)


def test_a_grafted_draft_is_the_targets_first_layers(script):
    grafted = script("grafted")
    made = grafted.graft(tiny_recipe(grafted))
    storages = [{weight.untyped_storage().data_ptr() for weight in model.parameters()} for model in made[:2]]
    assert storages[1] < storages[0]  # in memory once
    ids = torch.arange(1, 9)[None]
    hidden = [model(ids, output_hidden_states=True).hidden_states for model in made[:2]]
    assert torch.equal(hidden[0][1], hidden[1][1])
    assert (len(hidden[0]), len(hidden[1])) == (7, 3)


def test_acceptance_of_grafted_pairs(script):
    """It falls with ε, and ε is found for one that is asked for; global random numbers stay as they were."""
    grafted, before = script("grafted"), torch.get_rng_state()
    alphas = [grafted.graft(tiny_recipe(grafted, epsilon=epsilon)).alpha for epsilon in (1e-4, 0.02, 0.1, 0.5, 1.0)]
    assert alphas == sorted(alphas, reverse=True)
    assert alphas[0] > 0.99
    assert grafted.graft(tiny_recipe(grafted, epsilon=None, alpha=0.5)).alpha == pytest.approx(0.5, abs=0.011)
    assert grafted.graft(tiny_recipe(grafted, unrelated=True)).alpha < 0.2
    assert grafted.graft(grafted.RECIPES["30M"]).alpha == pytest.approx(0.8, abs=0.02)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_bench_of_grafted_pairs(script, monkeypatch, tmp_path, capsys):
    grafted, out = script("grafted"), tmp_path / "speed.json"
    monkeypatch.setitem(grafted.RECIPES, "tiny", tiny_recipe(grafted))
    options = f"tiny --batch 1 2 --contender plain stock-2 block-2 --new-tokens 4 --repeats 1 --out {out}"
    monkeypatch.setattr(sys, "argv", ["grafted.py", *options.split()])
    grafted.main()
    assert [cell["cell"]["batch"] for cell in json.loads(out.read_text())["cells"]] == [1, 2]
    shown = capsys.readouterr().out
    assert "grafted-tiny in float32, batch 2, 64 prompt and 4 new tokens (synthetic, α 0." in shown
    assert "assisted generate is only supported for batch_size = 1 |" in shown


def test_two_commits_are_asked_the_same(script):
    """200 calls of every kind, none twice."""
    same = script("same")
    calls = [json.dumps(call) for call, _ in zip(same.calls(), range(same.CALLS), strict=False)]
    assert len(set(calls)) == same.CALLS
    assert {json.loads(call)["mode"] for call in calls} == {"greedy", "coupled", "token", "block"}
    assert same.text_of(json.loads(calls[0])) == same.text_of(json.loads(calls[0]))
