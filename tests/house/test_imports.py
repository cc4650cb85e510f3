"""The house: rooms import rooms above them, and what is published needs nothing but torch and transformers."""

import ast
import re
import sys
from pathlib import Path

import pytest

from hf_specx.hub.flatten import (
    ANY_DRAFT,
    HEAD_DRAFT,
    NO_HEAD_DRAFT,
    ONLY_INSTALLED,
    PACKAGE,
    imported,
    is_published,
    published_code,
    published_modules,
)
from hf_specx.hub.publish_code import REQUIREMENTS


ROOMS = "common sampling models drafting drafting/heads engine hub pairs bench training metrics __init__ cli __main__"
ROOMS = ROOMS.split()
CORE = ROOMS[: ROOMS.index("engine") + 1]
FILES = sorted(PACKAGE.rglob("*.py"))
SHOWN = [path.relative_to(PACKAGE).as_posix() for path in FILES]


def room_of(path: Path) -> str:
    return room_named(*path.relative_to(PACKAGE).with_suffix("").parts)


def room_named(*parts: str) -> str:
    """The room of a module: its first folder, or the first two, where that is a room within a room."""
    return next(room for room in ("/".join(parts[:2]), parts[0]) if room in ROOMS)


def imports(path: Path) -> tuple[set[str], set[str]]:
    """(rooms, modules from elsewhere) that a file imports, anywhere in it."""
    rooms, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            rooms.add(room_of(path) if path.parent != PACKAGE else node.module)
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "hf_specx":
            rooms.add(room_named(*[*node.module.split("."), "__init__"][1:]))
        elif isinstance(node, ast.ImportFrom):
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
    return rooms, outside


@pytest.mark.parametrize("path", FILES, ids=SHOWN)
def test_rooms_import_rooms_above_them(path: Path):
    here = ROOMS.index(room_of(path))
    assert not [room for room in imports(path)[0] if ROOMS.index(room) > here]


@pytest.mark.parametrize("path", sorted((PACKAGE / "metrics").glob("*/*.py")), ids=lambda path: path.stem)
def test_modules_for_evaluate_stand_alone(path: Path):
    """Each is published by itself."""
    assert not imports(path)[0]


def test_what_is_published_is_the_core():
    """All rooms of a call, and what it reads of a pair's files, without queues and processors that users make.

    They need nothing but torch and transformers, which brings huggingface_hub.
    """
    reached = {module.path for module in published_modules()}
    of_calls = {path for path in FILES if room_of(path) in CORE and path.stem != "__init__"}
    assert of_calls - reached == {module.path for module in ONLY_INSTALLED}
    assert set(published_code()) == {*(room.replace("/", "_") for room in CORE), "hub", "generate"}
    for path in reached:
        assert imports(path)[1] <= {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names


@pytest.mark.parametrize("draft", [ANY_DRAFT, HEAD_DRAFT, NO_HEAD_DRAFT])
def test_published_rooms_keep_every_line(draft: str):
    """And what they lack is not imported: a stand-in has its name."""
    code, modules = published_code(draft), published_modules(draft)
    assert all(is_published(module, draft) for module in modules)
    for module in modules:
        source = module.path.read_text()
        lines = source.splitlines()
        for node in ast.parse(source).body if module.name != "pair_source" else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert "\n".join(lines[node.lineno - 1 : node.end_lineno]) in code[module.published_name]
    for text in code.values():
        assert not re.search("^(from|import).*hf_specx[.]", text, re.MULTILINE)
        for room in re.findall(r"^from [.](\w+) import", text, re.MULTILINE):
            assert room in {*code, "pair_source"}


def test_files_of_a_published_room_give_no_name_two_meanings():
    """They become sections of one file, in which the later one would win."""
    meanings: dict[tuple[str, str], set[str]] = {}
    for module in published_modules():
        for node in ast.parse(module.path.read_text()).body:
            found, given = imported(node, module.room), dict[str, str]()
            if isinstance(node, ast.Import | ast.ImportFrom) and (
                not found or found.published_name != module.published_name
            ):
                origin = found.published_name if found else getattr(node, "module", "")
                given = {alias.asname or alias.name: f"{origin} {alias.name}" for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                given = {node.name: module.path_in_clone}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                names = [x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
                given = dict.fromkeys(names, module.path_in_clone)
            for name, meaning in given.items():
                meanings.setdefault((module.published_name, name), set()).add(meaning)
    assert {name: said for name, said in meanings.items() if len(said) > 1} == {}


def test_needs_are_those_of_the_project():
    listed = re.findall(r'"(torch|transformers)([<>=][^"]*)"', (PACKAGE.parent / "pyproject.toml").read_text())
    assert {f"{name}{bound}" for name, bounds in listed for bound in bounds.split(",")} == set(REQUIREMENTS)
