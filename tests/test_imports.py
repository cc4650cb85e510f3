"""The house: imports go one way, and what is published needs nothing but torch and transformers."""

import ast
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tiny import near, prompts, tiny

import hf_specx


PACKAGE = Path(hf_specx.__file__).parent
FLOORS = (
    "threads refusals wrappers",
    "verify sequences cache lookahead drafting abilities attention past tables inputs",
    "seen",
    "noise processors stopping report decoders states",
    "rules prompts streaming outputs ragged hosted whole",
    "packed padded lockstep",
    "layouts",
    "candidates guidance",
    "checks_options checks_models checks_calls checks_inputs checks_rows peers settle",
    "checks_entry",
    "checks",
    "plan decode",
    "prefill",
    "strategy",
    "generate",
    "pairs bench",
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


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down(name: str):
    siblings, outside = imports(PACKAGE / f"{name}.py")
    assert name in RANK, f"say on which floor {name} lives"
    for sibling in siblings:
        assert RANK[sibling] < RANK[name], f"{name} imports {sibling}"
    if name in CORE:
        assert outside <= {"torch", "transformers"} | sys.stdlib_module_names


@pytest.mark.parametrize("name", MODULES)
def test_files_and_functions_stay_small(name: str):
    source = (PACKAGE / f"{name}.py").read_text()
    assert source.count("\n") <= 300
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 50, node.name


def test_the_core_runs_as_a_published_folder(tmp_path: Path):
    """Copied flat into custom_generate/, loaded by transformers' own loader, it gives the tokens of the package."""
    folder = tmp_path / "custom_generate"
    folder.mkdir()
    for name in CORE:
        shutil.copy(PACKAGE / f"{name}.py", folder)
    target = tiny()
    draft, inputs = near(target, 0.05), prompts(4)
    settings = {"do_sample": True, "max_new_tokens": 20, "num_draft_tokens": 3, "assistant_model": draft}
    torch.manual_seed(0)
    expected = hf_specx.generate(**inputs, **settings, model=target)
    torch.manual_seed(0)
    output = target.generate(**inputs, **settings, custom_generate=str(tmp_path), trust_remote_code=True)
    assert torch.equal(output, expected)
