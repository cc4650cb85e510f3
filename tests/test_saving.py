"""Saving a pair: whole or not at all, inside or by reference, and loaded again as it was."""

from pathlib import Path

import pytest
import torch
from tiny import near, prompts, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specx import DraftTargetPair
from hf_specx.fetch import fingerprint
from hf_specx.pair_config import CONFIG_NAME, Measurement, ModelSource, PairConfig, SavedCosts, TokenizerFacts


EMBEDDED = Path(__file__).parents[1] / "hf_specx" / "embedded"
COSTS = SavedCosts("a clock", "float32", {"2": {"target": {"1": 1.0, "9": 2.0}, "draft": 0.25}}, {"block": 0.5})


@pytest.fixture
def pair() -> DraftTargetPair:
    target = tiny(vocab_size=4096)
    config = PairConfig(
        ModelSource(), ModelSource(), num_draft_tokens=3, verification="token", layout="padded", prompts=["a", "b"]
    )
    config.costs, config.license, config.notes = COSTS, "mit", "## Notes\n"
    config.measurements = [
        Measurement(
            2, "float32", "token", 3, "padded", 0.5, None, 1.9, None, None, 1.2, "a clock", {"torch": "2"}, "x"
        )
    ]
    return DraftTargetPair(target, near(target, 0.1), AutoTokenizer.from_pretrained(EMBEDDED), config)


def weights_equal(a: PreTrainedModel, b: PreTrainedModel) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_pair_comes_back_as_it_was(pair: DraftTargetPair, tmp_path: Path):
    pair.save_pretrained(tmp_path / "pair")
    loaded = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert weights_equal(loaded.target, pair.target)
    assert weights_equal(loaded.draft, pair.draft)
    assert loaded.tokenizer.get_vocab() == pair.tokenizer.get_vocab()
    for name in ("num_draft_tokens", "verification", "layout", "costs", "measurements", "prompts", "license", "notes"):
        assert getattr(loaded.config, name) == getattr(pair.config, name)
    assert loaded.config.tokenizers.method == "one"
    assert (loaded.config.draft.subfolder, loaded.config.draft.parameters) == ("draft", pair.draft.num_parameters())
    loaded.generate(**prompts(2), max_new_tokens=6, do_sample=True)
    report = loaded.report
    assert (report.num_draft_tokens, report.verification, report.layout) == (3, "token", "padded")


def test_the_target_is_an_ordinary_model(pair: DraftTargetPair, tmp_path: Path):
    """At the root of the folder, where everybody else looks for it."""
    pair.save_pretrained(tmp_path / "pair")
    assert weights_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "pair"), pair.target)
    assert not list((tmp_path / "pair").rglob("*.bin"))


def test_a_pair_whose_models_come_from_elsewhere(pair: DraftTargetPair, tmp_path: Path):
    """By reference to the Hub at a commit; the models are passed here, since nothing can be downloaded."""
    for role in ("target", "draft"):
        getattr(pair, role).name_or_path = f"org/{role}"
        getattr(pair, role).config._commit_hash = "0" * 40
    target, draft = pair.target, pair.draft
    pair.save_pretrained(tmp_path / "both", target="reference", draft="reference")
    config = PairConfig.from_file(tmp_path / "both" / CONFIG_NAME)
    assert (config.target.name, config.target.revision) == ("org/target", "0" * 40)
    assert not list((tmp_path / "both").rglob("*.safetensors"))
    assert DraftTargetPair.from_pretrained(tmp_path / "both", target=target, draft=draft).target is target
    pair.save_pretrained(tmp_path / "one", target="reference")
    loaded = DraftTargetPair.from_pretrained(tmp_path / "one", target=target)
    assert weights_equal(loaded.draft, draft)
    draft.save_pretrained(tmp_path / "other")
    loaded = DraftTargetPair.from_pretrained(tmp_path / "both", target=target, draft=tmp_path / "other")
    assert weights_equal(loaded.draft, draft)


def test_a_reference_loaded_from_the_hub_is_kept_with_its_subfolder(pair: DraftTargetPair, tmp_path: Path):
    """The draft of a repository that is a pair itself lies in a subfolder, which the model does not know."""
    pair.sources["draft"] = ModelSource("org/pair", "1" * 40, "draft")
    pair.save_pretrained(tmp_path / "pair", draft="reference")
    draft = PairConfig.from_file(tmp_path / "pair" / CONFIG_NAME).draft
    assert (draft.name, draft.revision, draft.subfolder) == ("org/pair", "1" * 40, "draft")


def test_what_goes_wrong_leaves_nothing(pair: DraftTargetPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also in place of an earlier pair, which stays as it was."""
    folder = tmp_path / "pair"
    pair.save_pretrained(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(pair.draft, "save_pretrained", lambda *args, **kwargs: 1 / 0)
    for target in (folder, tmp_path / "new"):
        with pytest.raises(ZeroDivisionError):
            pair.save_pretrained(target, overwrite=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_is_replaced_whole(pair: DraftTargetPair, tmp_path: Path):
    folder = tmp_path / "pair"
    pair.save_pretrained(folder)
    (folder / "left over.safetensors").touch()
    pair.draft = near(pair.target, 0.3)
    pair.save_pretrained(folder, overwrite=True)
    assert not (folder / "left over.safetensors").exists()
    assert weights_equal(DraftTargetPair.from_pretrained(folder).draft, pair.draft)
    assert list(tmp_path.iterdir()) == [folder]


def test_saving_leaves_the_pair_alone(pair: DraftTargetPair, tmp_path: Path):
    before = pair.config.to_text()
    pair.save_pretrained(tmp_path / "pair")
    assert pair.config.to_text() == before


def test_fingerprints_are_of_what_was_saved(pair: DraftTargetPair, tmp_path: Path):
    pair.save_pretrained(tmp_path / "pair")
    config = PairConfig.from_file(tmp_path / "pair" / CONFIG_NAME)
    assert config.target.fingerprint == fingerprint(tmp_path / "pair")
    assert config.draft.fingerprint == fingerprint(tmp_path / "pair" / "draft")


def test_the_embedded_pair_is_as_its_config_says():
    config = PairConfig.from_file(EMBEDDED / CONFIG_NAME)
    assert config.to_text() == (EMBEDDED / CONFIG_NAME).read_text()
    assert config.target.fingerprint == fingerprint(EMBEDDED)
    assert config.draft.fingerprint == fingerprint(EMBEDDED / "draft")
    assert config.tokenizers == TokenizerFacts("one", 4096, {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"})
