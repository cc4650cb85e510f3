"""`specx distill`: what is shown, saved and refused."""

import json
import sys

import pytest
import torch
from command import command, saved_models
from tiny_tokenizer import TEXTS

from hf_specx import DraftTargetPair
from hf_specx.training.result import Distilled


SIZES = {"vocab_size": 280, "eos_token_id": None, "pad_token_id": 1, "initializer_range": 0.2, "num_hidden_layers": 3}
QUICK = ["--phases", 2, "--texts", 8, "--passes", 2, "--max-new-tokens", 8, "--learning-rate", 5e-3]
PROMPTS = "\n".join(f"{text} {number}" for text in TEXTS for number in range(10))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a draft for it and one with other tokens."""
    return saved_models(tmp_path_factory.mktemp("models"), SIZES, 0.8)


def specx(*arguments: object, input: str = PROMPTS):
    return command("distill", *arguments, input=input, COLUMNS="200")


def test_a_pair_is_trained_and_saved(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["specx", "distill", "these", "words"])
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    out = tmp_path / "pair"
    given = ["--file", tmp_path / "prompts.txt", "--out", out, "--no-measure", "--json"]
    result = specx(folders["target"], "layers:1", *QUICK, *given, input="")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["after"]["value"] > found["before"]["value"]
    assert len(found["alphas"]) == 3
    assert "before training, α" in result.stderr
    assert "phase 2 of 2, α" in result.stderr
    assert f"saved in {out}; texts and checkpoints in {out}.training are no longer needed" in result.stderr
    assert DraftTargetPair.from_pretrained(out).draft.config.num_hidden_layers == 1
    card = command("card", out).stdout
    assert "specx distill these words" in card
    assert "How the draft was made" in card


def test_speed_is_measured(folders, tmp_path):
    """And the draft learns from the prompts too."""
    given = [*QUICK, "--learn-from-prompts"]
    result = specx(folders["target"], folders["draft"], "--out", tmp_path / "pair", *given)
    assert result.exit_code == 0, result.stderr
    assert "batch 8: " in result.stdout
    config = DraftTargetPair.from_pretrained(tmp_path / "pair").config
    assert [m.batch for m in config.measurements] == [1, 8]
    assert '"learn_from_prompts": true' in config.notes


def test_the_pair_is_saved_where_it_cannot_be_timed(folders, tmp_path, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("out of memory\nand more")

    monkeypatch.setattr(Distilled, "measure", full)
    result = specx(folders["target"], folders["draft"], "--out", tmp_path / "pair", *QUICK, "--phases", 1)
    assert result.exit_code == 0, result.stderr
    assert "saved without all figures, as timing failed: out of memory\n" in result.stdout
    assert DraftTargetPair.from_pretrained(tmp_path / "pair").config.measurements == []


WRONG = {
    "'nowhere' cannot be got from the Hub, and there is no folder": ["nowhere", "draft"],
    "'layers:no' names no layers": ["target", "layers:no"],
    "error: layers=3 leaves out no layer of LlamaForCausalLM, which has 3": ["target", "layers:3"],
    "the two tokenizers differ": ["target", "stranger"],
    "loss='x' is unknown; choose one of": ["target", "draft", "--loss", "x"],
    "--greedy does not sample": ["target", "draft", "--greedy", "--top-p", 0.5],
    "positions of LlamaForCausalLM; shorten it, or lower": ["target", "draft", "--max-new-tokens", 120],
}


@pytest.mark.parametrize("told", WRONG)
def test_refused_before_anything_is_written(folders, tmp_path, told: str):
    target, draft, *options = WRONG[told]
    names = [folders.get(name, name) for name in (target, draft)]
    result = specx(*names, "--out", tmp_path / "pair", *QUICK, *options)
    assert result.exit_code == 2
    assert told in result.stderr
    assert not list(tmp_path.iterdir())
