"""The check: what it finds, that it can be repeated and taken up, and what it makes of rounding."""

import json
import subprocess
import sys
from contextlib import nullcontext

import evaluate
import numpy as np
import pytest
import torch
from check_cases import PROMPTS, SIZES, quick, tiny_pair
from scipy import stats
from tiny import near, tiny
from tiny_tokenizer import tiny_tokenizer

import hf_specx
from hf_specx import DraftTargetPair, EarlyExitDraft, SuffixDraft
from hf_specx.equivalence import check as checking
from hf_specx.equivalence import texts as check_texts
from hf_specx.equivalence.cells import judge_equality, judge_quality
from hf_specx.equivalence.equality import UNITS, Noise, explain
from hf_specx.equivalence.result import least_share, quality_line, seen_deviations
from hf_specx.equivalence.settings import Settings
from hf_specx.equivalence.speed import TURNS, measure_speed
from hf_specx.equivalence.texts import Subject


SMALL = {"samples": 32, "new_tokens": 8, "batch_sizes": (1, 8), "verifications": ("greedy", "coupled", "block")}
OPTIONS = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def result():
    return quick(**SMALL)


def test_what_is_found(result):
    assert result.passed
    names = [f"{way}, batch {batch}" for way in ("greedy", "coupled", "block") for batch in (1, 8)]
    assert list(result.cells) == [*names, "block"]
    assert [line.what for line in result.lines] == [
        *(f"{name}: the same tokens as plain generate" for name in names[:4]),
        *(f"{name}: sampled from the target's distribution" for name in names[4:]),
        "block: quality of plain text",
    ]
    assert {line.verdict for line in result.lines} == {"passed"}
    assert str(result).endswith(
        "no difference to plain generate was found; a correct one fails in at most 0.001 of such checks"
    )
    assert result.cells["greedy, batch 1"]["equality"] == {
        "exact_match": 1.0,
        "rows": 4,
        "tokens": 32,
        "differences": [],
    }
    assert result.cells["coupled, batch 8"]["equality"]["rows"] == 32
    assert "overrated" in result.cells["block, batch 8"]["law"]["statistics"]
    assert [text["prompt"] for text in result.texts["block"]] == [0, 1, 2, 3]
    assert result.trace["verification"] == "block"
    assert result.speed == {}  # as no report was asked for
    assert result.provenance["target"].startswith("LlamaForCausalLM, ")


def test_acceptance_is_that_of_all_calls(result):
    found = result.cells["block, batch 8"]["acceptance"]
    assert 0 < found["alpha"] < 1
    assert found["layout"] == "ragged"
    assert found["judged_per_position"][0] == found["rounds"]
    assert found["tokens_per_round"] == pytest.approx(1 + sum(found["accepted_per_position"]) / found["rounds"])


def test_the_level_is_shared(result):
    assert result.comparisons == 3  # of the distribution at each batch size, and of quality
    laws = [result.cells[f"block, batch {batch}"]["law"]["level"] for batch in (1, 8)]
    assert laws == pytest.approx([0.001 / 3] * 2)
    assert Settings().comparisons == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"tempreature": 1.0}, "tempreature"),
    ],
)
def test_what_generate_refuses_is_refused_before_any_forward(options, message):
    """Also what plain generate does not refuse, which comes first."""
    models, fed = (tiny_pair().target, tiny_pair().draft), []
    handles = [m.get_input_embeddings().register_forward_hook(lambda *_: fed.append(1)) for m in models]
    with pytest.raises(ValueError, match=message):
        quick(**SMALL, **options)
    assert fed == []
    quick(**SMALL | {"verifications": ("greedy",)})
    assert fed  # and nothing stops it from then on
    for handle in handles:
        handle.remove()


def test_packages_that_are_not_there(monkeypatch):
    monkeypatch.setattr("hf_specx.equivalence.settings.find_spec", lambda name: None if name == "scipy" else name)
    with pytest.raises(ValueError, match="a check needs scipy: pip install scipy, as"):
        quick(**SMALL)


def test_steps_are_counted():
    steps = []
    quick(**SMALL | {"batch_sizes": (8,)}, advance=lambda: steps.append(1))
    made = {key: value for key, value in SMALL.items() if key != "batch_sizes"}
    assert len(steps) == Settings(batch_sizes=(8,), **made).steps()


def test_the_same_seed_gives_the_same_result(result):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again = quick(**SMALL)
    assert again.to_dict() == result.to_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert quick(**SMALL, seed=1).texts["block"] != result.texts["block"]


def test_generators_of_all_devices_are_left_as_they_were(monkeypatch):
    """`torch.manual_seed` seeds those of two accelerators also where the pair runs on neither."""
    kept = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)

    def fork_rng(devices, device_type):
        kept.extend([*devices, device_type])
        return nullcontext()

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    with checking.generator_untouched():
        pass
    assert kept == [0, 1, "xpu"]


def test_coupled_and_plain_share_seeds_and_others_do_not():
    settings = Settings()
    seeds = {way: settings.run_seed(way, 8, 2) for way in settings.ways}
    assert seeds["coupled"] == seeds["plain sampled"]
    assert len(set(seeds.values())) == len(seeds) - 1
    assert settings.run_seed("token", 8, 2) != settings.run_seed("token", 8, 3)
    assert settings.run_seed("token", 8, 2) != settings.run_seed("token", 1, 2)


def test_prompts_go_around():
    settings = Settings(samples=5)
    assert settings.batches("token", 2, 3) == [[0, 1], [2, 0], [1, 2]]
    assert settings.batches("greedy", 2, 3) == [[0, 1], [2, 0]]


def test_every_prompt_is_checked_at_the_largest_batch_size():
    """At smaller ones some are, where a token takes longer; unless more samples are asked for."""
    for way in ("greedy", "block"):
        assert len(Settings().batches(way, 1, 100)) == 8
        assert len(Settings().batches(way, 8, 100)) == 13
        assert len(Settings(samples=30).batches(way, 1, 100)) == 30
    assert len(Settings().batches("greedy", 1, 3)) == 3
    assert len(Settings().batches("block", 8, 3)) == 8
    assert len(Settings(batch_sizes=(1,)).batches("block", 1, 3)) == 16


def test_an_interrupted_check_goes_on(result, monkeypatch, tmp_path):
    path, made = tmp_path / "check.json", []

    def generate_texts(subject, way, batch):
        made.append((way, batch))
        if (way, batch) == ("block", 8) and made.count(("block", 8)) == 1:
            raise KeyboardInterrupt
        return check_texts.generate_texts(subject, way, batch)

    monkeypatch.setattr(checking, "generate_texts", generate_texts)
    with pytest.raises(KeyboardInterrupt):
        quick(**SMALL, path=path)
    known = len(made) - 1
    assert quick(**SMALL, path=path).to_dict() == result.to_dict()
    assert made[known + 1 :] == [("block", 8)]
    steps = []
    assert quick(**SMALL, path=path, advance=lambda: steps.append(1)).to_dict() == result.to_dict()
    assert len(made) == known + 2
    assert len(steps) == Settings(**SMALL).steps()
    assert [file.name for file in tmp_path.iterdir()] == ["check.json"]


@pytest.mark.parametrize("change", ["settings", "prompts", "code", "model", "tokenizer", "draft tokenizer"])
def test_another_check_begins_anew(monkeypatch, tmp_path, change):
    path, made, settings = tmp_path / "check.json", [], SMALL | {"verifications": ("greedy",)}
    generate_texts = check_texts.generate_texts
    monkeypatch.setattr(
        checking, "generate_texts", lambda subject, *how: made.append(how) or generate_texts(subject, *how)
    )
    quick(**settings, path=path)
    first = len(made)
    if change == "code":
        monkeypatch.setattr(checking, "code_digest", lambda files: "another")
    pair, prompts = tiny_pair(), PROMPTS
    if change == "model":
        pair = DraftTargetPair(near(pair.target, 0.1), pair.draft, pair.tokenizer)
    if change == "tokenizer":
        pair = DraftTargetPair(pair.target, pair.draft, tiny_tokenizer(fewer_merges=8))  # of the same tokens
    if change == "draft tokenizer":
        pair = DraftTargetPair(
            pair.target, pair.draft, pair.tokenizer, draft_tokenizer=tiny_tokenizer(["other words"])
        )
    if change == "prompts":
        prompts = PROMPTS[:3]
    seed = 5 if change == "settings" else 0
    given = settings | {"num_draft_tokens": 3, "temperature": 0.7}
    hf_specx.check(pair, prompts, **given, seed=seed, path=path, advance=lambda: None)
    assert len(made) == 2 * first


def test_a_check_of_another_draft_without_a_model_begins_anew(monkeypatch, tmp_path):
    path, seen, generate_texts = tmp_path / "check.json", set(), check_texts.generate_texts

    def noted(subject, *how):
        seen.add(subject.pair.draft.max_candidates)
        return generate_texts(subject, *how)

    monkeypatch.setattr(checking, "generate_texts", noted)
    for most in (1, 2):
        pair = DraftTargetPair(tiny_pair().target, SuffixDraft(most), tiny_pair().tokenizer)
        options = SMALL | {"verifications": ("greedy",), "num_draft_tokens": 1}
        hf_specx.check(pair, PROMPTS, **options, path=path, advance=lambda: None)
    assert seen == {1, 2}


def test_results_are_saved_also_without_git(result, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    path = result.save(tmp_path / "new" / "result.json")
    assert result.save(tmp_path / "new").parent == path.parent
    assert result.save(tmp_path / "result") == tmp_path / "result"  # no folder
    assert result.save(tmp_path / "result").is_file()
    found = json.loads(path.read_text())
    assert found["_evaluate_version"] == evaluate.__version__
    assert {name: found[name] for name in result.to_dict()} == result.to_dict()
    assert found["passed"] is True


def test_other_options_of_generate_count():
    result = quick(**SMALL | {"batch_sizes": (8,)}, repetition_penalty=1.5, min_new_tokens=3)
    assert result.passed, str(result)
    assert result.settings["options"] == {"repetition_penalty": 1.5, "min_new_tokens": 3}
    assert result.texts["plain greedy"] != quick(**SMALL | {"verifications": ("greedy",)}).texts["plain greedy"]


def test_outputs_that_the_targets_own_generation_config_asks_for_are_left_out(monkeypatch):
    own = {"do_sample": True, "num_return_sequences": 2, "return_dict_in_generate": True}
    for name, value in own.items():
        monkeypatch.setattr(tiny_pair().target.generation_config, name, value)
    assert quick(**SMALL | {"batch_sizes": (8,)}).passed


def test_the_layout_of_the_pair_is_checked():
    pair = DraftTargetPair(tiny_pair().target, tiny_pair().draft, tiny_pair().tokenizer)
    pair.strategy.layout = "padded"
    result = hf_specx.check(pair, PROMPTS, **SMALL | {"verifications": ("greedy",)}, advance=lambda: None)
    assert {cell["acceptance"]["layout"] for cell in result.cells.values()} == {"padded"}


def prompt_of(model) -> list[int]:
    return tiny_tokenizer()(PROMPTS[0])["input_ids"]


def test_a_gap_is_that_of_the_logits():
    """A greedy token and the second one: the second has to rise by the difference of the two logits."""
    target = tiny_pair().target
    prompt = prompt_of(target)
    with torch.no_grad():
        logits = target(torch.tensor([prompt])).logits[0, -1].double()
    (first, second), (best, other) = logits.topk(2)
    options = {"do_sample": False, "max_new_tokens": 8}
    found = explain(target, options, prompt, [int(best)], [int(other)], 3, 0, None)
    unit = torch.finfo(torch.float32).eps * float(logits.abs().max())
    assert (found.row, found.position, found.plain, found.ours) == (3, 0, int(best), int(other))
    assert found.gap == pytest.approx(float(first - second), rel=0.011)
    assert found.units == pytest.approx(found.gap / unit, rel=1e-6)
    assert found.explained == (found.gap <= UNITS * unit)
    assert not found.explained


@pytest.mark.parametrize(("units", "explained"), [(12, True), (20, False)])
def test_as_many_units_are_rounding_as_is_said(units, explained):
    """Of two logits that are so far from each other; with a larger limit wrong tokens would pass in half precision."""
    target = tiny(**SIZES)
    prompt = prompt_of(target)
    with torch.no_grad():
        logits = target(torch.tensor([prompt])).logits[0, -1]
        best, other = logits.topk(2).indices.tolist()
        gap = units * torch.finfo(torch.float32).eps * logits.abs().max()
        target.lm_head.weight[other] = target.lm_head.weight[best] * (1 - gap / logits[best])
    options = {"do_sample": False, "max_new_tokens": 8}
    assert explain(target, options, prompt, [best], [other], 0, 0, None).explained == explained


def test_a_text_that_ends_early_is_never_explained():
    found = explain(tiny_pair().target, {"do_sample": False}, [5, 6], [7], [7, 8], 0, 1, None)
    assert (found.plain, found.ours, found.gap, found.explained) == (-1, 8, None, False)


@pytest.mark.parametrize("options", [OPTIONS, OPTIONS | {"guidance_scale": 1.5}], ids=["plain", "with a state"])
@pytest.mark.parametrize("row", [0, 2])
def test_the_noise_of_a_sampled_token_is_that_of_stock(row, options):
    """So the token that stock has drawn needs no rise, at any position and in any row.

    Guidance keeps a state: its own text begins with the prompt's last token and grows with each call.
    """
    target, seed = tiny_pair().target, 11
    prompt = prompt_of(target)
    torch.manual_seed(seed)
    output = target.generate(torch.tensor([prompt] * 3), **options, pad_token_id=1)
    text = output[row, len(prompt) :].tolist()
    for position, token in enumerate(text[:5]):
        found = explain(target, options, prompt, text, [*text[:position], token], 0, position, Noise(seed, 3, row))
        assert found.gap == 0.0
        assert found.explained
        other = (token + 7) % 280
        assert not explain(
            target, options, prompt, text, [*text[:position], other], 0, position, Noise(seed, 3, row)
        ).explained


def test_tokens_on_the_edge_of_what_is_kept():
    """By top-k 1 the second token is left out; it would be chosen if its logit rose by the gap."""
    target = tiny_pair().target
    prompt = prompt_of(target)
    with torch.no_grad():
        (first, second), (best, other) = target(torch.tensor([prompt])).logits[0, -1].double().topk(2)
    options = OPTIONS | {"top_k": 1}
    found = explain(target, options, prompt, [int(best)], [int(other)], 0, 0, Noise(1, 1, 0))
    assert found.gap == pytest.approx(float(first - second), rel=0.011)


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 5, "repetition_penalty": 1.2}])
def test_what_top_p_and_top_k_leave_out_never_comes(options):
    result = quick(verifications=("token", "block"), **options)
    assert result.passed, str(result)
    assert [result.cells[f"{way}, batch 32"]["law"]["impossible"] for way in ("token", "block")] == [0, 0]


def test_half_precision_passes_and_says_how_many_rows_differ():
    target = tiny(**SIZES | {"num_hidden_layers": 4})
    pair = DraftTargetPair(target.bfloat16(), near(target, 0.2).bfloat16(), tiny_tokenizer())
    result = hf_specx.check(
        pair,
        PROMPTS,
        new_tokens=48,
        verifications=("greedy", "coupled"),
        samples=64,
        batch_sizes=(16,),
        advance=lambda: None,
    )
    assert result.passed, str(result)
    differences = result.cells["coupled, batch 16"]["equality"]["differences"]
    assert differences  # else this shows nothing
    line = next(line for line in result.lines if line.what.startswith("coupled"))
    assert line.note.startswith(f"{len(differences)} of 64 rows differ, all by rounding")
    assert 0 < line.figure <= line.threshold == UNITS
    assert max(difference["gap"] for difference in differences) <= max(each["limit"] for each in differences)
    assert "was found but what rounding explains; a correct one" in str(result)


def test_tokens_behind_a_difference_are_not_compared():
    subject = Subject(tiny_pair(), PROMPTS, Settings(batch_sizes=(4,), verifications=("greedy",)))
    plain, ours = [[5, 6, 7, 8]] * 4, [[5, 9, 7, 8]] + [[5, 6, 7, 8]] * 3
    found = judge_equality(subject, "greedy", 4, plain, ours)
    assert (found["tokens"], len(found["differences"])) == (2 + 3 * 4, 1)


def test_too_few_texts_are_told_so():
    result = quick(samples=2, batch_sizes=(2,), verifications=("token",))
    line = result.lines[-1]
    assert (line.what, line.verdict, line.figure) == ("token: quality of plain text", "not told", None)
    assert result.cells["token"]["quality"] is None


def test_texts_that_are_empty_have_no_perplexity_and_others_do():
    """A text may be an end token alone, which decoding drops."""
    settings = Settings(verifications=("token",), level=0.05)
    subject = Subject(tiny_pair(), PROMPTS, settings)
    rng = np.random.default_rng(0)
    ours, plain = rng.integers(2, 280, (2, 40, 6)).tolist()
    places = [row % len(PROMPTS) for row in range(40)]
    whole = judge_quality(subject, places, plain, ours)
    ours[3] = [0]
    assert list(judge_quality(subject, places, plain, ours)) == list(whole)
    found = judge_quality(subject, places, plain, [[0]] * 35 + ours[35:])
    assert list(found) == ["distinct_1", "distinct_2", "length"]
    assert found["length"]["reference"] == whole["length"]["reference"]  # counted in tokens as before


def law_with(draft: object, **more: object) -> dict:
    """What a check of token verification says of a draft's text."""
    pair = DraftTargetPair(tiny_pair().target, draft, tiny_tokenizer(), **more)
    settings = SMALL | {"verifications": ("token",), "batch_sizes": (8,)}
    result = hf_specx.check(pair, PROMPTS, **settings, advance=lambda: None)
    assert result.passed, str(result)
    return result.cells["token, batch 8"]["law"]["statistics"]


def test_a_draft_that_is_the_target_overrates_nothing():
    assert "overrated" not in law_with(tiny_pair().target)


def test_an_early_exit_overrates_what_its_layers_do():
    assert law_with(EarlyExitDraft(1))["overrated"]["expected"] > 0


@pytest.mark.parametrize("kind", ["without a model", "another tokenizer"])
def test_a_draft_without_a_distribution_over_the_targets_tokens_is_left_out(kind):
    if kind == "without a model":
        assert "overrated" not in law_with(SuffixDraft())
    else:
        assert "overrated" not in law_with(tiny_pair().draft, draft_tokenizer=tiny_tokenizer(["other words"]))


def test_a_wrong_quality_fails():
    cell = {"prediction": 9.0, "reference": 8.0, "difference": 1.0, "interval": [0.5, 1.5]}
    found = {"length": cell | {"p_value": 1e-6}, "perplexity": cell | {"p_value": 0.5}}
    assert quality_line("token", found, 1e-5).verdict == "failed"
    line = quality_line("token", found, 1.5e-6)
    assert (line.verdict, line.figure) == ("passed", pytest.approx(5.699, abs=1e-3))  # two measures share the level


def test_what_a_test_sees_is_seen_nine_times_in_ten():
    """By simulation: wrong tokens among equal ones, and a mean that is off; within what 400 runs tell at 1e-4."""
    runs, rng = 400, np.random.default_rng(0)
    low, high = stats.binom.ppf(1e-4, runs, 0.9), stats.binom.isf(1e-4, runs, 0.9)
    assert low <= sum(rng.binomial(700, least_share(700), runs) > 0) <= high
    error, weight, level = 20.0, 1000.0, 0.01
    statistic = {"standard_error": error, "weight": weight}
    (told,) = seen_deviations({"level": level, "comparisons": 5, "statistics": {"surprisal": statistic}})
    smallest = float(told.split("by ")[1].split()[0])
    z = (rng.normal(0, error, runs) + smallest * weight) / error
    assert low <= sum(abs(z) > stats.norm.isf(level / 5 / 2)) <= high


def test_speed_is_that_of_turns_and_part_of_a_check_only_if_asked_for(monkeypatch, tmp_path):
    """It is kept with the rest, and nothing else changes."""
    subject = checking.subject_of(
        tiny_pair(), PROMPTS, Settings((2,), 8, samples=2, num_draft_tokens=3, verifications=("greedy", "coupled"))
    )
    found = measure_speed(subject)
    assert (found["verification"], found["batch"], found["turns"]) == ("coupled", 2, TURNS)
    assert 0 < found["least"] <= found["times_plain"] <= found["most"]
    measured, path = [], tmp_path / "known.json"
    monkeypatch.setattr(checking, "measure_speed", lambda subject: measured.append(1) or {"batch": 2})
    without = checking.run_check(subject, lambda: None, path)
    timed = checking.run_check(subject, lambda: None, path, timed=True)
    assert (without.speed, timed.speed) == ({}, {"batch": 2})
    assert timed.to_dict() == without.to_dict() | {"speed": {"batch": 2}}
    assert checking.run_check(subject, lambda: None, path, timed=True).speed == {"batch": 2}
    assert measured == [1]


def test_nothing_of_evaluate_is_imported_before_it_is_needed():
    code = "import sys, hf_specx; print({'evaluate', 'datasets', 'scipy.stats'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
