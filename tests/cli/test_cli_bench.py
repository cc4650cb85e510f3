"""`specx bench`: what is shown, written and refused."""

import json
import sys
from pathlib import Path

import pytest
from command import command
from tiny import tiny
from tiny_tokenizer import SIZES, TEXTS, tiny_tokenizer

from hf_specx.bench.decoding_methods import KINDS, parse_method
from hf_specx.bench.timed_methods import TimedMethod


QUICK = ["--prompt-tokens", "5", "--max-new-tokens", "6", "--repeats", "1"]


def specx(*arguments):
    return command("bench", *arguments, COLUMNS="160")


def noted_inputs(monkeypatch) -> list[dict]:
    """The inputs of each call of a method from here on."""
    all_inputs, call = [], TimedMethod.__call__

    def noted(method, inputs, options):
        all_inputs.append(inputs)
        return call(method, inputs, options)

    monkeypatch.setattr(TimedMethod, "__call__", noted)
    return all_inputs


def test_a_first_look(folder, texts, tmp_path, monkeypatch):
    """Each method beside plain and beside what transformers has in its place; what cannot run is said."""
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["/bin/specx", "bench", "my-pair"])
    result = specx(folder, *QUICK, "--prompts", texts, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    records = json.loads(out.read_text())["records"]
    assert [record["settings"]["batch"] for record in records] == [1, 8]
    names = ["plain", "assisted", "block-auto", "lookup-10", "suffix-auto"]  # the pair decodes greedily
    assert "greedily" in result.stdout
    assert [list(record["methods"]) for record in records] == [names, names]
    assert "assisted did not run: ValueError: " in result.stdout
    assert {record["provenance"]["command"] for record in records} == {"specx bench my-pair"}
    for record in records:
        for name, figures in record["methods"].items():
            assert KINDS[parse_method(name).kind] in result.stdout
            speedup = figures.get("speedup", {"median": 1.0})["median"]
            assert f"{speedup:.2f} (" in result.stdout
    for heading in ("speed-up", "limit", "Theorem 3.8"):
        assert f"{heading}: " in result.stdout
    assert "times plain" not in result.stdout


@pytest.mark.parametrize(("more", "shown"), [([], "whole prompts"), (["--prompt-tokens", 5], "5 prompt")])
def test_prompts_are_as_they_are(folder, texts, monkeypatch, more: list, shown: str):
    """Unless they are asked to have a length; a row alone has no pads, whatever other prompts there are."""
    all_inputs = noted_inputs(monkeypatch)
    options = ["--max-new-tokens", 6, "--repeats", 2, "--batch-size", 1, "--method", "plain", *more]
    result = specx(folder, "--prompts", texts, *options)
    assert result.exit_code == 0, result.stderr
    assert shown in result.stdout
    lengths = [int(inputs["attention_mask"].sum()) for inputs in all_inputs]
    whole = [len(tiny_tokenizer()(text)["input_ids"]) for text in Path(texts).read_text().splitlines()[:2]]
    assert sorted(set(lengths)) == sorted(set([5] if more else whole))
    assert [inputs["input_ids"].shape[1] for inputs in all_inputs] == lengths


@pytest.mark.parametrize(("more", "drawn"), [([], "sampled at temperature 1, "), (["--no-do-sample"], "greedily")])
def test_without_prompts_there_are_several_texts(loaded, monkeypatch, more: list, drawn: str):
    """Of the pair's own prompts, other ones in each turn; sampled, unless it is asked for greedy ones."""
    all_inputs = noted_inputs(monkeypatch)
    loaded(tiny(**SIZES))
    options = ["--max-new-tokens", 6, "--prompt-tokens", 5, "--repeats", 3, "--method", "plain", *more]
    result = specx("embedded", "--batch-size", 1, *options)
    assert result.exit_code == 0, result.stderr
    assert drawn in result.stdout
    prompts = [tiny_tokenizer()(text)["input_ids"] for text in TEXTS]
    endless = [[token for prompt in (prompts * 9)[first:] for token in prompt][:5] for first in range(3)]
    ids = [inputs["input_ids"][0].tolist() for inputs in all_inputs]
    assert ids == [endless[0], *endless]  # after one that warms up


def test_options_reach_the_records_and_other_records_stay_in_the_file(folder, texts, tmp_path):
    tiny(vocab_size=280, num_hidden_layers=1).save_pretrained(tmp_path / "draft")
    out = tmp_path / "results.json"
    options = "--batch-size 2 --top-p 0.9 --dtype bfloat16 --method plain --method token-2"
    for more in ([], [], ["--draft", tmp_path / "draft"]):  # the second replaces the first
        result = specx(folder, *QUICK, "--prompts", texts, "--out", out, *options.split(), *more)
        assert result.exit_code == 0, result.stderr
    first, other = json.loads(out.read_text())["records"]
    expected = {"batch": 2, "do_sample": True, "top_p": 0.9, "top_k": 50, "dtype": "bfloat16", "repeats": 1}
    assert expected.items() <= first["settings"].items()
    assert first["settings"]["methods"] == ["plain", "token-2"]
    assert first["provenance"]["dtype"] == "bfloat16"
    assert other["settings"]["pair"] == f"{folder} with {tmp_path / 'draft'}"
    assert other["pair"]["draft_parameters"] < first["pair"]["draft_parameters"]
