"""The code that is published with a pair: what `generate.py` needs of each room, as one file.

transformers' loader knows no sub-packages: from `custom_generate/` it fetches the files that `generate.py` imports by
`from .name import thing`, and what these import. So all files of a room become sections of one file, unchanged except
for their imports.
"""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import NamedTuple


PACKAGE = Path(__file__).parents[1]
ENTRY = "generate"  # the module that transformers loads, and with it all that it imports
SOURCE = "pair_source"  # each pair has another
ALONE = (ENTRY, SOURCE)  # stay files of their own


class Module(NamedTuple):
    """A file in a room of this package, whose name is its path: "drafting", or "drafting/heads" for one inside it."""

    room: str
    name: str

    @property
    def path(self) -> Path:
        """Its path on this machine."""
        return PACKAGE / self.room / f"{self.name}.py"

    @property
    def shown(self) -> str:
        """Its path in a clone of this project."""
        return self.path.relative_to(PACKAGE.parent).as_posix()

    @property
    def published(self) -> str:
        """The published module that it is part of."""
        return self.name if self.name in ALONE else self.room.replace("/", "_")


def published_code() -> dict[str, str]:
    """The text of each published module by name, without `SOURCE`."""
    rooms: dict[str, list[Module]] = {}
    for module in core_modules():
        if module.name != SOURCE:
            rooms.setdefault(module.published, []).append(module)
    return {room: _merged(room, modules) for room, modules in rooms.items()}


def core_modules() -> list[Module]:
    """The entry and all files that it needs, each after those that it imports."""
    needs: dict[Module, list[Module]] = {}
    waiting = [Module("pairs", ENTRY)]
    while waiting:
        module = waiting.pop()
        if module not in needs:
            nodes = ast.walk(ast.parse(module.path.read_text(encoding="utf-8")))
            needs[module] = sorted(found for node in nodes if (found := imported(node, module.room)) is not None)
            waiting += needs[module]
    return list(TopologicalSorter({module: needs[module] for module in sorted(needs)}).static_order())


def imported(node: ast.AST, room: str) -> Module | None:
    """The file of this package that a statement in a room imports from; None for any other statement."""
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return None
    if node.level:
        return Module(room, node.module)
    package, *names = node.module.split(".")
    return Module("/".join(names[:-1]), names[-1]) if package == PACKAGE.name and len(names) in (2, 3) else None


def _merged(room: str, modules: list[Module]) -> str:
    """The text of a room's file; a ValueError if two of its files define the same name."""
    meanings: dict[str, str] = {}
    sections = []
    for module in modules:
        source = module.path.read_text(encoding="utf-8")
        lines, (described, *body) = source.splitlines(), ast.parse(source).body
        for node in body:
            for name, meaning in _meanings(node, module):
                if meanings.setdefault(name, meaning) != meaning:
                    raise ValueError(f"{name} has two meanings in {room}: {meanings[name]}, and {meaning}.")
            for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            if for_types or isinstance(node, ast.Import | ast.ImportFrom):  # annotations in quotes need no import
                lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
        comment = [f"# {module.shown}:", *lines[: described.end_lineno]]
        sections.append("\n".join(comment) + "\n\n\n" + "\n".join(lines[described.end_lineno :]).strip("\n") + "\n")
    version, shown = import_module(PACKAGE.name).__version__, ", ".join(module.shown for module in modules)
    imports = sorted({meaning for meaning in meanings.values() if meaning.startswith(("import ", "from "))})
    return f'"""From hf_specx {version}: {shown}."""\n\n' + "\n".join(imports) + "\n\n\n" + "\n\n".join(sections)


def _meanings(node: ast.stmt, module: Module) -> Iterator[tuple[str, str]]:
    """The names that a top-level statement defines, each with its import or with the file that defines it."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        found = imported(node, module.room)
        origin = f"from {f'.{found.published}' if found else node.module} " if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            inside = found and found.published == module.published
            meaning = found.shown if found and inside else f"{origin}import {ast.unparse(alias)}"
            yield alias.asname or alias.name, meaning
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name, module.shown
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from ((x.id, module.shown) for x in ast.walk(target) if isinstance(x, ast.Name))
