"""A draft is given by its name or folder, and what the files are is loaded: a head, or a model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from head_files import random_head, write
from repositories import weights_equal
from tiny import prompts, tiny
from transformers import PreTrainedModel

import hf_specx
from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.drafting.heads import draft_names
from hf_specx.drafting.heads.draft_names import load_draft


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny(num_hidden_layers=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    tiny(seed=1).save_pretrained(root / "model")
    write(random_head(draft_vocab=24), root / "head")
    write(random_head(theta=10000.0), root / "plain config", "safeailab")
    write(random_head("medusa"), root / "medusa")
    return {path.name: path for path in root.iterdir()}


def refused(target: PreTrainedModel, draft: str | Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        target.generate(**prompts(1), max_new_tokens=4, custom_generate=SpeculativeDecoding(draft))


CLASSES = {"model": "LlamaForCausalLM", "head": "DraftHead", "plain config": "DraftHead", "medusa": "DraftHead"}
NAMES = CLASSES | {"suffix": "SuffixDraft", "exit:2": "EarlyExitDraft", "layers:2": "EarlyExitDraft"}
NAMES |= {"head:head": "DraftHead"}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_name_says_is_drafted_by(target, folders, monkeypatch, name: str):
    """As commands have names, or by what the files of a folder say; once and again, in a list, and in `generate`."""
    monkeypatch.chdir(folders["head"].parent)
    options = prompts(3) | {"max_new_tokens": 8, "do_sample": False}
    wanted, strategy = target.generate(**options), SpeculativeDecoding(name, num_draft_tokens=2)
    for _ in range(2):
        assert torch.equal(target.generate(**options, custom_generate=strategy), wanted)
    assert type(strategy.draft_model).__name__ == NAMES[name]
    assert strategy.report.drafted > 0 or name == "suffix"
    with_suffix = strategy if name == "suffix" else SpeculativeDecoding(["suffix", name])
    assert torch.equal(target.generate(**options, custom_generate=with_suffix), wanted)
    assert torch.equal(hf_specx.generate(**options, model=target, draft_model=folders.get(name, name)), wanted)


@pytest.mark.parametrize("name", ["model", "head"])
def test_a_revision_is_that_of_the_hub(target, folders, tmp_path, monkeypatch, name):
    """By a cache as huggingface_hub lays it out; of another revision there is nothing."""
    repository = tmp_path / f"models--org--{name}"
    shutil.copytree(folders[name], repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    strategy = SpeculativeDecoding(f"org/{name}@v1", num_draft_tokens=2)
    target.generate(**prompts(2), max_new_tokens=4, custom_generate=strategy)
    assert type(strategy.draft_model).__name__ == CLASSES[name]
    refused(target, f"org/{name}@v2", r"no config\.json")


def changed(folder: Path, to: Path, **config) -> Path:
    """A copy with other entries in its config."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    old = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(old | config))
    return to


REFUSED = [  # what is changed of which files, and what is said
    ("model", {"draft_vocab_size": 48}, "ambiguous"),
    ("model", {"architectures": ["DominoDraftModel"]}, "ambiguous"),
    ("model", {"attn_implementation": "org/kernel"}, "names code"),
    ("model", {"attn_implementation": {"": "org/kernel"}}, "names code"),
    ("model", {"experts_implementation": {"text_config": ["org/kernel@v1"]}}, "names code"),
    ("model", {"_attn_implementation_internal": "org/kernel:it"}, "names code"),
    ("model", {"transformers_weights": "../x.safetensors"}, "not checked"),
    ("model", {"num_hidden_layers": 3}, "lacks"),
    ("model", {"num_hidden_layers": 5}, "numbers in its weights"),
    ("model", {"model_type": "new", "auto_map": {"AutoConfig": "code.New"}}, "code of its own"),
    ("head", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping"),
]


@pytest.mark.parametrize(("source", "config", "message"), REFUSED)
def test_files_that_are_refused(target, folders, tmp_path: Path, source, config, message):
    refused(target, changed(folders[source], tmp_path / "changed", **config), message)


def test_no_code_is_asked_for(target, folders, tmp_path: Path, monkeypatch):
    """What transformers would fetch a kernel by is not called, by neither of the ways to a draft."""
    asked = []
    monkeypatch.setattr(
        "transformers.modeling_utils.lazy_import_flash_attention", lambda *args, **_: asked.append(args)
    )
    for number, kernel in enumerate(("org/kernel", {"": "org/kernel"})):
        folder = changed(folders["model"], tmp_path / str(number), attn_implementation=kernel)
        for load in (DraftTargetPair, lambda target, draft: DraftTargetPair.from_pretrained("embedded", draft=draft)):
            with pytest.raises(ValueError, match="names code"):
                load(target, str(folder))
    assert asked == []


def test_all_files_are_of_one_commit(target, folders, tmp_path: Path, monkeypatch):
    """Though the branch moves on after its files were checked."""
    repository = tmp_path / "models--org--model"
    shutil.copytree(folders["model"], repository / "snapshots" / ("a" * 40))
    tiny(seed=2).save_pretrained(repository / "snapshots" / ("b" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    find = draft_names.find_file

    def find_and_move(name, file, **hub):
        path = find(name, file, **hub)
        if file == "config.json":
            (repository / "refs" / "main").write_text("b" * 40)
        return path

    monkeypatch.setattr(draft_names, "find_file", find_and_move)
    draft = load_draft("org/model", target)
    assert weights_equal(draft, tiny(seed=1))
    assert (draft.name_or_path, draft.config._commit_hash) == ("org/model", "a" * 40)


def test_models_in_pickles_and_pairs_are_refused(target, folders, tmp_path: Path):
    folder = changed(folders["model"], tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save(tiny(seed=1).state_dict(), folder / "pytorch_model.bin")
    refused(target, folder, "safetensors")
    folder = changed(folders["model"], tmp_path / "pair")
    (folder / "specx_config.json").write_text("{}")
    refused(target, folder, "is a pair")


MEANINGLESS = {
    "org/no-such-draft": r"no config\.json",
    "sufix": "did you mean 'suffix'",
    "exit2": "means nothing",
    "exits": "several numbers",
    "head:model": "leave head: out",
}


@pytest.mark.parametrize("name", MEANINGLESS)
def test_names_that_mean_nothing(target, folders, monkeypatch, name: str):
    monkeypatch.chdir(folders["head"].parent)
    refused(target, name, MEANINGLESS[name])
