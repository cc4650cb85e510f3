"""Drafts without weights by name, tried for a target, ranked beside models, and saved as a pair."""

from dataclasses import replace

import pytest
import torch
from tiny import prompts
from transformers import BartConfig, LlamaConfig
from tune_cases import FREE, QUICK

from hf_specx import DraftTargetPair, EarlyExitDraft, SuffixDraft
from hf_specx.bench import tune
from hf_specx.bench.study import exit_layers, named_drafts, weightless_draft


pytest_plugins = ["tune_fixtures"]


def of_layers(count: int) -> LlamaConfig:
    return LlamaConfig(num_hidden_layers=count)


def test_by_name():
    assert isinstance(weightless_draft("suffix"), SuffixDraft)
    draft = weightless_draft("exit:12")
    assert isinstance(draft, EarlyExitDraft)
    assert draft.exit_layer == 12
    assert weightless_draft("org/suffix") is weightless_draft("./exit:4") is None


@pytest.mark.parametrize("name", ["exit:", "exit:0", "exit:-1", "exit:a", "exit:1.5", "exit:²"])
def test_names_without_a_number(name: str):
    with pytest.raises(ValueError, match=f"'{name}' names no number of layers; give one of 1 or more, like exit:4"):
        weightless_draft(name)


@pytest.mark.parametrize(("count", "tried"), [(1, []), (2, [1]), (4, [1, 2]), (12, [1, 2, 3, 4, 6]), (1000, None)])
def test_layers_that_are_tried(count: int, tried: list[int] | None):
    found = exit_layers(of_layers(count))
    assert tried is None or found == tried
    assert len(found) <= 6
    assert exit_layers(BartConfig()) == []


def test_names_of_drafts():
    config = of_layers(4)
    assert named_drafts([], config) == ["suffix", "exit:1", "exit:2"]
    assert named_drafts(["a/b", "exit:1", "exits"], config) == ["a/b", "exit:1", "exit:2"]
    assert named_drafts(["a/b", "a/b"], config) == ["a/b", "a/b"]  # which is refused later


def test_ranked_beside_models_and_saved(folders, costs, tmp_path, monkeypatch):
    costs |= {1: (FREE[0], 0.3), 2: (FREE[0], 0.3)}
    names = tune.drafts_to_try(folders["target"], [folders["near"], "suffix", "exits"], QUICK)
    assert names == [folders["near"], "suffix", "exit:1"]
    steps = []
    found = tune.tune(folders["target"], names, QUICK, advance=lambda: steps.append(1))
    assert len(steps) == len(names) * (1 + QUICK.runs)
    assert {trial.name: trial.error for trial in found} == dict.fromkeys(names)
    assert [trial.speedup for trial in found] == sorted((trial.speedup for trial in found), reverse=True)
    suffix, early_exit = (next(t for t in found if t.name == name).config for name in names[1:])
    assert suffix.suffix is not None
    assert early_exit.early_exit.exit_layer == 1
    assert [m.num_draft_tokens for m in suffix.measurements] == [16, 16]
    assert suffix.num_draft_tokens == "auto"
    assert {m.cost_coefficient for m in early_exit.measurements} == {0.3}
    assert all(0 <= m.alpha <= 1 for config in (suffix, early_exit) for m in config.measurements)


@pytest.mark.parametrize("name", ["suffix", "exit:1"])
def test_the_saved_pair(folders, costs, tmp_path, name):
    """With its times, also those of rounds with as many candidates as a suffix may have."""
    (trial,) = tune.tune(folders["target"], [name], replace(QUICK, options={"max_new_tokens": 40, "do_sample": False}))
    assert trial.error is None
    trial.pair.strategy.costs.rounds[1] = {16: 0.5}
    trial.config.costs.rounds["1"] = {"16": 0.5}
    trial.pair.save_pretrained(tmp_path / "pair")
    pair = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert type(pair.draft) is type(weightless_draft(name))
    assert pair.strategy.costs.rounds[1] == {16: 0.5}
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(pair.generate(**prompts(2), **options), pair.target.generate(**prompts(2), **options))


def test_those_that_cannot_serve(folders, costs):
    found = tune.tune(folders["target"], ["exit:7", "exit:1"], replace(QUICK, prompts=[]))
    assert [(trial.name, trial.error is None) for trial in found] == [("exit:1", True), ("exit:7", False)]
    assert "exit_layer=7 leaves out no layer of LlamaForCausalLM, which has 2; give 1 to 1" in found[1].error
    assert [finding.draft for finding in found[0].findings] == ["the first 1 of them"]


def test_revisions_are_of_models_alone(folders, costs):
    study = replace(QUICK, prompts=[])
    (first, second) = tune.tune(folders["target"], ["suffix", folders["near"]], study, None, ["v2"])
    assert (first.name, first.error) == ("suffix", None)
    assert "revision='v2' is for repositories on the Hub" in second.error
    with pytest.raises(ValueError, match="1 revisions were given for 0 drafts"):
        tune.tune(folders["target"], ["suffix"], study, None, ["v2"])
