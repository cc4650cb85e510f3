"""`specx bench`: what is shown, written and refused."""

import json
import sys

from command import command
from tiny import tiny

from hf_specx.bench.ways import KINDS, way


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
            assert KINDS[way(name).kind] in result.stdout
            assert f"{noted.get('times_plain', 1.0):.2f}" in result.stdout


def test_prompts_are_as_they_are(folder, texts):
    """Unless they are asked to have a length; the pair's own have one."""
    for more, told in (([], "whole prompts and"), (["--prompt-tokens", 5], "5 prompt and")):
        options = ["--max-new-tokens", 6, "--repeats", 2, "--batch-size", 3, "--contender", "plain", *more]
        result = specx(folder, "--prompts", texts, *options)
        assert result.exit_code == 0, result.stderr
        assert f"batch 3, {told} 6 new tokens" in result.stdout


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
