"""Pairs on the Hub: what an upload replaces and leaves alone, and that a process that has just the id runs them.

There is no network: what is uploaded lies where the Hub's client keeps what it has downloaded.
"""

from pathlib import Path
from typing import Any

import pytest
from head_files import random_head, write
from hub_on_disk import HubOnDisk
from hub_user import said, users
from tiny import VOCAB_SIZE, near, tiny
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_specx import DraftTargetPair
from hf_specx.hub.pair_config import ModelSource, PairConfig
from hf_specx.hub.publish import save


NAME = "org/pair"
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors")


def a_pair(draft: int = 1) -> DraftTargetPair:
    """One of several pairs, which differ by their draft."""
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w1")), pad_token="w0")
    config = PairConfig(ModelSource(), ModelSource(subfolder="draft"), num_draft_tokens=3)
    return DraftTargetPair(tiny(), near(tiny(), 0.1, seed=draft), tokenizer, config)


def expected(draft: int) -> list[list[int]]:
    pair = a_pair(draft)
    return said(pair.generate, pair.target)


@pytest.fixture
def hub(tmp_path: Path):
    hub = HubOnDisk(tmp_path / "home")
    with hub.published_to() as hub.api:
        yield hub


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> tuple[HubOnDisk, dict[str, Any]]:
    """A Hub with several pairs, and commits by name."""
    hub, commits = HubOnDisk(tmp_path_factory.mktemp("shelf")), {}
    with hub.published_to():
        commits["first"] = a_pair(1).push_to_hub(NAME)
        a_pair(2).push_to_hub(NAME)
        a_pair(3).push_to_hub(NAME, revision="new/draft")
        a_pair(1).push_to_hub("owner/pair")
        pair = a_pair(1)
        for name, model in {"org/target": pair.target, "org/draft": pair.draft}.items():
            folder = tmp_path_factory.mktemp("model")
            for part in (model, pair.tokenizer):
                part.save_pretrained(folder)
            files = {path.name: path.read_bytes() for path in folder.iterdir()}
            model.name_or_path, model.config._commit_hash = name, hub.put(name, files)
        pair.cache_dir = hub.cache
        pair.push_to_hub("org/named", target="reference", draft="reference")
        hub.put("org/draft", {"model.safetensors": b"no weights at all"})
    return hub, commits


def test_a_process_that_has_just_the_id(shelf: tuple[HubOnDisk, dict[str, Any]]):
    """With nothing of ours installed, and then with the package; not a line of code runs before it is trusted.

    Each revision has the draft that it was pushed with, and a reference the commit that it had.
    """
    hub, commits = shelf
    assert len({str(expected(draft)) for draft in (1, 2, 3)}) == 3
    then = {"name": NAME, "revision": commits["first"]}
    jobs = [
        ("by_package", {"name": NAME}, "ModuleNotFoundError"),
        ("by_string", {"name": NAME, "trust_remote_code": None}, "trust_remote_code=True"),
        ("modules_of_repositories", {}, []),
        ("by_string", {"name": NAME}, 2),
        ("by_string", then, 1),
        ("by_string", {"name": "owner/pair"}, 1),  # whose last name is the same
        ("by_string", {"name": "org/named", "target": "org/target"}, 1),
        ("by_override", {"name": NAME}, 2),
        ("install", {}, None),
        ("by_package", {"name": NAME}, 2),
        ("by_package", then, 1),
        ("by_package", {"name": NAME, "revision": "new/draft"}, 3),
        ("by_package", {"name": "org/named"}, 1),
        ("by_function", then, 1),
    ]
    for (form, arguments, wanted), said_there in zip(jobs, users(hub.home, [job[:2] for job in jobs]), strict=True):
        if isinstance(wanted, str):
            assert wanted in said_there, (form, arguments)
        else:
            assert said_there == (expected(wanted) if isinstance(wanted, int) else wanted), (form, arguments)


USERS = {"LICENSE": b"ours", "docs/notes.json": b"{}", "images/a.png": b"", "docs/model.safetensors": b""}
LEFT = {"pytorch_model.bin": b"", "draft/pytorch_model.bin": b"", "model-00001-of-00002.safetensors": b""}


@pytest.mark.parametrize(("target", "branch"), [("reference", None), ("inside", "next")])
def test_a_push_leaves_nothing_of_an_earlier_pair(hub: HubOnDisk, target: str, branch: str | None):
    """And what is not of a pair stays."""
    pair = a_pair()
    pair.tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    pair.push_to_hub(NAME)
    assert {"chat_template.jinja", "additional_chat_templates/tools.jinja"} <= hub.files(NAME).keys()
    hub.put(NAME, hub.files(NAME) | USERS | LEFT | {"custom_generate/old.py": b""})
    pair.tokenizer.chat_template = None
    if target == "reference":
        commit = hub.put("org/target", {name: hub.files(NAME)[name] for name in MODEL_FILES})
        pair.tokenizer, pair.sources["target"], pair.cache_dir = None, ModelSource("org/target", commit), hub.cache
    pair.push_to_hub(NAME, target=target, revision=branch)
    remaining = {".gitattributes", "README.md", "specx_config.json", *(f"draft/{name}" for name in MODEL_FILES)}
    if target == "inside":
        remaining |= {*MODEL_FILES, "tokenizer.json", "tokenizer_config.json"}
    files, main = hub.files(NAME, branch or "main"), hub.files(NAME)
    assert (files == main) == (branch is None)
    assert {path for path in files if not path.startswith("custom_generate/")} == remaining | USERS.keys()
    assert "custom_generate/old.py" not in files
    assert {path: files[path] for path in USERS} == USERS


@pytest.mark.parametrize(
    ("file", "branch"), [("pytorch_model.bin", None), ("train.py", "next"), ("custom_generate/generate.py", "theirs")]
)
def test_a_repository_of_something_else_is_left_alone(hub: HubOnDisk, file: str, branch: str | None):
    """Whichever branch is named, one that is there or one that is to be made; what has only a card is taken."""
    files = {file: b"mine", "README.md": b"mine"}
    for name in ("main", "theirs"):
        hub.put(NAME, files, name)
    with pytest.raises(ValueError, match=f"no pair.*'{file}'"):
        a_pair().push_to_hub(NAME, revision=branch)
    assert hub.files(NAME) == hub.files(NAME, "theirs") == files
    assert not hub.branch(NAME, "next").exists()
    hub.put(NAME, {"README.md": b"mine"})
    with pytest.warns(UserWarning, match="README.md of org/pair"):
        a_pair().push_to_hub(NAME, token="hf_owner")
    assert "specx_config.json" in hub.files(NAME)
    assert hub.files(NAME)["README.md"] == b"mine"
    assert hub.api.call_args.kwargs == {"token": "hf_owner"}


@pytest.mark.parametrize("branch", [None, "next"])
def test_the_card_of_a_pair_is_written_anew(hub: HubOnDisk, branch: str | None):
    """On each branch that of its pair, and no warning."""
    a_pair().push_to_hub(NAME)
    other = a_pair(2)
    other.config.notes = "Another one."
    other.push_to_hub(NAME, revision=branch)
    assert ("Another one." in hub.files(NAME)["README.md"].decode()) == (branch is None)
    assert "Another one." in hub.files(NAME, branch)["README.md"].decode()


@pytest.mark.parametrize("private", [True, False])
def test_a_repository_is_as_private_as_was_said(hub: HubOnDisk, private: bool):
    """One that is there is not changed, and nothing is uploaded where more people can read it, or fewer."""
    a_pair().push_to_hub(NAME, private=private)
    before = hub.files(NAME)
    assert (NAME in hub.private) == private
    a_pair(2).push_to_hub(NAME)
    a_pair(1).push_to_hub(NAME, private=private)
    assert hub.files(NAME).keys() == before.keys()
    before, shown = hub.files(NAME), "private" if private else "public"
    with pytest.raises(ValueError, match=f"is {shown}.*private={not private}"):
        a_pair(3).push_to_hub(NAME, private=not private)
    assert hub.files(NAME) == before


def test_what_is_published_names_no_folder_and_has_its_licence(hub: HubOnDisk, tmp_path: Path):
    """Wherever the pair was loaded from, and wherever it is written."""
    a_pair().save_pretrained(tmp_path / "pair")
    pair = DraftTargetPair.from_pretrained(tmp_path / "pair")
    pair.push_to_hub(NAME)
    save(pair, tmp_path / "written", with_code=True)
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in (tmp_path / "written").rglob("*.*")}
    for content in {**files, **hub.files(NAME)}.values():
        assert str(tmp_path).encode() not in content
    licence = (Path(__file__).parents[2] / "LICENSE").read_bytes()
    assert b"Apache License" in licence
    assert hub.files(NAME)["custom_generate/LICENSE"] == licence
    assert (tmp_path / "written" / "custom_generate" / "LICENSE").read_bytes() == licence


def test_a_pair_with_a_model_has_no_code_of_heads(tmp_path: Path):
    """Its calls do not miss it; whoever gives them a head, or asks for `use_mtp`, is told what to install."""
    pair, folder = a_pair(), tmp_path / "pair"
    save(pair, folder, with_code=True)
    assert "class DraftHead" not in (folder / "custom_generate" / "drafting_heads.py").read_text()
    loaded = {"custom_generate": str(folder), "trust_remote_code": True}
    assert said(pair.target.generate, pair.target, **loaded) == expected(1)
    head = write(random_head(vocab=VOCAB_SIZE, layer_ids=(0, 1, 2)), tmp_path / "head")
    for options in ({"assistant_model": str(head)}, {"use_mtp": True}):
        with pytest.raises(ImportError, match="pip install hf_specx"):
            said(pair.target.generate, pair.target, **loaded, **options)
