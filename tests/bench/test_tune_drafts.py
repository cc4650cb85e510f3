"""Trying drafts: what cannot be used, what is refused, and that nothing hostile is run."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from repositories import edit, pickled, ran, with_code
from tune_cases import QUICK

from hf_specx.bench import tune
from hf_specx.bench.study import Study
from hf_specx.pair_files.pair_config import Measurement


pytest_plugins = ["tune_fixtures"]


def test_memory_that_is_not_enough_for_a_draft_does_not_stop_the_others(folders, monkeypatch):
    def measure(target, draft, *others):
        if draft.model.name_or_path == folders["near"]:
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(tune, "measure_draft", measure)
    found = tune.tune(folders["target"], [folders["near"], folders["same"]], QUICK)
    assert [(trial.name, trial.error) for trial in found] == [
        (folders["same"], None),
        (folders["near"], "out of memory"),
    ]


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


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("kind", HOSTILE)
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


def test_drafts_that_cannot_be_used_do_not_stop_the_others(folders, costs, tmp_path):
    drafts = [str(tmp_path / "none"), folders["stranger"], folders["near"], str(tmp_path)]
    steps = []
    found = tune.tune(folders["target"], drafts, QUICK, advance=lambda: steps.append(1))
    assert [trial.error is None for trial in found] == [True, True, False, False]
    assert {trial.name for trial in found[:2]} == {folders["near"], folders["stranger"]}  # one has its own tokenizer
    errors = {trial.name: trial.error for trial in found[2:]}
    assert "config.json" in errors[str(tmp_path)]
    assert str(tmp_path / "none") in errors[str(tmp_path / "none")]
    assert all(trial.config is None and trial.pair is None for trial in found[2:])
    assert len(steps) == len(drafts) + 2 * QUICK.runs


def test_the_fastest_is_first_and_the_only_one_kept(folders, monkeypatch):
    speeds = {folders["near"]: (1.0, 1.2), folders["same"]: (4.0, 0.5), folders["bare"]: (1.1, 1.2)}

    def measure(target, draft, batches, study, config, advance):
        name = draft.model.name_or_path
        for batch, speed in enumerate(speeds[name], 1):
            figures = {"alpha": 0.5, "cost_coefficient": None, "tokens_per_round": 2.0, "measured_speedup": speed}
            kinds = {"dtype": "float32", "verification": "block", "num_draft_tokens": 2, "layout": "ragged"}
            place = {"hardware": "", "versions": {}, "command": ""}
            predicted = {"expected_speedup": None, "forward_limited_speedup": None}
            config.measurements.append(Measurement(batch=batch, **figures, **kinds, **predicted, **place))

    monkeypatch.setattr(tune, "measure_draft", measure)
    for drafts in (list(speeds), list(speeds)[::-1]):
        found = tune.tune(folders["target"], drafts, QUICK)
        assert [trial.name for trial in found] == [folders["same"], folders["bare"], folders["near"]]
        assert found[0].speedup == pytest.approx(2**0.5)
        assert [trial.pair is not None for trial in found] == [True, False, False]


def test_draft_without_tokenizer_is_not_checked(folders, costs):
    (trial,) = tune.tune(folders["target"], [folders["bare"]], replace(QUICK, batches=(1,)))
    assert trial.config.tokenizers is None
    assert trial.config.measurements


def test_folders_have_no_revisions(folders):
    with pytest.raises(ValueError, match="revision='v1' is for repositories on the Hub"):
        tune.tune(folders["target"], [folders["near"]], Study(), "v1")
    (trial,) = tune.tune(folders["target"], [folders["near"]], Study(), None, ["v2"])
    assert "revision='v2' is for repositories on the Hub" in trial.error


@pytest.mark.parametrize(
    ("changes", "drafts", "revisions", "message"),
    [
        ({"batches": (0,)}, ["near"], [], "batches=[0]"),
        ({"batches": (2, 2)}, ["near"], [], "batches=[2, 2]"),
        ({"repeats": 0}, ["near"], [], "repeats=0"),
        ({}, ["near", "near"], [], "each once"),
        ({}, [], [], "at least one"),
        ({}, ["near"], ["a", "b"], "2 revisions were given for 1 drafts"),
    ],
)
def test_studies_that_cannot_be_done(changes, drafts, revisions, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tune.tune("nowhere", drafts, replace(QUICK, **changes), None, revisions)


def test_targets_that_cannot_be_read(folders, tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer"):
        tune.tune(folders["bare"], [folders["near"]], QUICK)
    with pytest.raises(ValueError, match="more than the 128 positions"):
        tune.tune(folders["target"], [folders["near"]], replace(QUICK, options={"max_new_tokens": 200}))
    with pytest.raises((ValueError, OSError), match="nowhere"):
        tune.tune(str(tmp_path / "nowhere"), [folders["near"]], QUICK)
