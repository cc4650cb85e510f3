"""Pairs whose draft is a head: saved, loaded, published, used by string and exported like any other."""

from pathlib import Path

import pytest
import torch
from head_files import random_head, write
from tiny import prompts, tiny
from tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM

from hf_specx import DraftHead, DraftTargetPair
from hf_specx.hub.publish import save
from hf_specx.hub.vllm import vllm


SIZE = 280
CALL = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def target():
    return tiny(vocab_size=SIZE, num_hidden_layers=8)


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory) -> Path:
    return write(random_head(vocab=SIZE, draft_vocab=100), tmp_path_factory.mktemp("head"), "specforge")


@pytest.fixture
def pair(target, head_folder) -> DraftTargetPair:
    pair = DraftTargetPair(target, DraftHead.from_pretrained(head_folder, target=target), tiny_tokenizer())
    pair.strategy.num_draft_tokens = 2
    return pair


def test_a_pair_is_saved_and_loaded_with_its_head(pair, tmp_path: Path):
    pair.save_pretrained(tmp_path / "pair")
    again = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert isinstance(again.draft, DraftHead)
    assert again.config.draft.model_type == "eagle3"
    same = again.draft.state_dict()
    assert all(torch.equal(same[name], tensor) for name, tensor in pair.draft.state_dict().items())
    wanted = pair.target.generate(**prompts(3), **CALL)
    assert torch.equal(again.generate(**prompts(3), **CALL, num_draft_tokens=2), wanted)
    assert again.report.drafted > 0
    assert vllm(again.config, str(tmp_path / "pair")).speculative_config["method"] == "eagle3"


def test_a_head_in_place_of_a_pairs_draft(pair, head_folder, tmp_path: Path):
    DraftTargetPair(pair.target, tiny(vocab_size=SIZE, seed=1), tiny_tokenizer()).save_pretrained(tmp_path / "pair")
    again = DraftTargetPair.from_pretrained(tmp_path / "pair", draft=str(head_folder))
    assert isinstance(again.draft, DraftHead)
    assert torch.equal(again.generate(**prompts(2), **CALL), pair.target.generate(**prompts(2), **CALL))


def test_a_published_pair_with_a_head_by_string(pair, tmp_path: Path):
    """With what is published alone: transformers loads its code, and that the head."""
    folder = tmp_path / "published"
    save(pair, folder, with_code=True)
    assert "eagle3" in (folder / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    wanted = model.generate(**prompts(2), **CALL)
    options = {"return_dict_in_generate": True, "num_draft_tokens": 2, "trust_remote_code": True}
    out = model.generate(**prompts(2), **CALL, **options, custom_generate=str(folder))
    assert torch.equal(out.sequences, wanted)
    assert out.speculation_report.drafted > 0
    assert type(out.speculation_report).__module__.startswith("transformers_modules")
