"""`specx bench`: what is shown, written and refused."""

import json
import sys
from pathlib import Path

import pytest
from command import command
from tiny import tiny
from tiny_tokenizer import tiny_tokenizer

from hf_specx.bench.contenders import Contender


QUICK = ["--prompt-tokens", "5", "--max-new-tokens", "6", "--repeats", "1"]


def specx(*arguments):
    return command("bench", *arguments, COLUMNS="160")


@pytest.mark.parametrize(("more", "told"), [([], "whole prompts and"), (["--prompt-tokens", 5], "5 prompt and")])
def test_prompts_are_as_they_are(folder, texts, monkeypatch, more: list, told: str):
    """Unless they are asked to have a length; all turns have the same width, for which torch may have compiled."""
    given, call = [], Contender.__call__
    monkeypatch.setattr(
        Contender, "__call__", lambda own, inputs, options: given.append(inputs) or call(own, inputs, options)
    )
    options = ["--max-new-tokens", 6, "--repeats", 2, "--batch-size", 1, "--contender", "plain", *more]
    result = specx(folder, "--prompts", texts, *options)
    assert result.exit_code == 0, result.stderr
    assert f"batch 1, {told} 6 new tokens" in result.stdout
    lengths = [int(inputs["attention_mask"].sum()) for inputs in given]
    own = [len(tiny_tokenizer()(text)["input_ids"]) for text in Path(texts).read_text().splitlines()[:2]]
    assert sorted(set(lengths)) == sorted(set([5] if more else own))
    assert {inputs["input_ids"].shape[1] for inputs in given} == {5 if more else max(own)}


def test_options_reach_the_cells_and_other_cells_stay_in_the_file(folder, texts, tmp_path, monkeypatch):
    tiny(vocab_size=280, num_hidden_layers=1).save_pretrained(tmp_path / "draft")
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["/bin/specx", "bench", "my-pair"])
    options = "--top-p 0.9 --dtype bfloat16 --contender plain --contender token-2 --contender assisted"
    two, other = ["--batch-size", 2], ["--draft", tmp_path / "draft"]
    for more in (two, two, other):  # the second replaces the first
        result = specx(folder, *QUICK, "--prompts", texts, "--out", out, *options.split(), *more)
        assert result.exit_code == 0, result.stderr
        assert "assisted did not run: ValueError: " in result.stdout
    own, *others = json.loads(out.read_text())["cells"]
    expected = {"batch": 2, "do_sample": True, "top_p": 0.9, "top_k": 50, "dtype": "bfloat16", "repeats": 1}
    assert expected.items() <= own["cell"].items()
    assert own["cell"]["contenders"] == ["plain", "token-2", "assisted"]
    assert {"dtype": "bfloat16", "command": "specx bench my-pair"}.items() <= own["provenance"].items()
    assert [cell["cell"]["batch"] for cell in others] == [1, 8]
    for cell in others:
        assert cell["cell"]["pair"] == f"{folder} with {tmp_path / 'draft'}"
        assert cell["pair"]["draft_parameters"] < own["pair"]["draft_parameters"]
