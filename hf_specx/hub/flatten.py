"""The code that is published with a pair: what `generate.py` needs of each room, as one file.

transformers' loader knows no sub-packages: from `custom_generate/` it fetches the files that `generate.py` imports by
`from .name import thing`, and what these import. So all files of a room become sections of one file, unchanged except
for their imports.
"""

import ast
import functools
import hashlib
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import NamedTuple


PACKAGE = Path(__file__).parents[1]
ENTRY = "generate"  # the module that transformers loads, and with it all that it imports
SOURCE = "pair_source"
ALONE = (ENTRY, SOURCE)  # stay files of their own


class Module(NamedTuple):
    """A file in a room of this package, whose name is its path: "drafting", or "drafting/heads" for one inside it."""

    room: str
    name: str

    @property
    def path(self) -> Path:
        return PACKAGE / self.room / f"{self.name}.py"

    @property
    def shown(self) -> str:
        """Its path in a clone of this project."""
        return self.path.relative_to(PACKAGE.parent).as_posix()

    @property
    def published(self) -> str:
        """The published module that it is part of."""
        return self.name if self.name in ALONE else self.room.replace("/", "_")


@functools.cache
def published_code() -> dict[str, str]:
    """The text of each published module by name, without `SOURCE`, which each pair has of its own."""
    rooms: dict[str, list[Module]] = {}
    for module in core_modules():
        if module.name != SOURCE:
            rooms.setdefault(module.published, []).append(module)
    return {room: _merged(modules) for room, modules in rooms.items()}


@functools.cache
def code_version() -> str:
    """The version of the published code: of this package, and a digest, which changes with every line."""
    text = "".join(f"{name}\n{module}" for name, module in sorted(published_code().items()))
    return f"{import_module(PACKAGE.name).__version__}+{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def core_modules() -> list[Module]:
    """The entry and all files that it needs, each after those that it imports."""
    needs: dict[Module, list[Module]] = {}
    waiting = [Module("pairs", ENTRY)]
    while waiting:
        module = waiting.pop()
        if module not in needs:
            nodes = ast.walk(ast.parse(module.path.read_text(encoding="utf-8")))
            imports = [imported(node, module.room) for node in nodes]
            needs[module] = sorted(imported_module for imported_module in imports if imported_module is not None)
            waiting += needs[module]
    return list(TopologicalSorter({module: needs[module] for module in sorted(needs)}).static_order())


def imported(node: ast.AST, room: str) -> Module | None:
    """The file of this package that a statement in a room imports from; None for any other statement."""
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return None
    if node.level:
        return Module(room, node.module)
    package, *names = node.module.split(".")
    if package != PACKAGE.name or len(names) not in (2, 3):
        return None
    return Module("/".join(names[:-1]), names[-1])


def _merged(modules: list[Module]) -> str:
    """The text of a room's file: a section for each of its files, with what it imports from elsewhere."""
    version = import_module(PACKAGE.name).__version__
    paths = ", ".join(module.shown for module in modules)
    sections = [f'"""From hf_specx {version}, Apache-2.0 (see LICENSE): {paths}."""\n']
    for module in modules:
        source = module.path.read_text(encoding="utf-8")
        lines, body = source.splitlines(), ast.parse(source).body
        for node in reversed(body):  # from the last one on, so that the numbers of lines stay
            source_module = imported(node, module.room)
            for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            if source_module is not None or for_types:  # annotations in quotes need no import
                lines[node.lineno - 1 : node.end_lineno] = []
            if source_module is not None and source_module.published != module.published:
                names = ast.unparse(node).partition(" import ")[2]
                lines.insert(node.lineno - 1, f"from .{source_module.published} import {names}")
        sections.append("\n".join([f"# {module.shown}:", *lines]) + "\n")
    return "\n\n".join(sections)
