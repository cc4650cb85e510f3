"""`specx bench`: what is shown, written and refused."""

import json
import sys
from pathlib import Path

import pytest
from command import command
from tiny import tiny
from tiny_tokenizer import SIZES, TEXTS, tiny_tokenizer

from hf_specx.bench.contenders import Contender
from hf_specx.bench.decoding_methods import KINDS, parse_method


QUICK = ["--prompt-tokens", "5", "--max-new-tokens", "6", "--repeats", "1"]


def specx(*arguments):
    return command("bench", *arguments, COLUMNS="160")


def test_a_first_look(folder, texts, tmp_path, monkeypatch):
    """Each way beside plain and beside what transformers has in its place; what cannot run is said."""
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["/bin/specx", "bench", "my-pair"])
    result = specx(folder, *QUICK, "--prompts", texts, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    cells = json.loads(out.read_text())["cells"]
    assert [cell["cell"]["batch"] for cell in cells] == [1, 8]
    ways = ["plain", "assisted", "block-auto", "lookup-10", "suffix-auto"]  # the pair decodes greedily
    assert "greedily they are one" in result.stdout
    assert [list(cell["contenders"]) for cell in cells] == [ways, ways]
    assert "assisted did not run: ValueError: " in result.stdout
    assert {cell["provenance"]["command"] for cell in cells} == {"specx bench my-pair"}
    for cell in cells:
        for name, noted in cell["contenders"].items():
            assert KINDS[parse_method(name).kind] in result.stdout
            assert f"{noted.get('times_plain', 1.0):.2f}" in result.stdout


@pytest.mark.parametrize(("more", "told"), [([], "whole prompts and"), (["--prompt-tokens", 5], "5 prompt and")])
def test_prompts_are_as_they_are(folder, texts, monkeypatch, more: list, told: str):
    """Unless they are asked to have a length; a row alone has no pads, whatever other prompts there are."""
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
    assert [inputs["input_ids"].shape[1] for inputs in given] == lengths


@pytest.mark.parametrize(("more", "drawn"), [([], "sampled at temperature 1, "), (["--no-do-sample"], "greedily")])
def test_without_prompts_there_are_several_texts(loaded, monkeypatch, more: list, drawn: str):
    """Of the pair's own prompts, other ones in each turn; sampled, unless it is asked for greedy ones."""
    read, call = [], Contender.__call__
    monkeypatch.setattr(
        Contender, "__call__", lambda own, *args: read.append(args[0]["input_ids"].tolist()) or call(own, *args)
    )
    loaded(tiny(**SIZES))
    options = ["--max-new-tokens", 6, "--prompt-tokens", 5, "--repeats", 3, "--contender", "plain", *more]
    result = specx("embedded", "--batch-size", 1, *options)
    assert result.exit_code == 0, result.stderr
    assert drawn in result.stdout
    own = [tiny_tokenizer()(text)["input_ids"] for text in TEXTS]
    endless = [[token for text in (own * 9)[first:] for token in text][:5] for first in range(3)]
    assert [ids for (ids,) in read] == [endless[0], *endless]  # after one that warms up


def test_options_reach_the_cells_and_other_cells_stay_in_the_file(folder, texts, tmp_path):
    tiny(vocab_size=280, num_hidden_layers=1).save_pretrained(tmp_path / "draft")
    out = tmp_path / "results.json"
    options = "--batch-size 2 --top-p 0.9 --dtype bfloat16 --contender plain --contender token-2"
    for more in ([], [], ["--draft", tmp_path / "draft"]):  # the second replaces the first
        result = specx(folder, *QUICK, "--prompts", texts, "--out", out, *options.split(), *more)
        assert result.exit_code == 0, result.stderr
    own, other = json.loads(out.read_text())["cells"]
    expected = {"batch": 2, "do_sample": True, "top_p": 0.9, "top_k": 50, "dtype": "bfloat16", "repeats": 1}
    assert expected.items() <= own["cell"].items()
    assert own["cell"]["contenders"] == ["plain", "token-2"]
    assert own["provenance"]["dtype"] == "bfloat16"
    assert other["cell"]["pair"] == f"{folder} with {tmp_path / 'draft'}"
    assert other["pair"]["draft_parameters"] < own["pair"]["draft_parameters"]
