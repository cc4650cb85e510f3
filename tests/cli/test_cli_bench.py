"""`specx bench`: what is shown, written and refused."""

import json
import sys

import pytest
from command import command
from tiny import near, tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer

from hf_specx import DraftTargetPair
from hf_specx.bench.ways import in_words
from hf_specx.cli.bench import COLUMNS, rows_of


SIZES = {"vocab_size": 280, "eos_token_id": None, "pad_token_id": 1}
QUICK = ["--prompt-tokens", "5", "--new-tokens", "6", "--repeats", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "my-pair"
    target = tiny(**SIZES)
    DraftTargetPair(target, near(target, 0.1), tiny_tokenizer()).save_pretrained(path)
    return str(path)


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(TEXTS))
    return str(file)


def specx(*arguments, columns: str = "160"):
    return command("bench", *arguments, COLUMNS=columns)


def test_a_first_look(folder, texts, tmp_path, monkeypatch):
    """Each way beside plain and beside what transformers has in its place; what cannot run says why."""
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["/bin/specx", "bench", "my-pair"])
    result = specx(folder, *QUICK, "--file", texts, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    cells = json.loads(out.read_text())["cells"]
    assert [cell["cell"]["batch"] for cell in cells] == [1, 8]
    ways = ["plain", "stock", "block-auto", "coupled-auto", "lookup-10", "suffix-auto"]
    assert [list(cell["contenders"]) for cell in cells] == [ways, ways]
    assert "stock did not run: ValueError: assisted generate is only supported for batch_size = 1" in result.stdout
    assert {cell["provenance"]["command"] for cell in cells} == {"specx bench my-pair"}
    for cell in cells:
        for name, noted in cell["contenders"].items():
            assert f"{name}: {in_words(name)}" in result.stdout
            assert f"{noted.get('times_plain', 1.0):.2f}" in result.stdout


def test_options_reach_the_cells_and_other_cells_stay_in_the_file(folder, texts, tmp_path):
    tiny(**SIZES, num_hidden_layers=1).save_pretrained(tmp_path / "draft")
    out = tmp_path / "results.json"
    options = "--batch 2 --temperature 0 --top-p 0.9 --seed 4 --dtype bfloat16 --contender plain --contender token-2"
    for more in ([], [], ["--draft", tmp_path / "draft"]):  # the second replaces the first
        result = specx(folder, *QUICK, "--file", texts, "--out", out, *options.split(), *more)
        assert result.exit_code == 0, result.stderr
    own, other = json.loads(out.read_text())["cells"]
    expected = {"batch": 2, "temperature": 0, "top_p": 0.9, "seed": 4, "dtype": "bfloat16", "repeats": 1}
    assert expected.items() <= own["cell"].items()
    assert own["cell"]["contenders"] == ["plain", "token-2"]
    assert own["provenance"]["dtype"] == "bfloat16"
    assert other["cell"]["pair"] == f"{folder} with {tmp_path / 'draft'}"
    assert other["pair"]["draft_parameters"] < own["pair"]["draft_parameters"]


def test_no_word_is_cut_at_80_columns(folder, texts):
    result = specx(folder, *QUICK, "--batch", "1", "--file", texts, "--contender", "coupled-5", columns="80")
    assert "…" not in result.stdout
    for heading in COLUMNS:
        assert all(word in result.stdout for word in heading.split())
    rows = rows_of({"coupled-5-compiled": {"tokens_per_second": {"median": 123456.0}}})
    assert rows[0][:2] == ("coupled-5-compiled", "123456")
    assert set(rows[0][2:]) == {"-"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "batches=[0]"),
        (["--batch", "2", "--batch", "2"], "each once"),
        (["--repeats", "0"], "repeats=0"),
        (["--new-tokens", "1"], "leave no round to time"),
        (["--prompt-tokens", "0"], "leave no round to time"),
        (["--temperature", "-1"], "--temperature -1.0 is not above 0"),
        (["--top-p", "0"], "--top-p 0.0 is not in (0, 1]"),
        (["--dtype", "int8"], "--dtype int8 is unknown"),
        (["--contender", "fast"], "contender 'fast' is unknown"),
        (["--chat"], "--chat is for prompts of --file; give it, or leave --chat out"),
        (["no-such-pair"], "no-such-pair"),
        (["--out", "no/such/folder.json"], "there is no folder"),
        (["--out", "FILE"], "has no results of this version"),
    ],
)
def test_errors_are_one_line(tmp_path, arguments, message):
    file = tmp_path / "notes.txt"
    file.write_text("notes")
    result = specx(*(str(file) if argument == "FILE" else argument for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert file.read_text() == "notes"


def test_a_pair_that_cannot_read_prompts_is_refused(tmp_path):
    target = tiny(**SIZES)
    DraftTargetPair(target, near(target, 0.1)).save_pretrained(tmp_path / "pair")
    result = specx(str(tmp_path / "pair"), *QUICK)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "has no tokenizer, so it cannot read text" in result.stderr
