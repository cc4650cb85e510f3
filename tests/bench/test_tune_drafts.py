"""Which drafts are tried, which are best, and which cannot be used; nothing hostile is run."""

import re
import shutil
from dataclasses import fields

import pytest
import torch
from repositories import edit, pickled, ran, with_code
from transformers import BartConfig, LlamaConfig
from tune_cases import FREE, QUICK

from hf_specx import EarlyExitDraft, SuffixDraft
from hf_specx.bench import tune
from hf_specx.bench.study import weightless_draft
from hf_specx.hub.pair_config import Measurement


def test_names_of_drafts_without_weights():
    assert isinstance(weightless_draft("suffix"), SuffixDraft)
    draft = weightless_draft("exit:12")
    assert isinstance(draft, EarlyExitDraft)
    assert draft.exit_layer == 12
    assert weightless_draft("org/suffix") is weightless_draft("./exit:4") is None
    for name in ("exit:", "exit:0", "exit:-1", "exit:a", "exit:1.5", "exit:²"):
        with pytest.raises(ValueError, match=f"'{name}' names no number of layers; give one of 1"):
            weightless_draft(name)


def test_what_exits_stand_for(monkeypatch):
    tried = [tune.exit_layers(LlamaConfig(num_hidden_layers=count)) for count in (1, 2, 12)]
    assert tried == [[], [1], [1, 2, 3, 4, 6]]
    assert tune.exit_layers(BartConfig()) == []
    monkeypatch.setattr(tune, "find_files", lambda *args: None)
    monkeypatch.setattr(tune, "load_config", lambda *args: LlamaConfig(num_hidden_layers=4))
    assert tune.drafts_to_try("t", [], QUICK) == ["suffix", "exit:1", "exit:2"]
    assert tune.drafts_to_try("t", ["a/b", "exit:1", "exits"], QUICK) == ["a/b", "exit:1", "exit:2"]


def test_all_kinds_are_ranked(folders, costs):
    costs |= {1: (FREE[0], 0.3), 2: (FREE[0], 0.3)}
    names = tune.drafts_to_try(folders["target"], [folders["near"], "suffix", "exits"], QUICK)
    assert names == [folders["near"], "suffix", "exit:1"]
    found = tune.tune(folders["target"], names, QUICK)
    assert {trial.name: trial.error for trial in found} == dict.fromkeys(names)
    assert [trial.speedup for trial in found] == sorted((trial.speedup for trial in found), reverse=True)
    suffix, early_exit = (next(t for t in found if t.name == name).config for name in names[1:])
    assert [m.num_draft_tokens for m in suffix.measurements] == [16, 16]
    assert suffix.num_draft_tokens == "auto"
    assert {m.cost_coefficient for m in early_exit.measurements} == {0.3}


def test_the_fastest_is_first_and_the_only_one_kept(folders, monkeypatch):
    speeds = {folders["near"]: (1.0, 1.2), folders["same"]: (4.0, 0.5), folders["bare"]: (1.1, 1.2)}

    def measure(target, draft, batches, study, config, advance):
        for speed in speeds[draft.model.name_or_path]:
            config.measurements.append(Measurement(**dict.fromkeys(FIGURES) | {"measured_speedup": speed}))

    monkeypatch.setattr(tune, "measure_draft", measure)
    for drafts in (list(speeds), list(speeds)[::-1]):
        found = tune.tune(folders["target"], drafts, QUICK)
        assert [trial.name for trial in found] == [folders["same"], folders["bare"], folders["near"]]
        assert found[0].speedup == pytest.approx(2**0.5)
        assert [trial.pair is not None for trial in found] == [True, False, False]


FIGURES = [field.name for field in fields(Measurement)]
HOSTILE = {
    "model": (
        "brings code of its own",
        [with_code("own.py", "Config"), edit("config.json", model_type="own", auto_map={"AutoConfig": "own.Config"})],
    ),
    "tokenizer": (
        "the tokenizer in .* brings code of its own",
        [with_code("own.py", "T"), edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.T", None]})],
    ),
    "weights": ("pytorch_model.bin, a pickle, which may run code", [pickled("pytorch_model.bin")]),
}


@pytest.mark.parametrize(("kind", "role"), [("model", "target"), ("tokenizer", "draft"), ("weights", "draft")])
def test_nothing_in_a_hostile_folder_is_run(folders, tmp_path, kind, role):
    message, changes = HOSTILE[kind]
    folder = tmp_path / "hostile"
    shutil.copytree(folders["near"], folder)
    for change in changes:
        change(folder)
    if role == "target":
        with pytest.raises(ValueError, match=message):
            tune.tune(str(folder), [folders["near"]], QUICK)
    else:
        (trial,) = tune.tune(folders["target"], [str(folder)], QUICK)
        assert re.search(message, trial.error)
        assert trial.pair is None
    assert not ran(folder)


def test_drafts_that_cannot_be_used_do_not_stop_the_others(folders, costs, tmp_path, monkeypatch):
    def measure(target, draft, *others):
        if getattr(draft.model, "name_or_path", "") == folders["same"]:
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(tune, "measure_draft", measure)
    usable = [folders["stranger"], folders["bare"], "exit:1"]  # a tokenizer of its own, none, no model
    errors = {
        str(tmp_path / "none"): "none",
        str(tmp_path): "config.json",
        folders["same"]: "out of memory",
        "exit:7": "exit_layer=7 leaves out no layer of LlamaForCausalLM, which has 2; give 1 to 1",
    }
    found = tune.tune(folders["target"], [*errors, *usable], QUICK)
    assert [trial.error is None for trial in found] == [True] * 3 + [False] * 4
    assert {trial.name for trial in found[:3]} == set(usable)
    for trial in found[3:]:
        assert re.search(errors[trial.name], trial.error)
        assert trial.config is trial.pair is None
