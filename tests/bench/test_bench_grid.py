"""Grids: what they hold, files of results that are taken up again, and provenance."""

import json

import pytest
import torch
from bench_cases import small, tiny_pair

from hf_specx.bench import grid as bench_grid
from hf_specx.bench.cells import EXPERIMENTS, Cell, cpu_grid, gpu_grid
from hf_specx.bench.grid import results, run_grid
from hf_specx.bench.recipes import PREFIX, RECIPES
from hf_specx.bench.store import StepCounter, Store
from hf_specx.bench.ways import way
from hf_specx.hub.flatten import Module


CELLS = [small("plain", "block-2", repeats=1), small("plain", "block-2", repeats=1, batch=2)]


class Loads:
    """Makes the tiny pair, and counts."""

    def __init__(self):
        self.names = []

    def __call__(self, name, dtype):
        self.names.append((name, dtype))
        return tiny_pair(name)


def run(cells, path, load=None, **options):
    load = load or Loads()
    return run_grid(cells, bench_grid.results(path), "specx bench", load, **options), load


@pytest.mark.parametrize("grid", [cpu_grid, gpu_grid])
def test_grids_ask_for_what_there_is(grid):
    cells = grid()
    left_out = {"quick"} if grid is cpu_grid else {"quick", "suffix", "exit"}
    assert {cell.experiment for cell in cells} == EXPERIMENTS.keys() - left_out
    assert len(set(cells)) == len(cells)
    for cell in cells:
        assert cell.pair == "embedded" or cell.pair.removeprefix(PREFIX) in RECIPES
        assert all(way(name) for name in cell.contenders)


def test_the_grid_on_a_cpu_has_the_sizes_that_the_claims_are_about():
    sizes = {(c.pair, c.batch) for c in cpu_grid() if c.experiment == "speed"}
    assert {("grafted-30M", b) for b in (1, 4, 8, 16)} | {("grafted-163M", b) for b in (1, 4, 8)} == sizes
    for experiment in ("compiled", "verifiers"):
        assert {c.pair for c in cpu_grid() if c.experiment == experiment} == {"grafted-30M", "grafted-163M"}
    assert {(c.batch, c.new_tokens) for c in cpu_grid() if c.experiment == "unrelated"} == {(1, 512), (8, 512)}
    assert len({c.pair for c in cpu_grid() if c.experiment == "auto"}) == 3
    assert {c.batch for c in gpu_grid() if c.experiment == "speed"} == {1, 2, 4, 8, 16, 32}


def test_cells_that_are_in_the_file_are_skipped(tmp_path):
    path, steps = tmp_path / "results.json", []
    first, load = run(CELLS[:1], path)
    assert load.names == [("tiny", "float32")]
    both, load = run(CELLS, path, advance=lambda: steps.append(1))
    assert both[0] == json.loads(json.dumps(first[0]))
    assert load.names == [("tiny", "float32")]
    assert len(steps) == sum(cell.turns for cell in CELLS)
    again, load = run(CELLS, path)
    assert load.names == []
    assert json.loads(path.read_text())["cells"] == json.loads(json.dumps(again))


@pytest.mark.parametrize("change", [{"seed": 1}, {"repeats": 2}, {"new_tokens": 9}, {"dtype": "bfloat16"}])
def test_other_settings_are_measured(tmp_path, change):
    path = tmp_path / "results.json"
    run(CELLS[:1], path)
    _, load = run([Cell(**{**CELLS[0].__dict__, **change})], path)
    assert len(load.names) == 1
    assert len(results(path).cells) == 2


@pytest.mark.parametrize("name", ["torch", "device", "threads", "code"])
def test_another_machine_or_other_code_is_measured_in_place_of_it(tmp_path, monkeypatch, name):
    path = tmp_path / "results.json"
    run(CELLS[:1], path)
    made = results(None).made | {name: "another"}
    monkeypatch.setattr(bench_grid, "results", lambda path: Store(path, "schema", made))
    _, load = run(CELLS[:1], path)
    assert len(load.names) == 1
    assert len(results(path).cells) == 1


def test_each_cell_is_in_the_file_before_the_next_begins(tmp_path, monkeypatch):
    path, take_turns = tmp_path / "results.json", bench_grid.take_turns

    def interrupted(cell, pair, advance):
        if cell.batch == 2:
            raise KeyboardInterrupt
        return take_turns(cell, pair, advance)

    monkeypatch.setattr(bench_grid, "take_turns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(CELLS, path)
    assert [cell["cell"]["batch"] for cell in results(path).cells] == [1]
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


def test_a_cell_that_fails_does_not_end_the_run(tmp_path):
    def load(name, dtype):
        if name == "large":
            raise torch.OutOfMemoryError("too large")
        return tiny_pair(name)

    cells = [small("plain", pair="large"), *CELLS]
    found, _ = run(cells, tmp_path / "results.json", load)
    assert found[0]["failed"] == "OutOfMemoryError: too large"
    assert len(results(tmp_path / "results.json").cells) == 2  # it is tried again next time


def test_provenance_is_complete():
    (found,), _ = run(CELLS[:1], None)
    made = found["provenance"]
    versions = {"hf_specx", "torch", "transformers", "python"}
    assert made.keys() == versions | {
        "device", "threads", "dtype", "code", "seed", "command", "date", "seconds"
    }  # fmt: skip
    assert (made["command"], made["dtype"], made["seed"]) == ("specx bench", "float32", 0)
    assert all(made[name] is not None for name in made)
    assert found["pair"] == {"synthetic": True}


def test_the_digest_is_of_the_core_and_of_what_measures(monkeypatch, tmp_path):
    before = bench_grid.measuring_code()
    assert before == bench_grid.measuring_code()
    changed = Module("decode", "decode")
    monkeypatch.setattr(Module, "path", property(lambda module: tmp_path / f"{module.name}.py"))
    monkeypatch.setattr(bench_grid, "core_modules", lambda: [changed])
    digests = {before}
    for text in "12":
        changed.path.write_text(text)
        digests.add(bench_grid.measuring_code())
    assert len(digests) == 3


def test_bars_reach_their_end():
    steps = []
    counted = StepCounter(3, lambda: steps.append(1))
    for _ in range(5):
        counted()
    assert len(steps) == 3
    other = StepCounter(2, lambda: steps.append(1))
    other(), other.finish()
    assert len(steps) == 5
