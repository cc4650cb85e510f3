"""`specx card`, `publish` and `export`: what they write and print, and how errors look."""

import pytest
import torch
from command import command

from hf_specx import DraftTargetPair
from hf_specx.cli import loading
from hf_specx.hub.cards import known_card, render
from hf_specx.hub.fetch import Files
from hf_specx.hub.known_pairs import BY_NAME
from hf_specx.hub.pair_config import ModelSource, PairConfig
from hf_specx.hub.vllm import vllm


KNOWN = next(iter(BY_NAME))


def output(*arguments: object) -> str:
    result = command(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture
def config(folder) -> PairConfig:
    return PairConfig.from_file(f"{folder}/specx_config.json")


def test_card_of_a_folder(folder, config, tmp_path):
    here = render(config, "my-pair")
    assert output("card", folder) == here
    assert output("card", folder, "org/name") == render(config, "org/name")
    assert output("card", folder, "--out", tmp_path / "card.md") == ""
    assert (tmp_path / "card.md").read_text() == here


def test_all_cards(tmp_path):
    output("card", "--out", tmp_path)
    names = output("card").split()
    assert sorted(tmp_path.iterdir()) == sorted(tmp_path / f"{name}.md" for name in names)
    assert all(output("card", name) == known_card(name) for name in ("embedded", KNOWN))


def test_the_hub_is_asked_for_what_was_said(monkeypatch, tmp_path):
    seen, code = [], []
    config = PairConfig(ModelSource("org/t", "c1"), ModelSource("org/d", "c2"))
    monkeypatch.setattr(loading, "get_pair", lambda *a, **hub: seen.append((*a, hub)) or (None, config))
    monkeypatch.setattr(loading, "get_files", lambda *a, **hub: code.append((*a, hub)) or Files("", None, tmp_path))
    assert output("card", "org/pair@v1") == render(config, "org/pair")
    assert code == [("org/pair", "v1", ["generate.py"], "custom_generate", {})]
    output("export", "vllm", "org/pair@v1")
    output("export", "vllm", "org/pair")
    assert seen == [("org/pair", "v1", {}), ("org/pair", "v1", {}), ("org/pair", None, {})]


def test_publish(monkeypatch):
    """References are kept unless something else is asked for, and every option arrives; an accelerator is used."""
    asked, pair = {}, DraftTargetPair.embedded()
    pair.config.target = ModelSource("org/target", "v1")
    monkeypatch.setattr(DraftTargetPair, "from_pretrained", lambda name, **given: asked.update(load=given) or pair)
    monkeypatch.setattr(DraftTargetPair, "push_to_hub", lambda pair, name, **o: asked.update(o, id=name) or "c0ffee")
    result = command("publish", "org/pair", "org/name")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "published org/name at c0ffee: target reference, draft inside\n"
    given = {"dtype": "auto", "device_map": None, "revision": None, "trust_remote_code": False, "draft": None}
    assert asked.pop("load") == given
    assert asked == {"private": None, "revision": None, "id": "org/name", "target": "reference", "draft": "inside"}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # of any kind
    output("publish", "org/pair@v1", "org/name@next", "--private", "--trust-remote-code", "--inside")
    assert asked["load"] == given | {"revision": "v1", "trust_remote_code": True, "device_map": "auto"}
    assert (asked["private"], asked["revision"], asked["target"]) == (True, "next", "inside")


def test_publish_into_a_folder(folder, tmp_path):
    output("publish", folder, "--out", tmp_path / "repository")
    names = {path.name for path in (tmp_path / "repository").iterdir()}
    assert {"README.md", "custom_generate", "specx_config.json", "model.safetensors", "draft"} <= names
    old = tmp_path / "repository" / "old"
    old.touch()
    output("publish", folder, "--out", tmp_path / "repository", "--overwrite")
    assert not old.exists()
    assert output("card", tmp_path / "repository") == (tmp_path / "repository" / "README.md").read_text()


def test_export(folder, config):
    assert output("export", "vllm", folder) == f"{vllm(config, folder)}\n"
    assert all("vllm serve" in output("export", "vllm", name) for name in ("embedded", KNOWN))
