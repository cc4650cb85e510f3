"""The code that is published with a pair: the files that `generate.py` needs, those of each room merged into one.

transformers' loader knows no sub-packages: from `custom_generate/` it fetches the files that `generate.py` imports by
`from .name import thing`, and what these import. So all files of a room become sections of one file, unchanged except
for their imports.

Files that the calls of a published pair do not reach are left out. What others import from them is a stand-in, which
raises an ImportError that says `pip install hf_specx`.
"""

import ast
import functools
import hashlib
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from hf_specx.common.drafts import PAIR_CONFIG_NAME
from hf_specx.drafting.heads.config import ARCHITECTURES as HEAD_ARCHITECTURES

from .pair_config import PairConfig


PACKAGE = Path(__file__).parents[1]
ENTRY_MODULE = "generate"  # the module that transformers loads, and with it all that it imports
PAIR_SOURCE = "pair_source"
NOT_MERGED = (ENTRY_MODULE, PAIR_SOURCE)  # which stay files
STAND_IN = "not_published"  # the file, and the function in it, that makes a stand-in
ANY_DRAFT, HEAD_DRAFT, NO_HEAD_DRAFT = "any", "head", "no head"  # which drafts the published code is for
HEADS_ROOM = "drafting/heads"
MODEL_LOADERS = ("draft_names", "detect_head")  # files of that room by which models are loaded too
DRAFTS_IN_TARGETS = ("mtp", "gemma4")  # files of drafts that are part of a target, or read its keys
GEMMA4 = "gemma4"  # its small drafts have the type of its text models


class Module(NamedTuple):
    """A file in a room of this package, whose name is its path: "drafting", or "drafting/heads" for one inside it."""

    room: str
    name: str

    @property
    def path(self) -> Path:
        return PACKAGE / self.room / f"{self.name}.py"

    @property
    def path_in_clone(self) -> str:
        """Its path in a clone of this project."""
        return self.path.relative_to(PACKAGE.parent).as_posix()

    @property
    def published_name(self) -> str:
        """The published module that it is part of."""
        return self.name if self.name in NOT_MERGED else self.room.replace("/", "_")


QUEUE_MODULES = (  # of `generate_many`
    Module("engine", "queue"),
    Module("engine", "request_results"),
    Module("engine", "requests"),
    Module("sampling", "per_request"),
)
ONLY_INSTALLED = (  # what users import from the package, or a queue needs
    *QUEUE_MODULES,
    Module("common", "chats"),
    Module("sampling", "thinking"),
)


def kind_of_draft(folder: Path) -> str:
    """Which drafts the code of the pair in a folder is for; `ANY_DRAFT` if that is not known."""
    if not (folder / PAIR_CONFIG_NAME).is_file():
        return ANY_DRAFT
    config = PairConfig.from_file(folder / PAIR_CONFIG_NAME)
    model_type = config.draft.model_type
    if config.weightless_draft() is not None:
        return NO_HEAD_DRAFT
    if model_type is None or model_type.startswith(GEMMA4):
        return ANY_DRAFT
    return HEAD_DRAFT if model_type in HEAD_ARCHITECTURES else NO_HEAD_DRAFT


@functools.cache
def published_code(draft: str = ANY_DRAFT) -> dict[str, str]:
    """The text of each published module by name, without `PAIR_SOURCE`, which is written anew for each pair.

    `draft` is `HEAD_DRAFT` for pairs whose draft is a head, and `NO_HEAD_DRAFT` for others, where no head is needed.
    """
    rooms: dict[str, list[Module]] = {}
    for module in published_modules(draft):
        if module.name != PAIR_SOURCE:
            rooms.setdefault(module.published_name, []).append(module)
    return {room: _merged(modules, draft) for room, modules in rooms.items()}


@functools.cache
def code_version() -> str:
    """The version of the published code: of this package, and a digest that changes with every line.

    It is one for all kinds of drafts; what is left out for some follows from the lines of this file.
    """
    text = "".join(f"{name}\n{module}" for name, module in sorted(published_code().items()))
    text += Path(__file__).read_text(encoding="utf-8")
    return f"{import_module(PACKAGE.name).__version__}+{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def published_modules(draft: str = ANY_DRAFT) -> list[Module]:
    """The published files: `ENTRY_MODULE` and all that it needs, each file after those that it imports."""
    imports_of: dict[Module, list[Module]] = {}
    waiting = [Module("pairs", ENTRY_MODULE), Module("common", STAND_IN)]
    while waiting:
        module = waiting.pop()
        if module not in imports_of:
            nodes = ast.walk(ast.parse(module.path.read_text(encoding="utf-8")))
            imports = {imported(node, module.room) for node in nodes}
            imports_of[module] = sorted(
                source for source in imports if source is not None and is_published(source, draft)
            )
            waiting += imports_of[module]
    return list(TopologicalSorter({module: imports_of[module] for module in sorted(imports_of)}).static_order())


def is_published(module: Module, draft: str) -> bool:
    """Whether a file is part of the code for pairs with such a draft."""
    if module.room == HEADS_ROOM and draft == NO_HEAD_DRAFT:
        return module.name in MODEL_LOADERS
    if module.room == HEADS_ROOM and draft == HEAD_DRAFT:
        return module.name not in DRAFTS_IN_TARGETS
    return module not in ONLY_INSTALLED


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


def _merged(modules: list[Module], draft: str) -> str:
    """The text of a room's file: a section for each of its files, with what it imports from elsewhere."""
    version = import_module(PACKAGE.name).__version__
    paths = ", ".join(module.path_in_clone for module in modules)
    sections = [f'"""From hf_specx {version}, Apache-2.0 (see LICENSE): {paths}."""\n']
    for module in modules:
        source = module.path.read_text(encoding="utf-8")
        lines, body = source.splitlines(), ast.parse(source).body
        for node in reversed(body):  # from the last one on, so that the numbers of lines stay
            source_module = imported(node, module.room)
            for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            if source_module is not None or for_types:  # annotations in quotes need no import
                lines[node.lineno - 1 : node.end_lineno] = []
            if source_module is not None and not is_published(source_module, draft):
                lines[node.lineno - 1 : node.lineno - 1] = _stand_ins(node, module)
            elif source_module is not None and source_module.published_name != module.published_name:
                names = ast.unparse(node).partition(" import ")[2]
                lines.insert(node.lineno - 1, f"from .{source_module.published_name} import {names}")
        sections.append("\n".join([f"# {module.path_in_clone}:", *lines]) + "\n")
    return "\n\n".join(sections)


def _stand_ins(node: ast.AST, module: Module) -> list[str]:
    """Lines that make a stand-in for each name that a statement of a module imports from a file that is left out."""
    assert isinstance(node, ast.ImportFrom)
    lines = [f"{alias.name} = {STAND_IN}({alias.name!r})" for alias in node.names]
    if module.room != "common":
        lines.insert(0, f"from .common import {STAND_IN}")
    return lines
