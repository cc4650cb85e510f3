"""The check: what it finds, and that it can be repeated and taken up."""

import json
import re

import numpy as np
import pytest
import torch
from check_cases import PROMPTS, quick, tiny_pair
from counting import counting
from scipy import stats
from tiny_tokenizer import tiny_tokenizer

from hf_specx import DraftTargetPair, EarlyExitDraft, SuffixDraft, check
from hf_specx.metrics import check as checking
from hf_specx.metrics import texts as check_texts
from hf_specx.metrics.check import judge_quality, subject_of
from hf_specx.metrics.result import distribution_line, quality_line
from hf_specx.metrics.settings import Settings
from hf_specx.metrics.texts import Subject, generate_texts


SMALL = {"samples": 32, "max_new_tokens": 8, "batch_sizes": (1, 8), "verifications": ("greedy", "coupled", "block")}
GREEDY = SMALL | {"verifications": ("greedy",)}


@pytest.fixture(scope="module")
def result():
    return quick(**SMALL)


def test_what_a_result_says(result):
    assert result.passed
    names = [f"{method}, batch {batch}" for method in ("greedy", "coupled", "block") for batch in (1, 8)]
    assert list(result.cells) == [*names, "block"]
    assert [line.what for line in result.lines] == [
        *(f"{name}: the same tokens as plain generate" for name in names[:4]),
        *(f"{name}: sampled from the target's distribution" for name in names[4:]),
        "block: quality of plain text",
    ]
    assert result.comparisons == 7  # of three verifications at two batch sizes, and of quality; they share the level
    assert result.cells["block, batch 8"]["law"]["level"] == pytest.approx(0.001 / 7)
    cell = result.cells["greedy, batch 1"]["equality"]
    assert cell.items() >= {"exact_match": 1.0, "rows": 4, "tokens": 32, "differences": [], "p_value": 1.0}.items()
    assert result.trace["verification"] == "block"
    acceptance = result.cells["block, batch 8"]["acceptance"]
    accepted = sum(acceptance["accepted_per_position"])
    assert acceptance["tokens_per_round"] == pytest.approx(1 + accepted / acceptance["rounds"])


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"use_cache": False}], ids=str)
def test_a_check_of_what_is_decoded_plainly_is_refused(options):
    """Plain text equals plain text, whatever the verification does."""
    with pytest.raises(ValueError, match=next(iter(options))):
        quick(**SMALL, **options)


def test_what_cannot_be_checked_is_refused_before_any_forward():
    """Also what plain generate does not refuse."""
    with counting(tiny_pair().target.model.embed_tokens) as fed, pytest.raises(ValueError, match="tempreature"):
        quick(**SMALL, tempreature=1.0)
    assert fed == []
    with pytest.raises(ValueError, match="DraftTargetPair"):
        check("org/pair")
    with pytest.raises(ValueError, match="list of texts"):
        check(tiny_pair(), "the cat")


def test_what_is_not_said_is_as_the_target_generates(monkeypatch):
    defaults = {"do_sample": False, "temperature": 0.1, "top_k": 1, "max_new_tokens": 5}
    for name, value in defaults.items():
        monkeypatch.setattr(tiny_pair().target.generation_config, name, value)
    how = {"verifications": ("token",), "batch_sizes": (2,), "samples": 2, "advance": lambda: None}
    result = check(tiny_pair(), PROMPTS, **how)
    sampling = [result.settings[name] for name in ("max_new_tokens", "temperature", "top_p", "top_k")]
    assert sampling == [5, 0.1, 1.0, 1]
    assert result.lines[0].note == "10 tokens, of which no other was possible"
    result = check(tiny_pair(), PROMPTS, temperature=2.0, max_new_tokens=3, **how)
    assert (result.settings["temperature"], result.settings["max_new_tokens"]) == (2.0, 3)


def test_the_same_seed_gives_the_same_result():
    torch.manual_seed(123)
    before = torch.get_rng_state()
    small = SMALL | {"batch_sizes": (8,), "verifications": ("coupled", "block")}
    first, same, other = (quick(**small, seed=seed) for seed in (0, 0, 1))
    assert first.to_dict() == same.to_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert other.texts["block"] != first.texts["block"]


def test_which_prompts_are_in_which_batch():
    """They go around; every one is checked at the largest size, at smaller ones some, unless more are asked for."""
    assert Settings(samples=5).batches("token", 2, 3) == [[0, 1], [2, 0], [1, 2]]
    assert Settings(samples=5).batches("greedy", 2, 3) == [[0, 1], [2, 0]]
    for method in ("greedy", "block"):
        assert [len(Settings().batches(method, batch, 100)) for batch in (1, 8)] == [8, 13]


@pytest.fixture
def generated(monkeypatch):
    """The methods and batch sizes of which texts are generated; the last are interrupted at first."""
    calls, generate = [], check_texts.generate_texts

    def generate_texts(subject, *args):
        calls.append(args)
        if calls.count(args) == 1 and args == ("plain sampled", 8):
            raise KeyboardInterrupt
        return generate(subject, *args)

    monkeypatch.setattr(checking, "generate_texts", generate_texts)
    return calls


def test_an_interrupted_check_goes_on(result, generated, tmp_path):
    path, steps = tmp_path / "check.json", []
    with pytest.raises(KeyboardInterrupt):
        quick(**SMALL, path=path)
    done = len(generated)
    again = quick(**SMALL, path=path, advance=lambda: steps.append(1))
    assert again.to_dict() == result.to_dict()
    assert generated[done:] == [("plain sampled", 8)]
    assert len(steps) == Settings(**SMALL).steps
    assert [file.name for file in tmp_path.iterdir()] == ["check.json"]


def test_another_check_begins_anew(monkeypatch, generated, tmp_path):
    """Where one of seed, prompts, tokenizers, the models' own settings or code is another; or of what tells calls of
    `complete` apart, like models and drafts."""
    settings, pair = Settings(**GREEDY), tiny_pair()
    other = DraftTargetPair(pair.target, pair.draft, pair.tokenizer, draft_tokenizer=tiny_tokenizer(["other words"]))
    suffixes = (DraftTargetPair(pair.target, SuffixDraft(count), pair.tokenizer) for count in (1, 2))
    pairs = pair, pair, other, *suffixes
    digests = [checking.digest_of_subject(Subject(each, PROMPTS, settings)) for each in pairs]
    digests.append(checking.digest_of_subject(Subject(pair, PROMPTS[:3], settings)))
    digests.append(checking.digest_of_subject(Subject(pair, PROMPTS, Settings(**GREEDY, seed=5))))
    with monkeypatch.context() as changed:
        changed.setattr(pair.target.generation_config, "repetition_penalty", 1.5)
        digests.append(checking.digest_of_subject(Subject(pair, PROMPTS, settings)))
    assert digests[0] == digests[1]
    assert len(set(digests)) == len(digests) - 1
    for package in (checking.PACKAGE, checking.PACKAGE, tmp_path):
        monkeypatch.setattr(checking, "PACKAGE", package)
        quick(**GREEDY, path=tmp_path / "check.json")
    assert len(generated) == 2 * 4


def test_results_are_saved_also_without_git(result, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    path = result.save(tmp_path / "new" / "result.json")
    assert result.save(tmp_path / "new").parent == path.parent
    saved = json.loads(path.read_text())
    assert {name: saved[name] for name in result.to_dict()} == result.to_dict()


def test_options_of_generate_and_the_layout_of_the_pair_count(monkeypatch):
    """Outputs that the target's own generation config asks for do not."""
    for name, value in {"do_sample": True, "num_return_sequences": 2, "return_dict_in_generate": True}.items():
        monkeypatch.setattr(tiny_pair().target.generation_config, name, value)
    pair = DraftTargetPair(tiny_pair().target, tiny_pair().draft, tiny_pair().tokenizer)
    pair.strategy.layout = "padded"
    result = quick(pair, **SMALL | {"batch_sizes": (8,)}, repetition_penalty=1.5, min_new_tokens=3)
    assert result.passed, str(result)
    assert result.settings["options"] == {"repetition_penalty": 1.5, "min_new_tokens": 3}
    assert result.cells["block, batch 8"]["acceptance"]["layout"] == "padded"
    assert result.texts["plain greedy"] != quick(**GREEDY).texts["plain greedy"]


def test_texts_that_are_empty_have_no_perplexity_and_others_do():
    """A text may be an end token alone, which decoding drops; lengths are of the tokens that were emitted."""
    subject = Subject(tiny_pair(), PROMPTS, Settings(verifications=("token",), level=0.05))
    assert judge_quality(subject, [0, 1], [[5], [6]], [[5], [6]]) is None  # too few
    ours, plain = np.random.default_rng(0).integers(2, 280, (2, 40, 6)).tolist()
    indices = [row % len(PROMPTS) for row in range(40)]
    whole = judge_quality(subject, indices, plain, ours)
    ours[3] = [0]
    assert list(judge_quality(subject, indices, plain, ours)) == list(whole)
    measures = judge_quality(subject, indices, plain, [[0]] * 35 + ours[35:])
    assert list(measures) == ["distinct_1", "distinct_2", "length"]
    assert (measures["length"]["prediction"], measures["length"]["reference"]) == ((35 + 5 * 6) / 40, 6)


@pytest.mark.parametrize("kind", ["the target", "an early exit", "without a model", "another tokenizer"])
def test_what_the_draft_overrates_is_tested_where_it_has_a_distribution(kind):
    more = {}
    draft = {"the target": tiny_pair().target, "an early exit": EarlyExitDraft(1), "without a model": SuffixDraft()}
    if kind == "another tokenizer":
        more["draft_tokenizer"] = tiny_tokenizer(["other words"])
    pair = DraftTargetPair(tiny_pair().target, draft.get(kind, tiny_pair().draft), tiny_tokenizer(), **more)
    result = quick(pair, **SMALL | {"verifications": ("token",), "batch_sizes": (8,)})
    assert result.passed, str(result)
    statistics = result.cells["token, batch 8"]["law"]["statistics"]
    assert ("overrated" in statistics) == (kind != "without a model")


def test_what_was_offered_is_the_drafts_distribution_after_the_text_before():
    pair = tiny_pair()
    settings = Settings(batch_sizes=(3,), verifications=("block",), max_new_tokens=9, samples=6, num_draft_tokens=3)
    subject = subject_of(pair, PROMPTS, settings, {"temperature": 0.7, "top_k": 0})
    generated, checked = generate_texts(subject, "block", 3), 0
    rows = zip(subject.prompt_indices("block", 3), generated["texts"], generated["observed"], strict=True)
    for index, text, offers in ((index, text, json.loads(each)) for index, text, each in rows):
        ids = torch.tensor([subject.prompt_ids[index] + text])
        with torch.no_grad():
            q = (pair.draft(ids).logits[0, -len(text) - 1 : -1] / 0.7).softmax(-1)
        assert len(offers) == len(text)
        for position, (tokens, chances) in enumerate(offers):
            assert q[position, tokens].tolist() == pytest.approx(chances, abs=2e-3)
            checked += len(tokens)
    assert checked > 100


def test_measures_of_quality_share_the_level_and_too_few_texts_have_no_verdict():
    cell = {"prediction": 9.0, "reference": 8.0, "difference": 1.0, "interval": [0.5, 1.5]}
    measures = {"length": cell | {"p_value": 1e-6}, "perplexity": cell | {"p_value": 0.5}}
    cases = (None, 1e-5), (measures, 1e-5), (measures, 1.5e-6)
    verdicts = [quality_line("token", *case).verdict for case in cases]
    assert verdicts == ["not tested", "failed", "passed"]


def test_what_is_said_of_a_distribution_fits_its_p_value():
    """Rare events have a bound that is no normal's: 2.4 standard errors with chance 1, beside 2.5 with chance 0.2."""
    cell = {"positions": 99, "comparisons": 24, "impossible": 0, "on_the_edge": 0, "level": 0.001, "passed": True}
    cell |= {"detectable_temperature": None}
    shown = []
    for z, chance in ((2.4, 0.08), (2.5, 0.0124)):
        statistic = {"overrated": {"z": z, "p_value": chance}}
        figures = {"statistics": statistic, "p_value": min(1.0, 24 * chance)}
        note = distribution_line("token, batch 1", cell | figures, 0.8).note
        errors, adjusted = re.search(
            r"as unlikely as ([\d.]+) standard errors .* with chance ([\d.]+) at most", note
        ).groups()
        assert float(adjusted) == pytest.approx(min(1.0, 24 * 2 * stats.norm.sf(float(errors))), rel=0.15)
        shown.append((float(errors), float(adjusted)))
    assert shown == [(1.8, 1.0), (2.5, 0.3)]


def test_the_temperature_that_would_have_been_seen_is_said_in_its_own_figures():
    cell = {"positions": 99, "comparisons": 0, "impossible": 0, "on_the_edge": 0, "statistics": {}, "p_value": 1.0}
    cell |= {"level": 0.001, "passed": True, "detectable_temperature": [0.975, 1.0264]}
    line = distribution_line("token, batch 1", cell, 0.8)
    assert all(figure in line.sees for figure in ("0.78", "0.821"))
    assert distribution_line("token, batch 1", cell | {"detectable_temperature": None}, 0.8).sees == ""
