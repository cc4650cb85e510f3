"""Loading a model as what its files say it is, and what a pair notes of a loaded one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from repositories import SMALL, code
from tiny import tiny
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from vision import seeing

from hf_specx.common.checkpoints import Files
from hf_specx.common.load_model import auto_class, load_model
from hf_specx.hub import facts
from hf_specx.hub.facts import model_facts
from hf_specx.hub.pair_config import ModelSource


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def load(folder: Path, trust: bool = False, **options) -> PreTrainedModel:
    return load_model(Files(str(folder), None, folder), trust, **options)


@pytest.mark.parametrize(
    ("kind", "model_type", "expected"),
    [
        ("causal", "gpt2", "AutoModelForCausalLM"),
        ("seq2seq", "t5", "AutoModelForSeq2SeqLM"),
        ("speech", "whisper", "AutoModelForSpeechSeq2Seq"),
        ("vision", "llava", "AutoModelForImageTextToText"),
    ],
)
def test_each_kind_comes_back(kind: str, model_type: str, expected: str, tmp_path: Path):
    model = seeing(model_type) if kind == "vision" else zoo.build(kind, model_type)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert auto_class(loaded.config).__name__ == expected
    assert type(loaded) is type(model)
    assert not loaded.training
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in model.state_dict().items())


def test_code_of_its_own_says_what_it_is():
    class OwnConfig(LlamaConfig):
        model_type = "own"

    for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"):
        assert auto_class(OwnConfig(auto_map={name: "own.Model"})).__name__ == name
    assert auto_class(OwnConfig()) is AutoModelForCausalLM


def test_no_function_is_bound(tmp_path: Path):
    """A pair's own, where its code is trusted, would call this package again."""
    tiny(**SMALL).save_pretrained(tmp_path)
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(code(tmp_path, "") + "def generate(model, **kw): pass\n")
    assert "generate" in vars(AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True))
    loaded = load(tmp_path, trust=True)
    assert "generate" not in vars(loaded)
    assert loaded.generate.__func__ is type(loaded).generate


def test_weights_that_a_model_has_no_use_for_are_left(tmp_path: Path):
    """Like heads of another task; only layers that its config leaves out make it another model."""
    model = tiny(**SMALL)
    model.save_pretrained(tmp_path, state_dict=model.state_dict() | {"classifier.weight": torch.ones(3)})
    assert len(load(tmp_path).model.layers) == SMALL["num_hidden_layers"]


@pytest.fixture
def model():
    model = tiny(vocab_size=50).bfloat16()
    model.name_or_path = "org/model"
    return model


def test_facts_of_a_model(model, tmp_path, monkeypatch):
    """With where it is, unless that is not known, or is a folder here."""
    kind = {"auto_class": "AutoModelForCausalLM", "model_type": "llama", "vocab_size": 50}
    parameters = sum(p.numel() for p in model.parameters())
    here = ModelSource(**kind, parameters=parameters, max_positions=128, dtype="bfloat16")
    monkeypatch.chdir(tmp_path)
    assert model_facts(model) == here
    model.config._commit_hash = COMMIT
    assert model_facts(model) == replace(here, name="org/model", revision=COMMIT)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert model_facts(model) == here


@pytest.mark.parametrize(("commits", "expected"), [([], None), (["1", "2"], None), (["2"], "2")])
def test_a_commit_is_that_of_the_only_snapshot(model, tmp_path: Path, monkeypatch, commits: list[str], expected: str):
    """transformers does not say which one it has loaded, and we do not guess."""
    monkeypatch.setattr(facts.constants, "HF_HUB_CACHE", str(tmp_path))
    for commit in commits:
        snapshot = tmp_path / "models--org--model" / "snapshots" / (40 * commit)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").touch()
    source = model_facts(model)
    assert (source.name, source.revision) == (expected and "org/model", expected and 40 * expected)
