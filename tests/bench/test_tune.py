"""Trying drafts: what is measured and recommended, and what the config says of it."""

import shutil
from dataclasses import replace

import pytest
import torch
from tiny_tokenizer import TEXTS, tiny_tokenizer
from tune_cases import DEAR, FREE, QUICK, save, tiny_t5

from hf_specx import DraftTargetPair
from hf_specx.bench import tune
from hf_specx.bench.study import Study
from hf_specx.common.devices import hardware
from hf_specx.hub.pair_config import PairConfig


GREEDY = {"max_new_tokens": 6, "do_sample": False}


def test_what_a_config_and_the_pair_get(folders, costs, tmp_path):
    study = replace(QUICK, verification="token", keep_prompts=True)
    (trial,) = tune.tune(folders["target"], [folders["near"]], study)
    assert trial.error is None
    config = trial.config
    assert PairConfig.from_text(config.to_text().encode(), "it") == config
    assert config.target.fingerprint not in (None, config.draft.fingerprint)
    assert (config.target.dtype, config.tokenizers.tokens, config.verification) == ("float32", 277, "token")
    assert [m.batch for m in config.measurements] == [1, 2]
    for m in config.measurements:
        assert (m.dtype, m.verification, m.layout, m.command) == ("float32", "token", "ragged", "typed")
        assert m.hardware == config.costs.hardware == hardware(torch.device("cpu"))
        assert m.cost_coefficient == 0.01
        assert 0 < m.alpha < 1 < m.tokens_per_round
        assert min(m.expected_speedup, m.forward_limited_speedup, m.measured_speedup) > 0
    trial.pair.save_pretrained(tmp_path / "pair")
    pair = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert pair.prompts == list(TEXTS)
    assert pair.config.measurements == config.measurements
    assert pair.strategy.num_draft_tokens == config.num_draft_tokens
    assert pair.strategy.costs.table[1]["draft"] == 0.01


@pytest.mark.parametrize(
    ("changes", "second", "numbers", "recommended"),
    [
        ({}, FREE, [20, 20], 20),
        ({}, DEAR, [20, 1], "auto"),
        ({"batches": (2,)}, FREE, [20], "auto"),  # what other sizes want is not known
        ({"options": GREEDY}, FREE, [20, 20], "auto"),  # what sampling wants is not known
    ],
)
def test_a_number_is_recommended_where_enough_is_known(folders, costs, changes, second, numbers, recommended):
    """By the acceptance that was seen: of a draft that is the target it is 1, however little was seen of it."""
    costs[2] = second
    (trial,) = tune.tune(folders["target"], [folders["same"]], replace(QUICK, **changes))
    assert [m.num_draft_tokens for m in trial.measurements] == numbers
    assert trial.config.num_draft_tokens == recommended
    assert all(m.alpha == pytest.approx(1, abs=1e-4) for m in trial.measurements)
    known = "greedy" if "options" in changes else "block"
    assert trial.config.costs.alpha == pytest.approx({known: 1}, abs=1e-4)


def test_every_run_has_its_seed_and_the_next_prompts(folders, costs, monkeypatch):
    seeds, texts, seed, encode = [], [], torch.manual_seed, tune.encode
    monkeypatch.setattr(torch, "manual_seed", lambda number: seeds.append(number) or seed(number))
    monkeypatch.setattr(tune, "encode", lambda *args: texts.append(args[2]) or encode(*args))
    tune.tune(folders["target"], [folders["near"]], replace(QUICK, batches=(1, 2), repeats=2, seed=5))
    timed = [5, 5, 5, 5, 6, 6]  # plain and ours: the warm-up, then two runs
    assert seeds == [5, 6, *timed, *timed]  # the first two learn the acceptance
    assert texts == [[TEXTS[0]], [TEXTS[1]], [TEXTS[0], TEXTS[1]], [TEXTS[2], TEXTS[0]]]


def test_revisions_and_tokens_reach_the_hub(folders, monkeypatch):
    seen, plain = [], tune.get_files

    def get_files(name, revision, patterns, **hub):
        seen.append((name, revision, hub))
        return plain(name, None, patterns)

    monkeypatch.setattr(tune, "get_files", get_files)
    monkeypatch.setattr(tune, "check_place", lambda name, revision: None)  # these are folders
    names = [folders[name] for name in ("target", "near", "bare")]
    tune.tune(f"{names[0]}@v1", ["suffix", names[1], f"{names[2]}@v2"], Study(hub={"token": "t"}))
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
    saved = PairConfig.from_file(tmp_path / "pair" / "specx_config.json")
    assert (saved.target.name, saved.draft.revision) == ("org/target", "b" * 40)
    assert saved.draft.fingerprint == trial.config.draft.fingerprint
    (trial,) = tune.tune("org/target", ["org/near"], replace(study, prompts=[], dtype="bfloat16"))
    assert trial.config.target.dtype is trial.config.draft.dtype is None  # of the files, which nobody looked at


def test_encoder_decoders(tmp_path, costs):
    target, draft = (save(tmp_path / name, tiny_t5(), tiny_tokenizer()) for name in "td")
    (trial,) = tune.tune(target, [draft], QUICK)
    assert trial.error is None
    assert [m.alpha for m in trial.measurements] == pytest.approx([1, 1], abs=1e-4)
