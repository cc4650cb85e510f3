"""Trying drafts: what is measured and recommended, and what the config says of it."""

import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from tiny import Forwards
from tiny_tokenizer import TEXTS, tiny_tokenizer
from tune_cases import DEAR, FREE, QUICK, saved, tiny_t5

from hf_specx import DraftTargetPair, SpeculationReport
from hf_specx.bench import tune
from hf_specx.bench.prediction import Prediction, expected_rounds
from hf_specx.bench.study import Study
from hf_specx.bench.timer import Comparison, TimedCall, Timing
from hf_specx.common.devices import hardware
from hf_specx.hub.pair_config import SLOWER, PairConfig
from hf_specx.hub.publish import save


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


def test_no_more_is_predicted_than_a_text_has_room_for(folders, costs, monkeypatch):
    """20 candidates are recommended, and texts have 6 tokens: a round gives no 21."""
    predicted = []
    monkeypatch.setattr(tune, "Prediction", lambda *given: predicted.append(Prediction(*given)) or predicted[-1])
    (trial,) = tune.tune(folders["target"], [folders["same"]], QUICK)
    assert [m.num_draft_tokens for m in trial.measurements] == [20, 20]
    assert [found.number for found in predicted] == [5, 5]


@pytest.mark.parametrize(("speeds", "recommended"), [((0.9, 1.0), 0), ((0.9, 1.1), "auto"), ((1.2, 1.1), 20)])
def test_a_draft_that_does_not_pay_leaves_a_pair_that_decodes_plainly(
    folders, costs, monkeypatch, tmp_path, speeds, recommended
):
    """Wherever its draft is used; not if a call says how many candidates it wants."""
    found, measured = iter(speeds), tune._measurement
    monkeypatch.setattr(tune, "_measurement", lambda *args: replace(measured(*args), measured_speedup=next(found)))
    (trial,) = tune.tune(folders["target"], [folders["same"]], QUICK)
    config = trial.config
    assert config.num_draft_tokens == recommended
    assert (config.speeds()[-1] == f"{SLOWER}; num_draft_tokens='auto' drafts all the same") == (recommended == 0)
    trial.pair.save_pretrained(tmp_path / "pair")
    pair = DraftTargetPair.from_pretrained(tmp_path / "pair")
    inputs = pair.tokenizer(TEXTS[0], return_tensors="pt") | {"do_sample": False, "max_new_tokens": 9}
    expected = pair.target.generate(**inputs)
    with Forwards(pair.draft) as drafted, warnings.catch_warnings(record=True) as told:
        assert torch.equal(pair.generate(**inputs), expected)
        pair.complete(TEXTS, do_sample=True, max_new_tokens=9)
    assert bool(drafted.ids) == (recommended != 0)
    assert any("nothing was faster" in str(warning.message) for warning in told) == (recommended == 0)
    if recommended == 0:
        with pytest.warns(UserWarning, match=SLOWER):
            save(pair, tmp_path / "published", with_code=True)
        with Forwards(pair.draft) as drafted:
            assert torch.equal(pair.generate(**inputs, num_draft_tokens=3), expected)
        assert drafted.ids


def test_a_prediction_goes_by_the_rounds_of_this_machine():
    """By those of the warm-up, and what is otherwise is told."""
    report = SpeculationReport("block", "ragged", "", 1, rounds=10, plain_steps=1, drafted_per_position=[10])
    report.drafted_per_row, report.rounds_per_row, report.gained = [10], [10], 15
    report.seconds = {"total": 38.4}
    found, warm_up = Prediction(0.5, 1), TimedCall(38.4, 10, report)
    plain, same = Timing([TimedCall(24.0, 10, None, 10)]), Timing([TimedCall(24.0, 10, report, 10)], warm_up=warm_up)
    assert found.speedup(Comparison(plain, same)) == pytest.approx(0.97, abs=0.01)  # 10 steps, or 1 and 6.2 rounds
    assert found.why_not(Comparison(plain, same)) == ""
    slower = replace(report, gained=15, seconds={"total": 74.4})
    slower.drafted_per_row, slower.rounds_per_row = [10], [10]
    told = found.why_not(Comparison(plain, Timing([TimedCall(48.0, 10, slower, 10)], warm_up=warm_up)))
    assert told == "predicted 0.97, measured 0.50, mostly because a round took 7200.0 ms, not 3600.0"


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
    target, draft = (saved(tmp_path / name, tiny_t5(), tiny_tokenizer()) for name in "td")
    (trial,) = tune.tune(target, [draft], QUICK)
    assert trial.error is None
    assert [m.alpha for m in trial.measurements] == pytest.approx([1, 1], abs=1e-4)


@pytest.mark.parametrize(
    ("alpha", "number", "tokens", "rows", "rounds"),
    [(1.0, 3, 5, 8, 2), (0.0, 3, 5, 8, 5), (0.5, 1, 2, 1, 1.5), (0.5, 1, 2, 2, 1.75), (0.9, 4, 1, 3, 1)],
)
def test_rounds_of_a_text_go_on_until_the_slowest_row_is_done(alpha, number, tokens, rows, rounds):
    """A row of two tokens takes one round with an even chance, else two; of two rows both must take one."""
    assert expected_rounds(alpha, number, tokens, rows) == pytest.approx(rounds)


def test_texts_that_end_at_once_are_said_to_tell_nothing(folders, costs):
    options = QUICK.options | {"eos_token_id": list(range(280))}
    with pytest.warns(UserWarning, match="ended before anything was drafted"):
        (trial,) = tune.tune(folders["target"], [folders["near"]], replace(QUICK, options=options))
    assert all(m.predicted_speedup is None for m in trial.measurements)
