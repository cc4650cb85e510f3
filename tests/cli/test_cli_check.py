"""`specx check`: what is shown, written and refused, and the exit status."""

import html
import json

import torch
from check_cases import inject
from command import command
from tiny_tokenizer import TEXTS

from hf_specx.cli.console import INDENT
from hf_specx.metrics.settings import Settings


SMALL = "--batch-size 16 --max-new-tokens 8 --samples 32 --num-draft-tokens 3 --temperature 0.7"


def specx(*arguments: str):
    return command("check", *arguments, COLUMNS="200")


def test_a_check_that_passes(folder, texts, tmp_path):
    """And writes its figures and a page."""
    out, report = tmp_path / "result.json", tmp_path / "report.html"
    some = ["--verification", "greedy", "--verification", "block"]  # of tokens and of the distribution
    result = specx(folder, *SMALL.split(), *some, "--prompts", texts, "--out", str(out), "--out", str(report))
    assert result.exit_code == 0, result.stdout + result.stderr
    page, saved = report.read_text(encoding="utf-8"), json.loads(out.read_text())
    assert saved["command"] in html.unescape(page)
    assert saved["passed"] is True
    assert saved["prompts"] == list(TEXTS)
    assert all(f"{line['verdict']:{INDENT}}{line['what']}" in result.stdout for line in saved["lines"])
    assert not list(tmp_path.glob("*.unfinished"))
    assert "\npassed: " in result.stdout
    seen = [line["sees"] for line in saved["lines"] if line["sees"]]
    assert seen
    for text in (" ".join(result.stdout.split()), html.unescape(page)):
        assert all(f"9 of 10 such checks would reject: {fault}" in text for fault in seen)


def test_a_check_that_fails(monkeypatch, folder, texts, tmp_path):
    inject(monkeypatch, "one candidate too many")
    out = tmp_path / "result.json"
    result = specx(folder, *SMALL.split(), "--prompts", texts, "--verification", "greedy", "--out", str(out))
    assert result.exit_code == 1
    assert "failed: greedy, batch 16: the same tokens as plain generate" in result.stdout
    assert json.loads(out.read_text())["passed"] is False


def test_a_check_without_enough_memory_has_not_failed(monkeypatch, folder, texts):
    """It says so by another code: scripts read 1 as "the text is another"."""

    def run_check(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("hf_specx.metrics.check.run_check", run_check)
    result = specx(folder, *SMALL.split(), "--prompts", texts)
    assert result.exit_code == 2
    assert "error: memory" in result.stderr


def test_options_reach_the_check(monkeypatch, folder, texts, tmp_path):
    seen = []

    def run_check(subject, advance, path):
        seen.append((subject.settings, subject.prompts, subject.target.dtype, path))
        raise ValueError("seen")

    monkeypatch.setattr("hf_specx.metrics.check.run_check", run_check)
    options = "--batch-size 2 --batch-size 3 --max-new-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 7 --samples 6 "
    options += f"--verification token --num-draft-tokens 2 --seed 4 --dtype bfloat16 --out {tmp_path}/known.json"
    specx(folder, *options.split(), "--prompts", texts)
    (settings, prompts, dtype, path), *_ = seen
    assert settings == Settings((2, 3), 9, 0.5, 0.9, 7, ("token",), 6, 2, 4)
    assert (prompts, str(dtype), path) == (list(TEXTS), "torch.bfloat16", tmp_path / "known.json.unfinished")
    specx()
    settings, prompts, dtype, path = seen[1]
    assert (settings, len(prompts), path) == (Settings(top_k=50), 16, None)  # the embedded pair has 16
