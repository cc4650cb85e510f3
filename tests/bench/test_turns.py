"""A cell of `specx bench`: who takes part, what is said of each, and the figures that follow from times."""

from pathlib import Path

import pytest
import torch
from head_files import random_head, write
from tiny import near, tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer

from hf_specx import DraftHead, DraftTargetPair, EarlyExitDraft, SuffixDraft
from hf_specx.bench import turns
from hf_specx.bench.timer import TimedCall, Timing
from hf_specx.bench.turns import figures, measure_cell, usual_contenders
from hf_specx.bench.ways import Cell


def pair(*drafts) -> DraftTargetPair:
    """Given random tokens; without drafts, one by a model that is near its target."""
    target = tiny()
    return DraftTargetPair(target, list(drafts) if len(drafts) > 1 else (drafts or (near(target, 0.05),))[0])


def cell(*contenders: str, **settings) -> Cell:
    return Cell("tiny", contenders, **{"prompt_tokens": 5, "max_new_tokens": 8, "repeats": 1} | settings)


def test_the_ways_of_a_pair_stand_beside_those_of_transformers():
    """Greedily coupled verification is no other than block."""
    drafts = {
        "assisted block-auto coupled-auto": [],
        "": [SuffixDraft()],
        "assisted:1 exit:1-auto": [EarlyExitDraft(1)],
        "assisted block-auto coupled-auto several-auto": [SuffixDraft(), near(tiny(), 0.05)],
    }
    for ways, own in drafts.items():
        for do_sample in (True, False):
            listed = [way for way in ways.split() if do_sample or way != "coupled-auto"]
            found = usual_contenders(pair(*own), do_sample)
            assert found == ("plain", *listed, "lookup-10", "suffix-auto")


@pytest.mark.usefixtures("draft_pays")
def test_what_a_cell_says():
    found = measure_cell(cell("plain", "assisted-2", "coupled-2", "block-auto", repeats=2, seed=7), pair(), "typed")
    assert found["pair"]["target_parameters"] == found["pair"]["draft_parameters"] > 0
    known = {"seed": 7, "command": "typed", "dtype": "float32", "torch": torch.__version__}
    assert known.items() <= found["provenance"].items()
    for noted in found["contenders"].values():
        assert noted["first_seconds"] > 0
        assert [run["tokens"] for run in noted["runs"]] == [8, 8]
    for name in ("coupled-2", "block-auto"):
        noted = found["contenders"][name]
        assert 0 < noted["alpha"] <= 1 <= noted["tokens_per_round"]
        assert min(noted["forward_limited_speedup"], noted["expected_speedup"]) > 0


def test_one_that_fails_is_said_and_the_others_go_on():
    found = measure_cell(cell("plain", "assisted", "block-2", batch=2), pair(), "")["contenders"]
    assert found["assisted"]["unavailable"].startswith("ValueError: assisted generate is only supported for batch")
    assert found["assisted"]["runs"] == []
    assert len(found["plain"]["runs"]) == len(found["block-2"]["runs"]) == 1
    found = measure_cell(cell("plain", "block-2", "suffix-2"), pair(SuffixDraft()), "")["contenders"]
    assert "block-2 needs a draft model" in found["block-2"]["unavailable"]
    assert len(found["suffix-2"]["runs"]) == 1


def test_a_head_drafts_for_our_contenders(tmp_path: Path):
    """In place of a draft model, which assisted generation needs."""
    target = tiny(num_hidden_layers=8)
    head = DraftHead.from_pretrained(write(random_head("eagle3"), tmp_path / "head"), target=target)
    made = DraftTargetPair(target, head)
    assert usual_contenders(made) == ("plain", "block-auto", "coupled-auto", "lookup-10", "suffix-auto")
    found = measure_cell(cell("assisted", "block-2", batch=2), made, "")
    assert found["pair"]["draft_parameters"] == sum(x.numel() for x in head.parameters())
    assert "assisted needs a draft model" in found["contenders"]["assisted"]["unavailable"]
    assert len(found["contenders"]["block-2"]["runs"]) == 1


@pytest.mark.parametrize(
    ("sampled", "refused"), [(False, ""), (True, "transformers samples from wrong probabilities")]
)
def test_a_draft_with_another_tokenizer(sampled, refused):
    """Ours maps its tokens, and transformers' own takes part where it does not sample."""
    sizes = {"eos_token_id": None, "pad_token_id": 1}
    models = tiny(vocab_size=280, **sizes), tiny(vocab_size=288, **sizes)
    other = DraftTargetPair(*models, tiny_tokenizer(), draft_tokenizer=tiny_tokenizer(["some other words"]))
    other.config.prompts = list(TEXTS)
    found = measure_cell(cell("assisted", "block-2", do_sample=sampled), other, "")["contenders"]
    assert refused in found["assisted"].get("unavailable", "")
    assert len(found["assisted"]["runs"]) == (refused == "")
    assert len(found["block-2"]["runs"]) == 1


def test_an_early_exit_has_the_head_of_the_pair(monkeypatch):
    drafts, calls = [], turns.Contender.__call__
    monkeypatch.setattr(turns.Contender, "__call__", lambda own, *a: drafts.append(own.strategy) or calls(own, *a))
    made = pair(EarlyExitDraft(1, torch.nn.Linear(32, 32, bias=False).eval()))
    measure_cell(cell("exit:1-2"), made, "")
    assert {strategy.draft_model for strategy in drafts} == {made.draft}


def test_ratios_within_turns():
    """A machine that was slow during the second turn was slow for both."""
    plain, ours = (Timing([TimedCall(s, 10) for s in own], 1.0) for own in ((2, 20, 2), (1, 10, 1)))
    found = figures(ours, plain)
    assert found["speedup"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert found["tokens_per_second"] == {"median": 10.0, "min": 1.0, "max": 10.0}
