"""What a config records of models."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import tiny

from hf_specx.hub import facts
from hf_specx.hub.facts import model_facts
from hf_specx.hub.pair_config import ModelSource


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model():
    made = tiny(vocab_size=50).bfloat16()
    made.name_or_path = "org/model"
    return made


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


@pytest.mark.parametrize(("commits", "known"), [([], None), (["1", "2"], None), (["2"], "2")])
def test_a_commit_is_that_of_the_only_snapshot(model, tmp_path: Path, monkeypatch, commits: list[str], known: str):
    """transformers does not say which one it has loaded, and we do not guess."""
    monkeypatch.setattr(facts.constants, "HF_HUB_CACHE", str(tmp_path))
    for commit in commits:
        snapshot = tmp_path / "models--org--model" / "snapshots" / (40 * commit)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").touch()
    found = model_facts(model)
    assert (found.name, found.revision) == (known and "org/model", known and 40 * known)
