"""`specx distill`: what is shown, saved and refused."""

import sys
from types import SimpleNamespace

import torch
from command import command
from head_files import random_head, write
from safetensors.torch import load_file
from tiny_tokenizer import TEXTS, saved_models

from hf_specx import DraftHead, DraftTargetPair
from hf_specx.cli import distill as cli_distill


CHANGES = {"eos_token_id": None, "initializer_range": 0.2, "num_hidden_layers": 3}
QUICK = ["--phases", 2, "--texts-per-phase", 8, "--max-new-tokens", 8, "--do-sample", "--top-k", 0]
QUICK += ["--set", "passes=2", "--set", "learning_rate=5e-3", "--seconds", 0]
PROMPTS = "\n".join(f"{text} {number}" for text in TEXTS for number in range(10))


def test_a_pair_is_trained_and_saved(tmp_path, monkeypatch):
    folders = saved_models(tmp_path, 0.8, **CHANGES)
    monkeypatch.setattr(sys, "argv", ["specx", "distill", "these", "words"])
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    out = tmp_path / "pair"
    options = ["--prompts", tmp_path / "prompts.txt", "--out", out, "--set", "learn_from_prompts=true"]
    result = command("distill", folders["target"], "layers:1", *QUICK, *options, COLUMNS="200")
    assert result.exit_code == 0, result.stderr
    assert "no phase was better" not in result.stderr
    pair = DraftTargetPair.from_pretrained(out)
    assert pair.draft.config.num_hidden_layers == 1
    assert [m.batch for m in pair.config.measurements] == [1, 8]
    assert '"learn_from_prompts": true' in pair.config.notes
    assert "specx distill these words" in command("card", out).stdout


def test_a_head_is_trained_further(tmp_path):
    """It is named by its folder."""
    target, out = saved_models(tmp_path, 0.8, **CHANGES)["target"], tmp_path / "pair"
    folder = write(random_head(vocab=280, layer_ids=(0, 1, 2), own_head=True), tmp_path / "head")
    result = command("distill", target, folder, *QUICK, "--out", out, input=PROMPTS)
    assert result.exit_code == 0, result.stderr
    head = DraftTargetPair.from_pretrained(out).draft
    assert isinstance(head, DraftHead)
    assert not torch.equal(head.lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])


def test_the_pair_in_the_package_by_its_name(monkeypatch, tmp_path):
    """As a target and as a draft."""
    trainings = []
    monkeypatch.setattr("hf_specx.training.distill.distill", lambda *args, **how: trainings.append(args) or stop())

    def stop():
        raise ValueError("far enough")

    for draft in ("layers:2", "embedded/draft"):
        result = command("distill", "embedded", draft, "--out", tmp_path / "pair", input=PROMPTS)
        assert "far enough" in result.stderr
    assert [target.config.num_hidden_layers for target, *_ in trainings] == [16, 16]
    assert trainings[0][1] == "layers:2"
    assert trainings[1][1].config.num_hidden_layers == 2


def test_the_pair_is_saved_where_it_cannot_be_timed(capsys):
    def full(*args):
        raise torch.OutOfMemoryError("out of memory\nand more")

    config = SimpleNamespace(speeds=list)
    cli_distill.measure_pair(SimpleNamespace(measure=full, pair=SimpleNamespace(config=config)))
    assert "out of memory\n" in capsys.readouterr().err
