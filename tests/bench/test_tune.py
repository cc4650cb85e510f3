"""Trying drafts: what is measured and recommended, and what the config says of it."""

import shutil
from dataclasses import replace

import pytest
import torch
from tiny import tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer
from transformers import T5Config, T5ForConditionalGeneration
from tune_cases import DEAR, FREE, QUICK, SIZES, save

from hf_specx import Costs, DraftTargetPair, SpeculativeDecoding
from hf_specx.bench import tune
from hf_specx.bench.compatibility import PROBE_TEXTS
from hf_specx.bench.study import Study
from hf_specx.common.devices import hardware
from hf_specx.pair_files.pair_config import PairConfig


pytest_plugins = ["tune_fixtures"]


def test_what_a_config_gets(folders, costs):
    (trial,) = tune.tune(folders["target"], [folders["near"]], QUICK)
    assert trial.error is None
    config = trial.config
    assert PairConfig.from_text(config.to_text().encode(), "it") == config
    assert (config.target.name, config.target.subfolder, config.draft.subfolder) == (None, "", "draft")
    assert (config.target.model_type, config.draft.vocab_size, config.target.dtype) == ("llama", 280, "float32")
    assert config.target.fingerprint not in (None, config.draft.fingerprint)
    assert (config.tokenizers.method, config.tokenizers.tokens) == ("content", 277)
    assert config.target.auto_class == config.draft.auto_class == "AutoModelForCausalLM"
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


@pytest.mark.parametrize(
    ("changes", "recommended"),
    [
        ({}, 8),
        ({"batches": (2,)}, "auto"),  # what other sizes want is not known
        ({"options": {"max_new_tokens": 6, "do_sample": False}}, "auto"),  # what sampling wants is not known
    ],
)
def test_a_number_is_recommended_where_enough_is_known(folders, costs, changes, recommended):
    (trial,) = tune.tune(folders["target"], [folders["same"]], replace(QUICK, **changes))
    assert {m.num_draft_tokens for m in trial.measurements} == {8}
    assert trial.config.num_draft_tokens == recommended


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


def test_acceptance_is_learned_from_the_largest_batch(folders, costs, monkeypatch):
    seen, plain = [], tune._learn

    def learn(target, strategy, batches, study, advance):
        seen.extend(len(inputs["input_ids"]) for inputs in batches)
        return plain(target, strategy, batches, study, advance)

    monkeypatch.setattr(tune, "_learn", learn)
    tune.tune(folders["target"], [folders["near"]], replace(QUICK, batches=(2, 1), repeats=3))
    assert seen == [2, 2, 2]
    lengths = {sizes: Study(batches=sizes, repeats=5).learning for sizes in ((1,), (2, 1), (1, 4), (8,), (16,))}
    assert lengths == {(1,): 5, (2, 1): 4, (1, 4): 2, (8,): 1, (16,): 1}


def test_every_run_has_its_seed(folders, costs, monkeypatch):
    seeds, plain = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or plain(seed))
    study = replace(QUICK, repeats=2, seed=5)
    tune.tune(folders["target"], [folders["near"]], study)
    timed = [5, 5, 5, 5, 6, 6]  # plain and ours: the warm-up, then two runs
    assert seeds == [5, 6, *timed, *timed]


def test_precision_and_places_are_those_of_the_study(folders, costs, monkeypatch):
    seen, plain = [], tune.load_model
    monkeypatch.setattr(tune, "load_model", lambda *a, **options: seen.append(options) or plain(*a, **options))
    study = replace(QUICK, batches=(1,), dtype="bfloat16", device_map="cpu")
    (trial,) = tune.tune(folders["target"], [folders["near"]], study)
    assert seen == [
        {"dtype": "bfloat16", "device_map": "cpu"},
        {"dtype": "bfloat16", "device_map": {"": torch.device("cpu")}},
    ]
    assert (trial.measurements[0].dtype, trial.config.costs.dtype) == ("bfloat16", "bfloat16")


def test_vocabularies_that_differ_in_padding_are_compared_by_their_tokens(folders, costs, tmp_path):
    draft = save(tmp_path / "padded", tiny(**SIZES | {"vocab_size": 288}), tiny_tokenizer())
    (trial,) = tune.tune(folders["target"], [draft], replace(QUICK, batches=(1,)))
    assert trial.error is None
    assert trial.measurements
    inputs = trial.pair.tokenizer(["the cat"], return_tensors="pt")
    assert trial.pair.generate(**inputs, max_new_tokens=2).shape[1] > inputs["input_ids"].shape[1]


def test_prompts_are_among_the_texts_that_are_compared(folders):
    (trial,) = tune.tune(folders["target"], [folders["near"]], replace(QUICK, prompts=[]))
    (other,) = tune.tune(folders["target"], [folders["near"]], QUICK)
    texts = [next(f.target for f in found.findings if f.subject == "encoding") for found in (trial, other)]
    assert texts == [f"{len(PROBE_TEXTS)} texts", f"{len(PROBE_TEXTS) + len(TEXTS)} texts"]


def test_verification_is_kept(folders, costs):
    (trial,) = tune.tune(folders["target"], [folders["near"]], replace(QUICK, verification="coupled"))
    assert trial.config.verification == trial.measurements[0].verification == "coupled"
    assert set(trial.config.costs.alpha) == {"coupled"}


def test_without_prompts_nothing_is_decoded(folders, monkeypatch):
    monkeypatch.setattr(SpeculativeDecoding, "__call__", None)
    (trial,) = tune.tune(folders["target"], [folders["near"]], Study())
    assert trial.measurements == []
    assert trial.config.costs is None
    assert trial.config.num_draft_tokens == "auto"
    assert len(trial.findings) == 8
    assert trial.pair is not None


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
    monkeypatch.setattr(tune, "check_place", lambda name, revision: None)  # these are folders
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
