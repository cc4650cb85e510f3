"""Code without models, published for any two; and renewed in what carries it. There is no network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hub_on_disk import HubOnDisk
from hub_user import said, users
from other_tokens import draft_of, target_of, tokenizer_of
from tiny import near, prompts, tiny

from hf_specx import DraftTargetPair, generate
from hf_specx.hub.flatten import ANY_DRAFT, NO_HEAD_DRAFT, code_version, published_code
from hf_specx.hub.publish_code import publish_code, read_source, renew_code, write_code_repository


NAME, PAIR = "org/code", "org/pair"
KINDS = "byte-level", "unigram"
OUR_CARD = b"# Speculative sampling for any two models"
OPTIONS = {"num_draft_tokens": 2, "verification": "token", "layout": "padded"}
EARLIER = b'"""As an earlier version wrote it."""\n\nPAIR = None\nREVISION = None\n'


@pytest.fixture
def hub(tmp_path: Path):
    hub = HubOnDisk(tmp_path / "home")
    with hub.published_to():
        yield hub


def a_pair() -> DraftTargetPair:
    return DraftTargetPair(tiny(), near(tiny(), 0.1))


def test_any_two_models_by_string(hub: HubOnDisk, tmp_path: Path):
    """With nothing of ours installed: every option by keyword, and two models with other tokens."""
    publish_code(NAME)
    models = {"org/target": (tiny(),), "org/draft": (near(tiny(), 0.1),)}
    models |= {"org/words": (target_of(KINDS[0]), tokenizer_of(KINDS[0]))}
    models |= {"org/pieces": (draft_of(*KINDS), tokenizer_of(KINDS[1]))}
    for name, parts in models.items():
        for part in parts:
            part.save_pretrained(tmp_path / name)
        hub.put(name, {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    hub.put("org/both", {f"draft/{path.name}": path.read_bytes() for path in (tmp_path / "org/draft").iterdir()})
    same_tokens: dict[str, Any] = {"target": "org/target", "draft": "org/both", "subfolder": "draft"}
    jobs = [
        ("by_code", {"name": NAME} | same_tokens | OPTIONS),
        ("by_code", {"name": NAME} | same_tokens | {"verification": "coupled", "seeds": [3, 4]}),
        ("by_code", {"name": NAME, "target": "org/words", "draft": "org/pieces", "num_draft_tokens": 3}),
    ]
    target, draft = tiny(), near(tiny(), 0.1)
    words, tokenizers = (
        target_of(KINDS[0]),
        {"tokenizer": tokenizer_of(KINDS[0]), "draft_tokenizer": tokenizer_of(KINDS[1])},
    )
    expected = [
        said(generate, target, model=target, draft_model=draft, **OPTIONS),
        said(generate, target, model=target, draft_model=draft, verification="coupled", seeds=[3, 4]),
        said(generate, words, model=words, draft_model=draft_of(*KINDS), num_draft_tokens=3, **tokenizers),
    ]
    assert users(hub.home, jobs) == expected


def test_code_in_a_folder_serves_any_two_models(tmp_path: Path):
    folder = tmp_path / "code"
    write_code_repository(folder)
    assert {path.name for path in folder.iterdir()} == {"README.md", "custom_generate"}
    assert f'custom_generate="{folder.name}"' in (folder / "README.md").read_text()
    code = {module: (folder / "custom_generate" / f"{module}.py").read_text() for module in published_code(ANY_DRAFT)}
    assert code == published_code(ANY_DRAFT)
    target = tiny()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "custom_generate": str(folder)}
    output = target.generate(**prompts(2), assistant_model=near(target, 0.1), trust_remote_code=True, **options)
    assert torch.equal(output, target.generate(**prompts(2), max_new_tokens=8, do_sample=False))
    with pytest.raises(ValueError, match="pass draft_model= or assistant_model="):
        target.generate(**prompts(2), trust_remote_code=True, **options)
    with pytest.raises(ValueError, match=f"--code-only {folder}"):
        write_code_repository(folder)


def test_code_is_not_published_over_anything_else(hub: HubOnDisk):
    """Not over a pair, nor over code of others; a card that somebody has written stays."""
    a_pair().push_to_hub(PAIR)
    with pytest.raises(ValueError, match=f"is a pair.*--code-only {PAIR}"):
        publish_code(PAIR)
    hub.put("org/other", {"custom_generate/generate.py": b"theirs"})
    with pytest.raises(ValueError, match="other code"):
        publish_code("org/other")
    assert hub.files("org/other") == {"custom_generate/generate.py": b"theirs"}
    hub.put(NAME, {"README.md": b"mine"})
    with pytest.warns(UserWarning, match="README.md of org/code"):
        publish_code(NAME)
    assert hub.files(NAME)["README.md"] == b"mine"
    hub.put(NAME, hub.files(NAME) | {"custom_generate/old.py": b"", "README.md": OUR_CARD})
    publish_code(NAME, revision="next")
    assert "custom_generate/old.py" in hub.files(NAME)
    assert "custom_generate/old.py" not in hub.files(NAME, "next")
    with pytest.raises(ValueError, match="is public"):
        publish_code(NAME, private=True)


@pytest.mark.parametrize("place", ["repository", "branch", "folder"])
def test_renewing_changes_the_code_and_nothing_else(hub: HubOnDisk, tmp_path: Path, monkeypatch, place: str):
    """What it names stays: the models of the commit that were there. The version that it was of is said."""
    branch = "next" if place == "branch" else None
    earlier_code = {module: f"{text}# earlier\n" for module, text in published_code(NO_HEAD_DRAFT).items()}
    monkeypatch.setattr("hf_specx.hub.publish_code.published_code", lambda draft: earlier_code)
    monkeypatch.setattr("hf_specx.hub.publish_code.code_version", lambda: "0.0.7+0a1b2c3d")
    if place == "folder":
        a_pair().save_pretrained(tmp_path / "pair", with_code=True)
    else:
        a_pair().push_to_hub(PAIR, revision=branch)

    def files() -> dict[str, bytes]:
        if place == "folder":
            paths = [path for path in (tmp_path / "pair").rglob("*") if path.is_file()]
            return {path.relative_to(tmp_path / "pair").as_posix(): path.read_bytes() for path in paths}
        return hub.files(PAIR, branch)

    name = {"repository": PAIR, "branch": f"{PAIR}@next", "folder": str(tmp_path / "pair")}[place]
    before = files()
    monkeypatch.undo()
    earlier_version, commit = renew_code(name)
    assert earlier_version == "0.0.7+0a1b2c3d"
    assert bool(commit) == (place != "folder")
    after, code = files(), "custom_generate/"
    assert {path for path in before if before[path] != after[path]} == {path for path in after if path.endswith(".py")}
    assert before.keys() == after.keys()
    assert all(path.startswith(code) for path in after if path.endswith(".py"))
    renewed = {module: after[f"{code}{module}.py"].decode() for module in earlier_code}
    assert renewed == published_code(NO_HEAD_DRAFT)
    source, earlier = (read_source(each[f"{code}pair_source.py"].decode(), "") for each in (after, before))
    assert source == earlier | {"VERSION": source["VERSION"]}
    assert source["PAIR"] == (None if place == "folder" else PAIR)
    assert source["VERSION"] == code_version()


def test_without_a_network(monkeypatch):
    """The error says which of the two was not done."""

    class TransportError(Exception):
        pass

    def unreachable(*_: Any, **__: Any) -> None:
        raise TransportError("no route")

    for method in ("create_repo", "list_repo_files"):
        monkeypatch.setattr(f"huggingface_hub.HfApi.{method}", unreachable)
    with pytest.raises(ConnectionError, match="not published"):
        publish_code(NAME)
    with pytest.raises(ConnectionError, match="not renewed"):
        renew_code(NAME)


def test_what_cannot_be_renewed(hub: HubOnDisk, tmp_path: Path):
    """No code of ours, or a file that ours did not write, which is read and never run; nothing changes."""
    folder = tmp_path / "pair"
    a_pair().save_pretrained(folder)
    with pytest.raises(ValueError, match="no code of hf_specx"):
        renew_code(str(folder))
    hub.put(PAIR, {"custom_generate/generate.py": b"theirs"})
    with pytest.raises(ValueError, match="no code of hf_specx"):
        renew_code(PAIR)
    write_code_repository(tmp_path / "code")
    path = tmp_path / "code" / "custom_generate" / "pair_source.py"
    for text in (b"PAIR = print(1)", b"PAIR = 'no such/name/at all'", b"PAIR = 1", b"OTHER = None", b"PAIR ="):
        path.write_bytes(text)
        with pytest.raises(ValueError, match="not as hf_specx writes it"):
            renew_code(str(tmp_path / "code"))
        assert path.read_bytes() == text
    path.write_bytes(EARLIER)
    assert renew_code(str(tmp_path / "code")) == (None, "")
    assert path.read_bytes() != EARLIER
