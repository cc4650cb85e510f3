"""Trying drafts: which are tried, which cannot be used, what is measured and recommended, and what the config says.

Nothing hostile is run.
"""

import re
import shutil
import warnings
from dataclasses import fields, replace

import pytest
import torch
from head_files import random_head, write
from repositories import edit, pickled, ran, with_code
from tiny import Forwards
from tiny_tokenizer import TEXTS, saved, saved_models, tiny_tokenizer
from transformers import AutoConfig, BartConfig, LlamaConfig

from hf_specx import Costs, DraftTargetPair, SpeculationReport, SpeculativeDecoding
from hf_specx.bench import tune
from hf_specx.bench.prediction import Prediction, expected_rounds
from hf_specx.bench.study import Study
from hf_specx.bench.timer import Comparison, TimedCall, Timing
from hf_specx.common.devices import hardware
from hf_specx.hub.pair_config import SLOWER, Measurement, PairConfig
from hf_specx.hub.publish import save


QUICK = Study(list(TEXTS), (1, 2), {"max_new_tokens": 6, "do_sample": True, "top_k": 0}, repeats=1, command="typed")
FREE = {1: 1.0, 9: 1.0}, 0.01  # a larger forward costs nothing more, a draft step next to nothing
DEAR = {1: 1.0, 9: 9.0}, 0.9
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return saved_models(tmp_path_factory.mktemp("models"), 0.1, eos_token_id=None)


@pytest.fixture
def costs(monkeypatch):
    """Known times of forwards, by batch size; and each draft pays."""
    table = {1: FREE, 2: FREE}

    def calibrate(strategy, model, input_ids):
        target, draft = table[len(input_ids)]
        strategy.costs.table[len(input_ids)] = {"target": dict(target), "draft": draft}

    monkeypatch.setattr(SpeculativeDecoding, "calibrate", calibrate)
    measured = tune._measurement
    monkeypatch.setattr(tune, "_measurement", lambda *args: replace(measured(*args), measured_speedup=1.5))
    return table


def test_no_more_candidates_than_a_head_has(folders, costs, monkeypatch, tmp_path):
    """However many would pay."""
    monkeypatch.setattr(Costs, "forward_limited_speedup", lambda costs, batch, tokens, number: float(number))
    config = AutoConfig.from_pretrained(folders["target"])
    sizes = {"vocab": config.vocab_size, "states": config.hidden_size, "width": config.hidden_size}
    write(random_head("dspark", block=3, layer_ids=(0, 1), **sizes), tmp_path)
    (trial,) = tune.tune(folders["target"], [str(tmp_path)], QUICK)
    assert trial.error is None
    assert {measured.num_draft_tokens for measured in trial.config.measurements} == {3}


def test_what_a_config_and_the_pair_get(folders, costs, tmp_path):
    (trial,) = tune.tune(folders["target"], [folders["draft"]], QUICK)
    assert trial.error is None
    config = trial.config
    assert PairConfig.from_text(config.to_text().encode(), "it") == config
    assert config.target.fingerprint not in (None, config.draft.fingerprint)
    assert (config.target.dtype, config.tokenizers.tokens, config.verification) == ("float32", 277, None)
    assert [m.batch for m in config.measurements] == [1, 2]
    for m in config.measurements:
        assert (m.dtype, m.verification, m.layout, m.command) == ("float32", "block", "ragged", "typed")
        assert m.hardware == config.costs.hardware == hardware(torch.device("cpu"))
        assert m.cost_coefficient == 0.01
        assert 0 < m.alpha < 1 < m.tokens_per_round
        assert min(m.expected_speedup, m.forward_limited_speedup, m.measured_speedup) > 0
    trial.pair.save_pretrained(tmp_path / "pair")
    pair = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert pair.prompts == []
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
    tune.tune(folders["target"], [folders["draft"]], replace(QUICK, batches=(1, 2), repeats=2, seed=5))
    timed = [5, 5, 5, 5, 6, 6]  # plain and ours: the warm-up, then two runs
    assert seeds == [5, 6, *timed, *timed]  # the first two learn the acceptance
    assert texts == [[TEXTS[0]], [TEXTS[1]], [TEXTS[0], TEXTS[1]], [TEXTS[2], TEXTS[0]]]


def test_models_of_the_hub_are_named_with_their_commit(folders, costs, tmp_path, monkeypatch):
    """By a cache as huggingface_hub lays it out, which it reads without a network; of these revisions alone."""
    for name, revision, commit in (("target", "v1", "a" * 40), ("draft", "v2", "b" * 40)):
        repository = tmp_path / f"models--org--{name}"
        shutil.copytree(folders[name], repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / revision).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    study = replace(QUICK, batches=(1,))
    (trial,) = tune.tune("org/target@v1", ["org/draft@v2"], study)
    assert trial.error is None
    sources = [(source.name, source.revision, source.dtype) for source in (trial.config.target, trial.config.draft)]
    assert sources == [("org/target", "a" * 40, "float32"), ("org/draft", "b" * 40, "float32")]
    trial.pair.save_pretrained(tmp_path / "pair", target="reference", draft="reference")
    saved = PairConfig.from_file(tmp_path / "pair" / "specx_config.json")
    assert (saved.target.name, saved.draft.revision) == ("org/target", "b" * 40)
    assert saved.draft.fingerprint == trial.config.draft.fingerprint
    (trial,) = tune.tune("org/target@v1", ["org/draft@v2"], replace(study, prompts=[], dtype="bfloat16"))
    assert trial.config.target.dtype is trial.config.draft.dtype is None  # of the files, which nobody looked at


def test_encoder_decoders(tmp_path, costs, t5):
    target, draft = (saved(tmp_path / name, t5, tiny_tokenizer()) for name in "td")
    (trial,) = tune.tune(target, [draft], QUICK)
    assert trial.error is None
    assert [m.alpha for m in trial.measurements] == pytest.approx([1, 1], abs=1e-4)


def test_what_exits_stand_for(monkeypatch):
    tried = [tune.exit_layers(LlamaConfig(num_hidden_layers=count)) for count in (1, 2, 12)]
    assert tried == [[], [1], [1, 2, 3, 4, 6]]
    assert tune.exit_layers(BartConfig()) == []
    for name in ("find_files", "get_settings"):
        monkeypatch.setattr(tune, name, lambda *args: None)
    monkeypatch.setattr(tune, "load_config", lambda *args: LlamaConfig(num_hidden_layers=4))
    assert tune.drafts_to_try("t", [], QUICK) == ["suffix", "exit:1", "exit:2"]
    assert tune.drafts_to_try("t", ["a/b", "exit:1", "exits"], QUICK) == ["a/b", "exit:1", "exit:2"]


def test_all_kinds_are_ranked(folders, costs):
    costs |= {1: (FREE[0], 0.3), 2: (FREE[0], 0.3)}
    names = tune.drafts_to_try(folders["target"], [folders["draft"], "suffix", "exits"], QUICK)
    assert names == [folders["draft"], "suffix", "exit:1"]
    found = tune.tune(folders["target"], names, QUICK)
    assert {trial.name: trial.error for trial in found} == dict.fromkeys(names)
    assert [trial.speedup for trial in found] == sorted((trial.speedup for trial in found), reverse=True)
    suffix, early_exit = (next(t for t in found if t.name == name).config for name in names[1:])
    assert [m.num_draft_tokens for m in suffix.measurements] == [16, 16]
    assert suffix.num_draft_tokens == "auto"
    assert {m.cost_coefficient for m in early_exit.measurements} == {0.3}


def test_the_fastest_is_first_and_the_only_one_kept(folders, monkeypatch):
    speeds = {folders["draft"]: (1.0, 1.2), folders["same"]: (4.0, 0.5), folders["bare"]: (1.1, 1.2)}

    def measure(pair, batches, study, advance):
        for speed in speeds[pair.draft.name_or_path]:
            pair.config.measurements.append(Measurement(**dict.fromkeys(FIGURES) | {"measured_speedup": speed}))

    monkeypatch.setattr(tune, "measure_draft", measure)
    for drafts in (list(speeds), list(speeds)[::-1]):
        found = tune.tune(folders["target"], drafts, QUICK)
        assert [trial.name for trial in found] == [folders["same"], folders["bare"], folders["draft"]]
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
    shutil.copytree(folders["draft"], folder)
    for change in changes:
        change(folder)
    if role == "target":
        with pytest.raises(ValueError, match=message):
            tune.tune(str(folder), [folders["draft"]], QUICK)
    else:
        (trial,) = tune.tune(folders["target"], [str(folder)], QUICK)
        assert re.search(message, trial.error)
        assert trial.pair is None
    assert not ran(folder)


def test_the_layers_of_a_target_are_not_counted_by_code_of_third_repositories(folders, tmp_path):
    """Before anything else of it is read, though its own code is trusted."""
    folder = shutil.copytree(folders["target"], tmp_path / "hostile")
    edit("config.json", model_type="own", auto_map={"AutoConfig": "org/other--own.Config"})(folder)
    with pytest.raises(ValueError, match="takes code from 'org/other--own.Config', another repository at no commit"):
        tune.drafts_to_try(str(folder), [], replace(QUICK, trust_remote_code=True))


def test_drafts_that_cannot_be_used_do_not_stop_the_others(folders, costs, tmp_path, monkeypatch):
    def measure(pair, *others):
        if getattr(pair.draft, "name_or_path", "") == folders["same"]:
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
        (trial,) = tune.tune(folders["target"], [folders["draft"]], replace(QUICK, options=options))
    assert all(m.predicted_speedup is None for m in trial.measurements)
