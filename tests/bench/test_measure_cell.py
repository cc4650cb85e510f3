"""A cell of `specx bench`: who takes part, what is said of each, and the figures that follow from times."""

from pathlib import Path

import pytest
import torch
from head_files import random_head, write
from tiny import near, tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer

from hf_specx import DraftHead, DraftTargetPair, EarlyExitDraft, SuffixDraft
from hf_specx.bench.cell import Cell
from hf_specx.bench.contenders import Contender
from hf_specx.bench.measure_cell import figures, measure_cell, usual_contenders
from hf_specx.bench.timer import TimedCall, Timing


def pair(*drafts) -> DraftTargetPair:
    """Given random tokens; without drafts, one by a model that is near its target."""
    target = tiny()
    return DraftTargetPair(target, list(drafts) if len(drafts) > 1 else (drafts or (near(target, 0.05),))[0])


def cell(*contenders: str, **settings) -> Cell:
    return Cell("tiny", contenders, **{"prompt_tokens": 5, "max_new_tokens": 8, "repeats": 1} | settings)


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
            contenders = usual_contenders(pair(*pair_drafts), do_sample)
            assert contenders == ("plain", *listed, "lookup-10", "suffix-auto")


@pytest.mark.usefixtures("draft_pays")
def test_what_a_cell_says():
    names = "plain", "assisted-2", "coupled-2", "block-auto"
    result = measure_cell(cell(*names, repeats=2, seed=7), pair(), "typed")
    assert result["pair"]["target_parameters"] == result["pair"]["draft_parameters"] > 0
    provenance = {"seed": 7, "command": "typed", "dtype": "float32", "torch": torch.__version__}
    assert provenance.items() <= result["provenance"].items()
    for contender in result["contenders"].values():
        assert contender["first_seconds"] > 0
        assert [run["tokens"] for run in contender["runs"]] == [8, 8]
    for name in ("coupled-2", "block-auto"):
        contender = result["contenders"][name]
        assert 0 < contender["alpha"] <= 1 <= contender["tokens_per_round"]
        assert min(contender["forward_limited_speedup"], contender["expected_speedup"]) > 0


def test_one_that_fails_is_said_and_the_others_go_on():
    contenders = measure_cell(cell("plain", "assisted", "block-2", batch=2), pair(), "")["contenders"]
    assert contenders["assisted"]["unavailable"].startswith("ValueError: ")
    assert contenders["assisted"]["runs"] == []
    assert len(contenders["plain"]["runs"]) == len(contenders["block-2"]["runs"]) == 1
    contenders = measure_cell(cell("plain", "block-2", "suffix-2"), pair(SuffixDraft()), "")["contenders"]
    assert "draft model" in contenders["block-2"]["unavailable"]
    assert len(contenders["suffix-2"]["runs"]) == 1


def test_a_head_drafts_for_our_contenders(tmp_path: Path):
    """In place of a draft model, which assisted generation needs."""
    target = tiny(num_hidden_layers=8)
    head = DraftHead.from_pretrained(write(random_head("eagle3"), tmp_path / "head"), target=target)
    with_head = DraftTargetPair(target, head)
    assert usual_contenders(with_head) == ("plain", "block-auto", "coupled-auto", "lookup-10", "suffix-auto")
    result = measure_cell(cell("assisted", "block-2", batch=2), with_head, "")
    assert result["pair"]["draft_parameters"] == sum(x.numel() for x in head.parameters())
    assert "draft model" in result["contenders"]["assisted"]["unavailable"]
    assert len(result["contenders"]["block-2"]["runs"]) == 1


@pytest.mark.parametrize(("sampled", "refused"), [(False, ""), (True, "wrong probabilities")])
def test_a_draft_with_another_tokenizer(sampled, refused):
    """Ours maps its tokens, and transformers' own takes part where it does not sample."""
    sizes = {"eos_token_id": None, "pad_token_id": 1}
    models = tiny(vocab_size=280, **sizes), tiny(vocab_size=288, **sizes)
    other = DraftTargetPair(*models, tiny_tokenizer(), draft_tokenizer=tiny_tokenizer(["some other words"]))
    other.config.prompts = list(TEXTS)
    contenders = measure_cell(cell("assisted", "block-2", do_sample=sampled), other, "")["contenders"]
    assert refused in contenders["assisted"].get("unavailable", "")
    assert len(contenders["assisted"]["runs"]) == (refused == "")
    assert len(contenders["block-2"]["runs"]) == 1


def test_an_early_exit_has_the_head_of_the_pair(monkeypatch):
    strategies, call = [], Contender.__call__

    def noted(contender, *args):
        strategies.append(contender.strategy)
        return call(contender, *args)

    monkeypatch.setattr(Contender, "__call__", noted)
    with_head = pair(EarlyExitDraft(1, torch.nn.Linear(32, 32, bias=False).eval()))
    measure_cell(cell("exit:1-2"), with_head, "")
    assert {strategy.draft_model for strategy in strategies} == {with_head.draft}


def test_ratios_within_turns():
    """A machine that was slow during the second turn was slow for both."""
    plain, ours = (Timing([TimedCall(s, 10) for s in seconds], 1.0) for seconds in ((2, 20, 2), (1, 10, 1)))
    values = figures(ours, plain)
    assert values["speedup"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert values["tokens_per_second"] == {"median": 10.0, "min": 1.0, "max": 10.0}
