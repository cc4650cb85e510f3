"""The house: imports go one way, and what is published needs nothing but torch and transformers."""

import ast
import sys
from pathlib import Path

import pytest

import hf_specx
from hf_specx.hub import core_modules


PACKAGE = Path(hf_specx.__file__).parent
FLOORS = (
    "threads refusals wrappers devices pair_source lookahead",
    "verify sequences cache costs abilities attention past tables inputs warping checks_files static prepacked",
    "seen checks_weights drafting",
    "noise processors stopping report decoders states",
    "rules prompts streaming outputs ragged hosted whole",
    "packed padded lockstep regions",
    "compiled",
    "layouts",
    "candidates guidance",
    "checks_options checks_models checks_calls checks_inputs checks_rows peers settle",
    "checks_entry checks_pairs",
    "checks pair_config",
    "plan decode facts",
    "prefill fetch",
    "strategy loading",
    "resolve",
    "generate",
    "checks_saving checks_tune checks_bench markdown known_pairs placement compatibility bench bare shares",
    "trace check_equality metrics",
    "card_usage saving pair_loading grafted checks_check check_draft",
    "cards export check_settings",
    "hub check_power check_result",
    "pairs check_store",
    "study console contenders bench_cells bench_pairs check_texts",
    "bench_points bench_plots check_plots check_cells",
    "bench_turns",
    "bench_probes check_speed check_page",
    "bench_grid tune",
    "cli_options checking",
    "cli_generate cli_tune cli_bench cli_check",
    "cli_pairs",
    "cli",
)
RANK = {name: rank for rank, floor in enumerate(FLOORS) for name in floor.split()}
CORE = {name for name, rank in RANK.items() if rank <= RANK["generate"]}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """(siblings, top-level modules from elsewhere) that a file imports, anywhere in it."""
    siblings, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            siblings.add(node.module or "")
        elif isinstance(node, ast.ImportFrom):
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
    return siblings, outside


MODULES = sorted(p.stem for p in PACKAGE.glob("*.py") if p.stem != "__init__")
METRICS = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.glob("metrics/**/*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down(name: str):
    siblings, outside = imports(PACKAGE / f"{name}.py")
    assert name in RANK, f"say on which floor {name} lives"
    for sibling in siblings:
        assert RANK[sibling] < RANK[name], f"{name} imports {sibling}"
    if name in CORE:
        assert outside <= {"torch", "transformers"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", METRICS)
def test_metrics_stand_alone(path: str):
    """Each is published by itself; only what says where they are knows of the package."""
    siblings, outside = imports(PACKAGE / path)
    assert siblings == set()
    assert ("hf_specx" in outside) == (path == "metrics/__init__.py")
    assert not outside & {"evaluate", "datasets"} or path.count("/") == 2


@pytest.mark.parametrize("path", [*(f"{name}.py" for name in MODULES), *METRICS])
def test_files_and_functions_stay_small(path: str):
    source = (PACKAGE / path).read_text()
    assert source.count("\n") <= 300
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 50, node.name


def test_what_is_published_is_the_core():
    """Everything up to the entry, since the entry needs all of it."""
    assert set(core_modules()) == CORE
