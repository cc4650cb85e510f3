"""Trying drafts: which can be used, what is measured and recommended, and what the config says of it."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from tiny import near, tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer
from transformers import T5Config, T5ForConditionalGeneration

from hf_specx import Costs, DraftTargetPair, SpeculativeDecoding, tune
from hf_specx.devices import hardware
from hf_specx.pair_config import Measurement, PairConfig
from hf_specx.study import Study


SIZES = {"vocab_size": 280, "eos_token_id": None, "pad_token_id": 1}
QUICK = Study(list(TEXTS), (1, 2), {"max_new_tokens": 6, "do_sample": True, "top_k": 0}, repeats=1, command="typed")
FREE = {1: 1.0, 9: 1.0}, 0.01  # a larger forward costs nothing more, a draft step next to nothing
DEAR = {1: 1.0, 9: 9.0}, 0.9


def save(folder, model, tokenizer=None):
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and drafts of all kinds."""
    root = tmp_path_factory.mktemp("models")
    target = tiny(**SIZES)
    models = {
        "target": (target, tiny_tokenizer()),
        "same": (target, tiny_tokenizer()),
        "near": (near(target, 0.1), tiny_tokenizer()),
        "bare": (near(target, 0.1), None),
        "stranger": (tiny(**SIZES), tiny_tokenizer(["some other words"])),
    }
    return {name: save(root / name, *parts) for name, parts in models.items()}


@pytest.fixture
def costs(monkeypatch):
    """Known times of forwards, by batch size."""
    table = {1: FREE, 2: FREE}

    def calibrate(strategy, model, input_ids):
        target, draft = table[len(input_ids)]
        strategy.costs.table[len(input_ids)] = {"target": dict(target), "draft": draft}

    monkeypatch.setattr(SpeculativeDecoding, "calibrate", calibrate)
    return table


def test_what_a_config_gets(folders, costs):
    (trial,) = tune.tune(folders["target"], [folders["near"]], QUICK)
    assert trial.error is None
    config = trial.config
    assert PairConfig.from_text(config.to_text().encode(), "it") == config
    assert (config.target.name, config.target.subfolder, config.draft.subfolder) == (None, "", "draft")
    assert (config.target.model_type, config.draft.vocab_size, config.target.dtype) == ("llama", 280, "float32")
    assert config.target.fingerprint not in (None, config.draft.fingerprint)
    assert (config.tokenizers.method, config.tokenizers.tokens) == ("content", 277)
    assert config.prompts == []
    assert [m.batch for m in config.measurements] == [1, 2]
    for m in config.measurements:
        assert (m.dtype, m.verification, m.layout, m.command) == ("float32", "block", "ragged", "typed")
        assert m.hardware == config.costs.hardware == hardware(torch.device("cpu"))
        assert m.versions["torch"] == torch.__version__
        assert m.cost_coefficient == 0.01
        assert 0 < m.alpha < 1 < m.tokens_per_round
        assert min(m.expected_speedup, m.forward_limited_speedup, m.measured_speedup) > 0


def test_the_pair_is_ready(folders, costs, tmp_path):
    (trial,) = tune.tune(folders["target"], [folders["near"]], replace(QUICK, keep_prompts=True))
    trial.pair.save_pretrained(tmp_path / "pair")
    pair = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert pair.prompts == list(TEXTS)
    assert pair.config.measurements == trial.config.measurements
    inputs = pair.tokenizer(["the cat"], return_tensors="pt")
    expected = pair.target.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert torch.equal(pair.generate(**inputs, max_new_tokens=6, do_sample=False), expected)
    assert pair.strategy.num_draft_tokens == trial.config.num_draft_tokens
    assert pair.report.drafted > 0
    assert pair.strategy.costs.table[1]["draft"] == 0.01


@pytest.mark.parametrize("greedy", [False, True])
def test_acceptance_is_learned_and_not_assumed(folders, costs, greedy):
    """A draft that is the target: its acceptance is 1, however little was seen of it."""
    options = {"max_new_tokens": 6, "do_sample": not greedy} | ({} if greedy else {"top_k": 0})
    (trial,) = tune.tune(folders["target"], [folders["same"]], replace(QUICK, options=options))
    assert all(m.alpha == pytest.approx(1, abs=1e-4) for m in trial.measurements)
    assert trial.config.costs.alpha == pytest.approx({"greedy" if greedy else "block": 1}, abs=1e-4)


@pytest.mark.parametrize(("second", "numbers", "recommended"), [(FREE, [8, 8], 8), (DEAR, [8, 1], "auto")])
def test_recommended_number(folders, costs, second, numbers, recommended):
    costs[2] = second
    (trial,) = tune.tune(folders["target"], [folders["same"]], QUICK)
    assert [m.num_draft_tokens for m in trial.measurements] == numbers
    assert trial.config.num_draft_tokens == recommended
    saved = trial.config.costs_on(hardware(torch.device("cpu")), "float32")
    assert [saved.best_num_draft_tokens(batch, "block") for batch in (1, 2)] == numbers


def test_forwards_are_timed_where_nothing_is_known(folders):
    (trial,) = tune.tune(folders["target"], [folders["near"]], replace(QUICK, batches=(2,)))
    assert set(trial.config.costs.table) == {"2"}
    assert trial.measurements[0].cost_coefficient == Costs.from_dict(vars(trial.config.costs)).cost_coefficient(2)


def test_verification_is_kept(folders, costs):
    (trial,) = tune.tune(folders["target"], [folders["near"]], replace(QUICK, verification="coupled"))
    assert trial.config.verification == trial.measurements[0].verification == "coupled"
    assert set(trial.config.costs.alpha) == {"coupled"}


def test_drafts_that_cannot_be_used_do_not_stop_the_others(folders, costs, tmp_path):
    drafts = [str(tmp_path / "none"), folders["stranger"], folders["near"], str(tmp_path)]
    steps = []
    found = tune.tune(folders["target"], drafts, QUICK, advance=lambda: steps.append(1))
    assert [trial.error is None for trial in found] == [True, False, False, False]
    assert found[0].name == folders["near"]
    errors = {trial.name: trial.error for trial in found[1:]}
    assert "the two tokenizers differ" in errors[folders["stranger"]]
    assert "config.json" in errors[str(tmp_path)]
    assert str(tmp_path / "none") in errors[str(tmp_path / "none")]
    assert all(trial.config is None and trial.pair is None for trial in found[1:])
    assert len(steps) == len(drafts) + QUICK.runs


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

    monkeypatch.setattr(tune, "measure", measure)
    for drafts in (list(speeds), list(speeds)[::-1]):
        found = tune.tune(folders["target"], drafts, QUICK)
        assert [trial.name for trial in found] == [folders["same"], folders["bare"], folders["near"]]
        assert found[0].speedup == pytest.approx(2**0.5)
        assert [trial.pair is not None for trial in found] == [True, False, False]


def test_without_prompts_nothing_is_decoded(folders, monkeypatch):
    monkeypatch.setattr(SpeculativeDecoding, "__call__", None)
    (trial,) = tune.tune(folders["target"], [folders["near"]], Study())
    assert trial.measurements == []
    assert trial.config.costs is None
    assert trial.config.num_draft_tokens == "auto"
    assert len(trial.findings) == 8
    assert trial.pair is not None


def test_draft_without_tokenizer_is_not_checked(folders, costs):
    (trial,) = tune.tune(folders["target"], [folders["bare"]], replace(QUICK, batches=(1,)))
    assert trial.config.tokenizers is None
    assert trial.config.measurements


def test_prompts_go_on_from_run_to_run(folders, monkeypatch):
    seen = []
    monkeypatch.setattr(tune, "encode", lambda tokenizer, model, texts, new: seen.append(texts))
    target = tune.load(folders["target"], None, QUICK, None)
    tune.encode_batches("it", target, replace(QUICK, batches=(2,), repeats=2))
    assert seen == [[TEXTS[0], TEXTS[1]], [TEXTS[2], TEXTS[0]]]


def test_revisions_and_tokens_reach_the_hub(folders, monkeypatch):
    seen = []
    plain = tune.get_files

    def get_files(name, revision, patterns, **hub):
        seen.append((name, revision, hub))
        return plain(name, None, patterns)

    monkeypatch.setattr(tune, "get_files", get_files)
    drafts = [folders["near"], folders["bare"]]
    tune.tune(folders["target"], drafts, Study(hub={"token": "t"}), "v1", [None, "v2"])
    names = [folders["target"], *drafts]
    assert seen == list(zip(names, ["v1", None, "v2"], [{"token": "t"}] * 3, strict=True))


def test_models_of_the_hub_are_named_with_their_commit(folders, costs, tmp_path):
    """By a cache as huggingface_hub lays it out, which it reads without a network."""
    for name, commit in (("target", "a" * 40), ("near", "b" * 40)):
        repository = tmp_path / f"models--org--{name}"
        shutil.copytree(folders[name], repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
    study = replace(QUICK, batches=(1,), hub={"cache_dir": str(tmp_path)})
    (trial,) = tune.tune("org/target", ["org/near"], study)
    assert trial.error is None
    sources = [(source.name, source.revision, source.dtype) for source in (trial.config.target, trial.config.draft)]
    assert sources == [("org/target", "a" * 40, "float32"), ("org/near", "b" * 40, "float32")]
    trial.pair.save_pretrained(tmp_path / "pair", target="reference", draft="reference")
    assert not list((tmp_path / "pair").rglob("*.safetensors"))
    saved = PairConfig.from_file(tmp_path / "pair" / "specx_config.json")
    assert (saved.target.name, saved.draft.revision) == ("org/target", "b" * 40)
    assert saved.draft.fingerprint == trial.config.draft.fingerprint
    (trial,) = tune.tune("org/target", ["org/near"], replace(study, prompts=[], dtype="bfloat16"))
    assert (trial.config.target.dtype, trial.config.draft.dtype) == (
        None,
        None,
    )  # of the files, which nobody looked at


def test_encoder_decoders(tmp_path, costs):
    torch.manual_seed(0)
    sizes = {"vocab_size": 280, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=1, eos_token_id=0, pad_token_id=1))
    target, draft = save(tmp_path / "t", model, tiny_tokenizer()), save(tmp_path / "d", model, tiny_tokenizer())
    (trial,) = tune.tune(target, [draft], QUICK)
    assert trial.error is None
    assert [m.alpha for m in trial.measurements] == pytest.approx([1, 1], abs=1e-4)


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
