"""One meaning for each name: a public name is defined at the top level of one file of the package."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from hf_specx.hub.flatten import PACKAGE


# commands are called what they do, like the functions that they call
COMMANDS = {"check", "distill", "generate", "publish", "tune", "vllm"}


def public_names(path: Path) -> Iterator[str]:
    """What a file defines at its top level, without what it imports."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def test_a_name_is_defined_once():
    files = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        shown = path.relative_to(PACKAGE)
        alone = shown.parts[0] == "metrics" and len(shown.parts) > 2  # each is published by itself
        if alone or shown.stem == "__init__":
            continue
        for name in set(public_names(path)):  # overloads of a function are one
            if not (shown.parts[0] == "cli" and name in COMMANDS):
                files[name].append(shown.as_posix())
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
