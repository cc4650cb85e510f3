"""Trying drafts: which are tried, which cannot be used, what is measured and recommended, and what the config says.

Nothing hostile is run.
"""

import math
import random
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

from hf_specx import Costs, DraftTargetPair, SpeculativeDecoding
from hf_specx.bench import timer, tune
from hf_specx.bench.tune_settings import FALSE_ALARM, TuneSettings
from hf_specx.common.devices import hardware
from hf_specx.hub.cards import embedded_config
from hf_specx.hub.pair_config import SLOWER, Measurement, PairConfig
from hf_specx.hub.publish import save


SAMPLED = {"max_new_tokens": 6, "do_sample": True, "top_k": 0}
QUICK = TuneSettings(list(TEXTS), (1, 2), SAMPLED, repeats=3, seconds=0, command="typed")
FREE = {1: 1.0, 9: 1.0}, 0.01  # a larger forward costs nothing more, a draft step next to nothing
DEAR = {1: 1.0, 9: 9.0}, 0.9
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return saved_models(tmp_path_factory.mktemp("models"), 0.1, eos_token_id=None)


@pytest.fixture
def costs(monkeypatch):
    """Known times of forwards, by batch size; and each draft is 1.5 times as fast as plain, for sure."""
    table = {1: FREE, 2: FREE}

    def calibrate(strategy, model, input_ids):
        target, draft = table[len(input_ids)]
        strategy.costs.forward_times[len(input_ids)] = {"target": dict(target), "draft": draft}

    monkeypatch.setattr(SpeculativeDecoding, "calibrate", calibrate)
    clock(monkeypatch, lambda rows: 1.5)
    return table


def clock(monkeypatch, speedup, noise=0.0):
    """A simulated one, on which ours is so many times as fast as plain, by rows, and runs differ by this noise."""
    draws, call = random.Random(0), timer.time_call

    def time_call(method, inputs, options, seed, *more):
        run = call(method, inputs, options, seed, *more)
        rows = len(inputs["input_ids"])
        run.seconds = rows * math.exp(draws.gauss(0, noise)) / (1 if method.name == "plain" else speedup(rows))
        return run

    monkeypatch.setattr(timer, "time_call", time_call)


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
    assert pair.strategy.costs.forward_times[1]["draft"] == 0.01


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
    verification = "greedy" if "options" in changes else "block"
    assert trial.config.costs.alpha == pytest.approx({verification: 1}, abs=1e-4)


@pytest.mark.parametrize(
    ("speeds", "recommended"),
    [((0.9, 0.8), 0), ((0.9, 1.0), "auto"), ((1.0, 1.0), "auto"), ((0.9, 1.1), "auto"), ((1.2, 1.1), 20)],
)
def test_a_draft_that_does_not_pay_leaves_a_pair_that_decodes_plainly(
    folders, costs, monkeypatch, tmp_path, speeds, recommended
):
    """If it was shown to be slower everywhere; and not if a call says how many candidates it wants."""
    clock(monkeypatch, lambda rows: speeds[rows - 1])
    (trial,) = tune.tune(folders["target"], [folders["same"]], QUICK)
    config = trial.config
    assert config.num_draft_tokens == recommended
    assert config.speeds()[-1].startswith(SLOWER) == (recommended == 0)
    trial.pair.save_pretrained(tmp_path / "pair")
    pair = DraftTargetPair.from_pretrained(tmp_path / "pair")
    inputs = pair.tokenizer(TEXTS[0], return_tensors="pt") | {"do_sample": False, "max_new_tokens": 9}
    expected = pair.target.generate(**inputs)
    with Forwards(pair.draft) as drafted, warnings.catch_warnings(record=True) as caught:
        assert torch.equal(pair.generate(**inputs), expected)
        pair.complete(TEXTS, do_sample=True, max_new_tokens=9)
    assert bool(drafted.ids) == (recommended != 0)
    assert any("slower" in str(warning.message) for warning in caught) == (recommended == 0)
    if recommended == 0:
        with pytest.warns(UserWarning, match=SLOWER):
            save(pair, tmp_path / "published", with_code=True)
        with Forwards(pair.draft) as drafted:
            assert torch.equal(pair.generate(**inputs, num_draft_tokens=3), expected)
        assert drafted.ids


def test_every_turn_has_its_seed_and_the_next_prompts(folders, costs, monkeypatch):
    """All of them, in an order that follows from the seed, and none with the pads of others."""
    calls, call = [], timer.time_call
    texts = [f"{text} {'more ' * number}" for number, text in enumerate(TEXTS * 2)][:5]
    ids = [tiny_tokenizer()(text)["input_ids"] for text in texts]

    def time_call(method, inputs, options, seed, *more):
        rows = [row[mask.bool()].tolist() for row, mask in zip(*inputs.values(), strict=True)]
        calls.append((method.name, seed, rows, inputs["input_ids"].shape[1]))
        return call(method, inputs, options, seed, *more)

    monkeypatch.setattr(timer, "time_call", time_call)
    tune.tune(folders["target"], [folders["draft"]], replace(QUICK, prompts=texts, seed=5, seconds=1e9))
    for rows, turns in ((1, 5), (2, 3)):
        of_size = [call for call in calls if len(call[2]) == rows]
        plain, ours = ([rest for method, *rest in of_size if method == name] for name in ("plain", "ours"))
        assert plain == ours
        assert [seed for seed, *_ in plain] == [5, *range(5, 5 + turns)]  # after one that warms up
        assert all(width == max(map(len, prompts)) for _, prompts, width in plain)
        seen = [prompt for _, prompts, _ in plain[1:] for prompt in prompts]
        assert sorted(seen[:5]) == sorted(ids) != seen[:5]


def test_texts_are_equally_long_wherever_they_would_end(folders, costs, monkeypatch):
    """So that what is compared is the time of equal work, and prompts with short answers count as others do."""
    tokens, call = [], timer.time_call

    def time_call(*args):
        run = call(*args)
        tokens.append(run.tokens / len(args[1]["input_ids"]))
        return run

    monkeypatch.setattr(timer, "time_call", time_call)
    options = SAMPLED | {"eos_token_id": list(range(280))}
    (trial,) = tune.tune(folders["target"], [folders["draft"]], replace(QUICK, options=options))
    assert trial.error is None
    assert set(tokens) == {6}


@pytest.mark.parametrize(("effect", "is_faster"), [(1.3, True), (1.0, None), (0.8, False)])
def test_the_same_verdict_every_time(folders, costs, monkeypatch, effect, is_faster):
    """With noise of 5% a run, on 24 prompts, of which three would tell either."""
    prompts = [f"{text} {number}" for number in range(8) for text in TEXTS]
    for seed in range(3):
        clock(monkeypatch, lambda rows: effect, noise=0.05)
        settings = replace(QUICK, prompts=prompts, seed=seed, seconds=50.0, options=SAMPLED | {"max_new_tokens": 3})
        (trial,) = tune.tune(folders["target"], [folders["same"]], settings)
        assert [m.is_faster for m in trial.measurements] == [is_faster] * 2
        assert (trial.config.num_draft_tokens == 0) == (is_faster is False)
        assert trial.recommended == (is_faster is True)
        assert all(m.interval_low < effect < m.interval_high for m in trial.measurements)


def test_what_another_needs_to_compare(folders, costs):
    """How text was drawn, on what, how often, and how far turns differ."""
    (trial,) = tune.tune(folders["target"], [folders["draft"]], replace(QUICK, seed=3))
    for m in trial.measurements:
        assert (m.temperature, m.top_p, m.top_k, m.max_new_tokens, m.seed) == (1.0, 1.0, 0, 6, 3)
        assert (m.turns, m.prompts) == (3, 3)
        ids = [tiny_tokenizer()(text)["input_ids"] for text in TEXTS]
        assert m.prompt_tokens == pytest.approx(sum(map(len, ids)) / 3)
        assert m.turn_spread == pytest.approx(0, abs=1e-9)
        assert m.interval_low == pytest.approx(1.5) == m.interval_high
    one, other = (replace(QUICK, prompts=list(texts)) for texts in (TEXTS[::-1], TEXTS[:2]))
    (same,), (less,) = (tune.tune(folders["target"], [folders["draft"]], settings) for settings in (one, other))
    assert same.measurements[0].prompts_digest == trial.measurements[0].prompts_digest  # in whatever order
    assert less.measurements[0].prompts_digest != trial.measurements[0].prompts_digest
    (greedy,) = tune.tune(folders["target"], [folders["draft"]], replace(QUICK, options=GREEDY))
    assert greedy.measurements[0].temperature is None


def test_all_drafts_share_the_false_alarms_of_a_study(folders, costs, monkeypatch):
    shares, make_test = [], TuneSettings.sequential_test

    def sequential_test(settings, num_batches):
        test = make_test(settings, num_batches)
        shares.append(test.false_alarm)
        return test

    monkeypatch.setattr(TuneSettings, "sequential_test", sequential_test)
    tune.tune(folders["target"], [folders["draft"], "suffix", "exit:1"], QUICK)
    assert sum(shares) == pytest.approx(FALSE_ALARM)
    assert len(shares) == 6


def test_models_of_the_hub_are_named_with_their_commit(folders, costs, tmp_path, monkeypatch):
    """By a cache as huggingface_hub lays it out, which it reads without a network; of these revisions alone."""
    for name, revision, commit in (("target", "v1", "a" * 40), ("draft", "v2", "b" * 40)):
        repository = tmp_path / f"models--org--{name}"
        shutil.copytree(folders[name], repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / revision).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    settings = replace(QUICK, batches=(1,))
    (trial,) = tune.tune("org/target@v1", ["org/draft@v2"], settings)
    assert trial.error is None
    sources = [(source.name, source.revision, source.dtype) for source in (trial.config.target, trial.config.draft)]
    assert sources == [("org/target", "a" * 40, "float32"), ("org/draft", "b" * 40, "float32")]
    trial.pair.save_pretrained(tmp_path / "pair", target="reference", draft="reference")
    saved = PairConfig.from_file(tmp_path / "pair" / "specx_config.json")
    assert (saved.target.name, saved.draft.revision) == ("org/target", "b" * 40)
    assert saved.draft.fingerprint == trial.config.draft.fingerprint
    (trial,) = tune.tune("org/target@v1", ["org/draft@v2"], replace(settings, prompts=[], dtype="bfloat16"))
    assert trial.config.target.dtype is trial.config.draft.dtype is None  # of the files, which nobody looked at


def test_encoder_decoders(tmp_path, costs, t5):
    target, draft = (saved(tmp_path / name, t5, tiny_tokenizer()) for name in "td")
    (trial,) = tune.tune(target, [draft], QUICK)
    assert trial.error is None
    assert [m.alpha for m in trial.measurements] == pytest.approx([1, 1], abs=1e-4)


def test_what_exits_stand_for(monkeypatch):
    layers = [tune.exit_layers(LlamaConfig(num_hidden_layers=count)) for count in (1, 2, 12)]
    assert layers == [[], [1], [1, 2, 3, 4, 6]]
    assert tune.exit_layers(BartConfig()) == []
    for name in ("find_files", "get_settings"):
        monkeypatch.setattr(tune, name, lambda *args: None)
    monkeypatch.setattr(tune, "is_adapter", lambda files: False)
    monkeypatch.setattr(tune, "load_config", lambda *args: LlamaConfig(num_hidden_layers=4))
    assert tune.drafts_to_try("t", [], QUICK) == ["suffix", "exit:1", "exit:2"]
    assert tune.drafts_to_try("t", ["a/b", "exit:1", "exits"], QUICK) == ["a/b", "exit:1", "exit:2"]


def test_all_kinds_are_ranked(folders, costs):
    costs |= {1: (FREE[0], 0.3), 2: (FREE[0], 0.3)}
    names = tune.drafts_to_try(folders["target"], [folders["draft"], "suffix", "exits"], QUICK)
    assert names == [folders["draft"], "suffix", "exit:1"]
    trials = tune.tune(folders["target"], names, QUICK)
    assert {trial.name: trial.error for trial in trials} == dict.fromkeys(names)
    speedups = [trial.speedup for trial in trials]
    assert speedups == sorted(speedups, reverse=True)
    suffix, early_exit = (next(t for t in trials if t.name == name).config for name in names[1:])
    assert [m.num_draft_tokens for m in suffix.measurements] == [16, 16]
    assert suffix.num_draft_tokens == "auto"
    assert {m.cost_coefficient for m in early_exit.measurements} == {0.3}


def test_the_fastest_is_first_and_the_only_one_kept(folders, monkeypatch):
    """Behind those that are faster come others, also where their best guess is larger."""
    speeds = {folders["draft"]: (1.0, 1.2), folders["same"]: (4.0, 0.5), folders["bare"]: (1.1, 1.2)}
    speeds[folders["stranger"]] = (1.04, 1.04)

    def measure(pair, ids, settings, advance):
        for speed in speeds[pair.draft.name_or_path]:
            ends = {"interval_low": speed - 0.05, "interval_high": speed + 0.05}
            figures = dict.fromkeys(FIGURES) | ends | {"measured_speedup": speed, "turns": 9}
            pair.config.measurements.append(Measurement(**figures))

    monkeypatch.setattr(tune, "measure_draft", measure)
    for drafts in (list(speeds), list(speeds)[::-1]):
        trials = tune.tune(folders["target"], drafts, QUICK)
        assert [trial.name for trial in trials] == [folders[name] for name in ("same", "bare", "draft", "stranger")]
        assert trials[0].speedup == pytest.approx(2**0.5)
        assert [trial.pair is not None for trial in trials] == [True, False, False, False]


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
        "exit:7": "exit_layer=7",
    }
    trials = tune.tune(folders["target"], [*errors, *usable], QUICK)
    assert [trial.error is None for trial in trials] == [True] * 3 + [False] * 4
    assert {trial.name for trial in trials[:3]} == set(usable)
    for trial in trials[3:]:
        assert re.search(errors[trial.name], trial.error)
        assert trial.config is trial.pair is None


def test_texts_too_short_for_a_round_are_refused(folders):
    with pytest.raises(ValueError, match="max_new_tokens=2"):
        tune.tune(folders["target"], ["suffix"], replace(QUICK, options=SAMPLED | {"max_new_tokens": 2}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_three_runs_say_the_same_of_the_pair_in_the_package():
    """On a real clock: its head is faster, and seven eighths of the target's layers are not."""
    settings = TuneSettings(embedded_config().prompts, (1,), {"max_new_tokens": 48}, seconds=20, command="typed")
    verdicts = []
    for seed in range(3):
        trials = tune.tune("embedded", ["embedded/head", "exit:14"], replace(settings, seed=seed))
        assert [trial.error for trial in trials] == [None, None]
        verdicts.append([(trial.name, trial.verdict) for trial in trials])
    assert verdicts[0] == [("embedded/head", "faster"), ("exit:14", "slower")]
    assert verdicts[1:] == verdicts[:1] * 2
