"""`specx card`, `publish` and `export`: what they write and print, and how errors look."""

import shutil

import pytest
import torch
from command import command
from hub_on_disk import HubOnDisk
from tiny import near, tiny
from tiny_tokenizer import tiny_tokenizer

from hf_specx import DraftTargetPair
from hf_specx.cli import loading
from hf_specx.common.checkpoints import Files
from hf_specx.hub.cards import embedded_card, render
from hf_specx.hub.flatten import code_version
from hf_specx.hub.known_pairs import embedded_folder
from hf_specx.hub.pair_config import ModelSource, PairConfig
from hf_specx.hub.vllm import vllm


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


def test_the_card_of_the_pair_in_the_package(tmp_path):
    assert output("card") == "embedded\n"
    assert output("card", "embedded") == embedded_card()
    output("card", "embedded", "--out", tmp_path / "embedded.md")
    assert (tmp_path / "embedded.md").read_text() == embedded_card()


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


@pytest.fixture
def named(tmp_path, monkeypatch):
    """The folder of a pair whose models are on a Hub of two repositories; the pair itself is on it as well."""
    hub, tokenizer = HubOnDisk(tmp_path / "home"), tiny_tokenizer()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.cache))
    target = tiny(vocab_size=len(tokenizer))
    pair = DraftTargetPair(target, near(target, 0.1), tokenizer)
    for role in ("target", "draft"):
        model, folder = getattr(pair, role), tmp_path / role
        for part in (model, tokenizer):
            part.save_pretrained(folder)
        commit = hub.put(f"org/{role}", {path.name: path.read_bytes() for path in folder.iterdir()})
        model.name_or_path, model.config._commit_hash = f"org/{role}", commit
    pair.save_pretrained(tmp_path / "pair", target="reference", draft="reference")
    files = {path.name: path.read_bytes() for path in (tmp_path / "pair").iterdir()}
    hub.put("org/pair", files)
    return tmp_path / "pair", hub


def without_weights(hub) -> None:
    for path in hub.home.rglob("model.safetensors"):
        path.unlink()


@pytest.mark.parametrize("goal", ["folder", "repository"])
@pytest.mark.parametrize("place", ["folder", "repository"])
def test_publish_by_reference_needs_no_weights(named, tmp_path, goal: str, place: str):
    """They may be too large for this machine."""
    folder, hub = named
    without_weights(hub)
    out = tmp_path / "written"
    with hub.published_to():
        to = ["--out", out] if goal == "folder" else ["org/new"]
        result = command("publish", folder if place == "folder" else "org/pair", *to)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.endswith("target reference, draft reference\n")
    files = (
        hub.files("org/new") if goal == "repository" else {path.name: path.read_bytes() for path in out.glob("*.*")}
    )
    assert files["specx_config.json"] == (folder / "specx_config.json").read_bytes()
    assert {"README.md", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
    assert "config.json" not in files


def test_a_model_that_was_changed_is_saved_inside(named, capsys):
    """As that of a command which has worked for long, and must not fail at its end."""
    folder, _ = named
    pair = DraftTargetPair.from_pretrained(folder)
    assert [loading.saved_as(pair, role) for role in ("target", "draft")] == ["reference", "reference"]
    assert capsys.readouterr().err.count("warning") == 0
    pair.target.lm_head.weight.data[-1] += 1
    assert [loading.saved_as(pair, role) for role in ("target", "draft")] == ["inside", "reference"]
    said = capsys.readouterr().err
    assert "warning: the target is not shown to be org/target at" in said
    assert "its lm_head.weight was changed; it is saved inside the pair" in " ".join(said.split())


def test_publish_to_the_hub(named):
    """Every option arrives; one who wants a private repository gets no public one."""
    _, hub = named
    with hub.published_to() as api:
        result = command("publish", "org/pair", "org/name@next", "--private", "--inside")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines()[-1].endswith(": target inside, draft inside")
    assert result.stdout == ""
    assert api.return_value.create_repo.call_args.kwargs["private"] is True
    assert {"model.safetensors", "draft/model.safetensors"} <= hub.files("org/name", "next").keys()
    assert "model.safetensors" not in hub.files("org/name")
    with hub.published_to():
        result = command("publish", "org/pair", "org/name")
        assert command("publish", "org/pair", "org/public").exit_code == 0
        refused = command("publish", "org/pair", "org/public", "--private")
    commit = hub.branch("org/name", None).read_text()
    code = f"with the code of hf_specx {code_version()}"
    assert result.stderr == f"published org/name at {commit} {code}: target reference, draft reference\n"
    assert refused.exit_code == 2
    assert "org/public is there already and is public" in refused.stderr
    assert f"{hub.commits:040x}" == hub.branch("org/public", None).read_text()


def test_publish_copies_what_is_inside(folder, tmp_path, monkeypatch):
    """To the byte, and nothing else of what is in the folder; no model is made."""
    folder = shutil.copytree(folder, tmp_path / "pair")
    for name in ("notes.json", "prompts.txt", "other.safetensors", "draft/notes.json", "training.py"):
        (folder / name).write_text("{}")
    monkeypatch.setattr("transformers.PreTrainedModel.__init__", None)
    output("publish", folder, "--out", tmp_path / "repository")
    output("publish", "embedded", "--out", tmp_path / "embedded")
    for pair, written in ((folder, tmp_path / "repository"), (embedded_folder(), tmp_path / "embedded")):
        config = PairConfig.from_file(pair / "specx_config.json")
        for there, here in (("", ""), (config.draft.subfolder, "draft")):
            for name in ("model.safetensors", "config.json"):
                assert (written / here / name).read_bytes() == (pair / there / name).read_bytes()
        names = {path.relative_to(written).as_posix() for path in written.rglob("*.*")}
        of_models = {"config.json", "generation_config.json", "model.safetensors"}
        known = of_models | {"tokenizer.json", "tokenizer_config.json", "specx_config.json", "README.md"}
        left = {name for name in names if not name.startswith("custom_generate/")}
        assert left <= known | {f"draft/{name}" for name in of_models}


def test_a_pair_that_was_published_from_files_is_used(folder, tmp_path):
    output("publish", folder, "--out", tmp_path / "repository")
    pairs = [DraftTargetPair.from_pretrained(path) for path in (folder, tmp_path / "repository")]
    texts = [pair.complete(["the cat"], max_new_tokens=8, do_sample=False) for pair in pairs]
    assert texts[0] == texts[1]
    assert pairs[0].config == pairs[1].config


def test_publish_into_a_folder(folder, tmp_path):
    output("publish", folder, "--out", tmp_path / "repository")
    names = {path.name for path in (tmp_path / "repository").iterdir()}
    assert {"README.md", "custom_generate", "specx_config.json", "model.safetensors", "draft"} <= names
    old = tmp_path / "repository" / "old"
    old.touch()
    output("publish", folder, "--out", tmp_path / "repository", "--overwrite")
    assert not old.exists()
    assert output("card", tmp_path / "repository") == (tmp_path / "repository" / "README.md").read_text()


def test_publish_code_without_models_and_renew_it(folder, named, tmp_path):
    """Each says the version of the code; one that is renewed also which was there."""
    _, hub = named
    code = f"code of hf_specx {code_version()}"
    with hub.published_to():
        result = command("publish", "--code", "org/code@next")
        renewed = command("publish", "--code-only", "org/code@next")
        assert command("publish", "--code", "org/pair").exit_code == 2
    commit = hub.branch("org/code", "next").read_text()
    assert (result.exit_code, renewed.exit_code) == (0, 0), result.stderr + renewed.stderr
    assert f": {code}" in result.stderr
    assert renewed.stderr.startswith(f"org/code@next at {commit} ")
    assert renewed.stderr.count(code_version()) == 2
    output("publish", "--code", "--out", tmp_path / "code")
    output("publish", folder, "--out", tmp_path / "repository")
    for path in (tmp_path / "code", tmp_path / "repository"):
        assert code in command("publish", "--code-only", path).stderr


def test_export(folder, config):
    assert output("export", "vllm", folder) == f"{vllm(config, folder)}\n"
    assert "vllm serve" in output("export", "vllm", "embedded")


def test_models_go_to_an_accelerator_of_any_kind(monkeypatch: pytest.MonkeyPatch):
    assert loading.device_map(None) is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert loading.device_map(None) == "auto"
