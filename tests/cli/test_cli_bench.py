"""`specx bench`: what is shown, written and refused."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from bench_cases import speed, tiny_pair
from command import command
from tiny import near, tiny
from tiny_tokenizer import TEXTS, tiny_tokenizer

from hf_specx import DraftTargetPair
from hf_specx.bench.cells import cpu_grid
from hf_specx.bench.points import claims
from hf_specx.bench.ways import in_words
from hf_specx.cli.bench import COLUMNS, rows_of
from hf_specx.cli.loading import models_digest
from hf_specx.cli.options import Named


SIZES = {"vocab_size": 280, "eos_token_id": None, "pad_token_id": 1}
QUICK = ["--prompt-tokens", "5", "--new-tokens", "6", "--repeats", "1"]
ONE = [*QUICK, "--batch", "1", "--contender", "plain"]


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


def specx(*arguments):
    return command("bench", *arguments, COLUMNS="160")


def test_a_first_look(folder, texts, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    out, plots = tmp_path / "results.json", tmp_path / "plots"
    arguments = [folder, *QUICK, "--file", texts, "--out", str(out), "--plots", str(plots)]
    monkeypatch.setattr(sys, "argv", ["/bin/specx", "bench", "my-pair"])
    result = specx(*arguments)
    assert result.exit_code == 0, result.stderr
    cells = json.loads(out.read_text())["cells"]
    assert [cell["cell"]["batch"] for cell in cells] == [1, 8]
    assert {tuple(cell["contenders"]) for cell in cells} == {("plain", "stock", "block-auto", "coupled-auto")}
    assert cells[1]["contenders"]["stock"].keys() == {"runs", "unavailable"}
    assert "stock did not run: ValueError: assisted generate is only supported for batch_size = 1" in result.stdout
    assert {cell["provenance"]["command"] for cell in cells} == {"specx bench my-pair"}
    for cell in cells:
        for name, noted in cell["contenders"].items():
            assert f"{name}: {in_words(name)}" in result.stdout
            assert f"{noted.get('times_plain', 1.0):.2f}" in result.stdout
    assert "synthetic" not in result.stdout
    assert {"batch.svg", "alpha.svg", "rounds.svg"} == {path.name for path in plots.iterdir()}
    again = specx(*arguments)
    assert again.stdout == result.stdout  # of the file
    assert again.stderr == ""


def test_settings_reach_the_cells(folder, texts, tmp_path):
    out = tmp_path / "results.json"
    options = "--batch 2 --temperature 0 --top-p 0.9 --seed 4 --dtype bfloat16 --contender plain --contender token-2"
    result = specx(folder, *QUICK, "--file", texts, "--out", str(out), *options.split())
    assert result.exit_code == 0, result.stderr
    (cell,) = json.loads(out.read_text())["cells"]
    expected = {"batch": 2, "temperature": 0, "top_p": 0.9, "seed": 4, "dtype": "bfloat16", "repeats": 1}
    assert expected.items() <= cell["cell"].items()
    assert cell["cell"]["contenders"] == ["plain", "token-2"]
    assert cell["provenance"]["dtype"] == "bfloat16"


def test_another_draft_is_measured(folder, texts, tmp_path):
    """In a cell of its own."""
    draft, out = tiny(**SIZES, num_hidden_layers=1), tmp_path / "results.json"
    draft.save_pretrained(tmp_path / "draft")
    for named in ([], ["--draft", tmp_path / "draft"]):
        result = specx(folder, *ONE, "--file", texts, "--out", out, *named)
        assert result.exit_code == 0, result.stderr
    own, other = json.loads(out.read_text())["cells"]
    assert other["cell"]["pair"] == f"{folder} with {tmp_path / 'draft'}"
    assert other["pair"]["draft_parameters"] == draft.num_parameters() < own["pair"]["draft_parameters"]


def test_other_prompts_are_measured_anew(folder, texts, tmp_path):
    out, others = tmp_path / "results.json", tmp_path / "others.txt"
    others.write_text(TEXTS[0])
    for file in (texts, others, texts):
        assert specx(folder, *ONE, "--file", file, "--out", out).exit_code == 0
    cells = json.loads(out.read_text())["cells"]
    assert len({cell["cell"]["prompts"] for cell in cells}) == len(cells) == 2


def test_other_models_of_the_same_name_are_measured(texts, tmp_path):
    folder, draft, out = tmp_path / "my-pair", tmp_path / "draft", tmp_path / "results.json"
    target = tiny(**SIZES)
    for noise in (0.1, 0.2, 0.2):
        near(target, noise).save_pretrained(draft)
        DraftTargetPair(target, near(target, noise), tiny_tokenizer()).save_pretrained(folder, overwrite=True)
        for named in ([], ["--draft", draft]):
            assert specx(folder, *ONE, "--file", texts, "--out", out, *named).exit_code == 0
    cells = json.loads(out.read_text())["cells"]
    assert len({cell["cell"]["models"] for cell in cells}) == len(cells) == 4


def test_models_are_told_apart(tmp_path, monkeypatch):
    """Where they can be without loading them."""
    revisions = [models_digest(Named("org/pair", hub=hub)) for hub in ({}, {"revision": "a"}, {"revision": "b"})]
    assert len(set(revisions)) == 3
    tiny().save_pretrained(tmp_path / "embedded", max_shard_size="10KB")  # comes before the pair in the package
    digests = [models_digest(Named()), models_digest(Named(target=str(tmp_path / "embedded"), draft="suffix"))]
    monkeypatch.chdir(tmp_path)
    digests.append(models_digest(Named()))
    assert "" not in digests
    assert len(set(digests)) == 2


def test_results_of_the_cpu_are_taken_up_where_there_is_a_gpu(folder, texts, tmp_path, monkeypatch):
    arguments = [folder, *ONE, "--file", texts, "--out", tmp_path / "results.json", "--device", "cpu"]
    first = specx(*arguments)
    assert first.exit_code == 0, first.stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("hf_specx.cli.loading.load_named", None)
    assert specx(*arguments).stdout == first.stdout


def test_no_word_is_cut_at_80_columns(folder, texts):
    result = command(
        "bench", folder, *QUICK, "--batch", "1", "--file", texts, "--contender", "coupled-5", COLUMNS="80"
    )
    assert "…" not in result.stdout
    for heading in COLUMNS:
        assert all(word in result.stdout for word in heading.split())
    rows = rows_of({"coupled-5-compiled": {"tokens_per_second": {"median": 123456.0}, "above_limit": "chance"}})
    assert rows[0][:2] == ("coupled-5-compiled", "123456")
    assert rows[0][-2] == "-*"


def test_a_grid_says_what_holds(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    seen = []

    def run_grid(cells, results, command, load, advance):
        seen.append((cells, results.path))
        return [speed(), speed(batch=8) | {"failed": "RuntimeError: memory"}]

    monkeypatch.setattr("hf_specx.bench.grid.run_grid", run_grid)
    result = specx("--grid", "--only", "speed", "--only", "auto")
    assert result.exit_code == 0, result.stderr
    (cells, path), *_ = seen
    assert {cell.experiment for cell in cells} == {"speed", "auto"}
    assert str(path) == "specx-bench.json"
    for verdict in claims([speed()]):
        assert verdict.wanted in result.stdout
    assert "holds" in result.stdout
    assert "failed: RuntimeError: memory" in result.stdout
    assert "grafted pairs are synthetic" in result.stdout
    specx("--grid", "--out", "other.json")
    cells, path = seen[1]
    assert ([replace(cell, models="") for cell in cells], str(path)) == (cpu_grid(), "other.json")
    assert all(bool(cell.models) == (cell.pair == "embedded") for cell in cells)


def test_what_cannot_run_is_said(monkeypatch):
    monkeypatch.setattr("hf_specx.cli.loading.load_bench_pair", lambda name, dtype, load: tiny_pair(name, dtype))
    result = specx("grafted-30M", *QUICK, "--batch", "2", "--contender", "plain", "--contender", "stock-5")
    assert result.exit_code == 0, result.stderr
    assert "stock-5 did not run: ValueError: assisted generate is only supported" in result.stdout
    assert "grafted pairs are synthetic" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "batches=[0]"),
        (["--batch", "2", "--batch", "2"], "each once"),
        (["--repeats", "0"], "repeats=0"),
        (["--new-tokens", "0"], "leave no round to time"),
        (["--prompt-tokens", "0"], "leave no round to time"),
        (["--new-tokens", "1"], "leave no round to time"),
        (["--temperature", "-1"], "--temperature -1.0 is not above 0"),
        (["--top-p", "0"], "--top-p 0.0 is not in (0, 1]"),
        (["--dtype", "int8"], "--dtype int8 is unknown"),
        (["--contender", "fast"], "contender 'fast' is unknown"),
        (["grafted-3B"], "'grafted-3B' is unknown; choose one of grafted-30M"),
        (["grafted-30M", "--draft", "suffix"], "has its own models, made where an accelerator is, and random tokens"),
        (["grafted-30M", "--device", "cpu", "--file", "FILE"], "leave --device, --file out"),
        (["--chat"], "--chat is for prompts of --file; give it, or leave --chat out"),
        (["no-such-pair"], "no-such-pair"),
        (["--grid", "--full"], "--grid and --full are two grids"),
        (["--grid", "embedded", "--seed", "0"], "leave --seed, PAIR out"),
        (["--only", "speed", "--batch", "2"], "--grid has its own pairs and sizes; leave --batch out"),
        (["--grid", "--only", "quick"], "--only quick is unknown; choose among speed"),
        (["--full"], "there is no GPU here; use --grid"),
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


def test_figures_that_cannot_be_drawn_are_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr("hf_specx.bench.checks.find_spec", lambda name: None)
    monkeypatch.setattr("hf_specx.bench.grid.run_grid", None)
    result = specx("--plots", str(tmp_path))
    assert result.exit_code == 2
    assert "figures need matplotlib" in result.stderr


def test_the_large_grid_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "there is no GPU here; use --grid" in specx("--full").stderr
