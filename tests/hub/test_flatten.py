"""Publishing from a source tree that nobody has installed."""

import importlib.metadata as metadata
from importlib import import_module
from pathlib import Path

import pytest

from hf_specx.hub import flatten
from hf_specx.hub.flatten import published_code
from hf_specx.hub.publish import NEEDS, write_code


def test_code_is_written_where_the_package_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing is asked of it as of an installed one."""
    found = metadata.distribution

    def hidden(name: str) -> metadata.Distribution:
        if name.replace("_", "-").lower() == "hf-specx":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "distribution", hidden)
    write_code(tmp_path, "org/pair")
    written = {path.name: path.read_text() for path in (tmp_path / "custom_generate").iterdir()}
    assert written.pop("requirements.txt").splitlines() == list(NEEDS)
    assert "PAIR = 'org/pair'" in written.pop("pair_source.py")
    assert written == {f"{room}.py": text for room, text in published_code().items()}
    assert all(text.startswith('"""From hf_specx ') for text in written.values())


FILES = {
    "pairs/generate.py": "from hf_specx.drafting.heads.chain import Chain\n\n\ngenerate = Chain().run\n",
    "drafting/drafter.py": "class Drafter:\n    def run(self):\n        return self.name\n",
    "drafting/heads/names.py": "CHAIN = 'chain'\n",
    "drafting/heads/chain.py": """from typing import TYPE_CHECKING

from hf_specx.drafting.drafter import Drafter

from .names import CHAIN


if TYPE_CHECKING:
    from .names import CHAIN as NAME


class Chain(Drafter):
    name = CHAIN
""",
}


def test_a_room_within_a_room_is_published_as_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package, out = tmp_path / "hf_specx", tmp_path / "of_nested"
    for name, text in FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(f'"""It is described."""\n\n{text}')
    monkeypatch.setattr(flatten, "PACKAGE", package)
    code = published_code()
    assert set(code) == {"generate", "drafting", "drafting_heads"}
    out.mkdir()
    for name, text in code.items():
        (out / f"{name}.py").write_text(text)
        assert "from .names" not in text  # for types alone: transformers' loader would look for such a file
    monkeypatch.syspath_prepend(tmp_path)
    assert import_module("of_nested.generate").generate() == "chain"
