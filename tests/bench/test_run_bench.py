"""`specx bench`: which methods take part, what is recorded of each, and the figures that follow from times."""

from pathlib import Path

import pytest
import torch
from head_files import random_head, write
from tiny import near, tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer

from hf_specx import DraftHead, DraftTargetPair, EarlyExitDraft, SuffixDraft
from hf_specx.bench.bench_settings import BenchSettings
from hf_specx.bench.run_bench import figures, run_bench, usual_methods
from hf_specx.bench.timed_methods import TimedMethod
from hf_specx.bench.timer import TimedCall, Timing


def pair(*drafts) -> DraftTargetPair:
    """Given random tokens; without drafts, one by a model that is near its target."""
    target = tiny()
    return DraftTargetPair(target, list(drafts) if len(drafts) > 1 else (drafts or (near(target, 0.05),))[0])


def settings(*methods: str, **options) -> BenchSettings:
    return BenchSettings("tiny", methods, **{"prompt_tokens": 5, "max_new_tokens": 8, "repeats": 1} | options)


def test_the_methods_of_a_pair_stand_beside_those_of_transformers():
    """Greedily coupled verification is no other than block."""
    drafts = {
        "assisted block-auto coupled-auto": [],
        "": [SuffixDraft()],
        "assisted:1 exit:1-auto": [EarlyExitDraft(1)],
        "assisted block-auto coupled-auto several-auto": [SuffixDraft(), near(tiny(), 0.05)],
    }
    for names, pair_drafts in drafts.items():
        for do_sample in (True, False):
            listed = [name for name in names.split() if do_sample or name != "coupled-auto"]
            methods = usual_methods(pair(*pair_drafts), do_sample)
            assert methods == ("plain", *listed, "lookup-10", "suffix-auto")


@pytest.mark.usefixtures("draft_pays")
def test_what_is_recorded():
    names = "plain", "assisted-2", "coupled-2", "block-auto"
    result = run_bench(settings(*names, repeats=2, seed=7), pair(), "typed")
    assert result["pair"]["target_parameters"] == result["pair"]["draft_parameters"] > 0
    provenance = {"seed": 7, "command": "typed", "dtype": "float32", "torch": torch.__version__}
    assert provenance.items() <= result["provenance"].items()
    for method in result["methods"].values():
        assert method["first_seconds"] > 0
        assert [run["tokens"] for run in method["runs"]] == [8, 8]
    for name in ("coupled-2", "block-auto"):
        method = result["methods"][name]
        assert 0 < method["alpha"] <= 1 <= method["tokens_per_round"]
        assert min(method["forward_limited_speedup"], method["expected_speedup"]) > 0


def test_one_that_fails_is_said_and_the_others_go_on():
    methods = run_bench(settings("plain", "assisted", "block-2", batch=2), pair(), "")["methods"]
    assert methods["assisted"]["unavailable"].startswith("ValueError: ")
    assert methods["assisted"]["runs"] == []
    assert len(methods["plain"]["runs"]) == len(methods["block-2"]["runs"]) == 1
    methods = run_bench(settings("plain", "block-2", "suffix-2"), pair(SuffixDraft()), "")["methods"]
    assert "draft model" in methods["block-2"]["unavailable"]
    assert len(methods["suffix-2"]["runs"]) == 1


def test_a_head_drafts_for_our_methods(tmp_path: Path):
    """In place of a draft model, which assisted generation needs."""
    target = tiny(num_hidden_layers=8)
    head = DraftHead.from_pretrained(write(random_head("eagle3"), tmp_path / "head"), target=target)
    with_head = DraftTargetPair(target, head)
    assert usual_methods(with_head) == ("plain", "block-auto", "coupled-auto", "lookup-10", "suffix-auto")
    result = run_bench(settings("assisted", "block-2", batch=2), with_head, "")
    assert result["pair"]["draft_parameters"] == sum(x.numel() for x in head.parameters())
    assert "draft model" in result["methods"]["assisted"]["unavailable"]
    assert len(result["methods"]["block-2"]["runs"]) == 1


@pytest.mark.parametrize(("sampled", "refused"), [(False, ""), (True, "wrong probabilities")])
def test_a_draft_with_another_tokenizer(sampled, refused):
    """Ours maps its tokens, and transformers' own takes part where it does not sample."""
    sizes = {"eos_token_id": None, "pad_token_id": 1}
    models = tiny(vocab_size=280, **sizes), tiny(vocab_size=288, **sizes)
    other = DraftTargetPair(*models, tiny_tokenizer(), draft_tokenizer=tiny_tokenizer(["some other words"]))
    other.config.prompts = list(TEXTS)
    methods = run_bench(settings("assisted", "block-2", do_sample=sampled), other, "")["methods"]
    assert refused in methods["assisted"].get("unavailable", "")
    assert len(methods["assisted"]["runs"]) == (refused == "")
    assert len(methods["block-2"]["runs"]) == 1


def test_an_early_exit_has_the_head_of_the_pair(monkeypatch):
    strategies, call = [], TimedMethod.__call__

    def noted(method, *args):
        strategies.append(method.strategy)
        return call(method, *args)

    monkeypatch.setattr(TimedMethod, "__call__", noted)
    with_head = pair(EarlyExitDraft(1, torch.nn.Linear(32, 32, bias=False).eval()))
    run_bench(settings("exit:1-2"), with_head, "")
    assert {strategy.draft_model for strategy in strategies} == {with_head.draft}


def test_ratios_within_turns():
    """A machine that was slow during the second turn was slow for both."""
    plain, ours = (Timing([TimedCall(s, 10) for s in seconds], 1.0) for seconds in ((2, 20, 2), (1, 10, 1)))
    values = figures(ours, plain)
    assert values["speedup"] == {"median": 2.0, "min": 2.0, "max": 2.0, "stdev": 0.0}
    assert values["tokens_per_second"] == {"median": 10.0, "min": 1.0, "max": 10.0}
