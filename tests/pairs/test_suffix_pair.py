"""A pair without a draft model: saved, published, loaded by both ways, and refused where it cannot be."""

import json
from pathlib import Path

import pytest
import torch
from tiny import Forwards, prompts, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specx import DraftTargetPair, SuffixDraft, SuffixPool
from hf_specx.hub.flatten import PACKAGE
from hf_specx.hub.publish import write_repository
from hf_specx.pair_files.pair_config import CONFIG_NAME, PairConfig


GREEDY = {"do_sample": False, "max_new_tokens": 60, "pad_token_id": 0}
OPTIONS = {"max_candidates": 7, "min_match": 1, "max_match": 9}


def cyclic() -> PreTrainedModel:
    """A target that goes by the last token alone, so that its greedy text goes round."""
    model = tiny(vocab_size=40)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def few(rows: int) -> dict[str, torch.Tensor]:
    inputs = prompts(rows)
    return inputs | {"input_ids": inputs["input_ids"] % 40}


def test_saved_and_loaded(tmp_path: Path):
    folder, target = tmp_path / "pair", cyclic()
    tokenizer = AutoTokenizer.from_pretrained(PACKAGE / "embedded")
    DraftTargetPair(target, SuffixDraft(**OPTIONS), tokenizer).save_pretrained(folder)
    config = PairConfig.from_file(folder / CONFIG_NAME)
    assert vars(config.suffix) == OPTIONS
    assert not any(vars(config.draft).values())
    assert not (folder / "draft").exists()
    pair = DraftTargetPair.from_pretrained(folder)
    assert isinstance(pair.draft, SuffixDraft)
    assert pair.draft.options == OPTIONS
    assert pair.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert torch.equal(pair.generate(**few(3), **GREEDY), target.generate(**few(3), **GREEDY))
    assert pair.report.accepted > 30
    pair.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / CONFIG_NAME).read_text() == (folder / CONFIG_NAME).read_text()


def test_a_model_may_take_its_place(tmp_path: Path):
    DraftTargetPair(tiny(), SuffixDraft()).save_pretrained(tmp_path / "pair")
    pair = DraftTargetPair.from_pretrained(tmp_path / "pair", draft=tiny(seed=1))
    assert isinstance(pair.draft, PreTrainedModel)
    pair.save_pretrained(tmp_path / "with model")
    assert PairConfig.from_file(tmp_path / "with model" / CONFIG_NAME).suffix is None


def test_by_string(tmp_path: Path):
    target, folder = cyclic(), tmp_path / "pair"
    write_repository(DraftTargetPair(target, SuffixDraft()), folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = target.generate(**few(4), **GREEDY)
    with Forwards(model) as forwards:
        output = model.generate(**few(4), **GREEDY, custom_generate=str(folder), trust_remote_code=True)
    assert torch.equal(output, expected)
    assert len(forwards.ids) < 60  # 25 only to time them; plain decoding takes 60 more
    card = (folder / "README.md").read_text()
    assert "none: `SuffixDraft` with `max_candidates` 16" in card
    assert "The draft has no weights, and serves any target." in card


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suffix": {"max_candidates": 0}}, "max_candidates of suffix is 0; give an int from 1 to 64"),
        ({"suffix": {"max_candidates": 65}}, "max_candidates of suffix is 65; give an int from 1 to 64"),
        ({"suffix": {"min_match": 3, "max_match": 2}}, "max_match of suffix is 2, less than min_match=3"),
        ({"suffix": {"pool": "texts"}}, "'pool' that its schema does not know"),
        ({"draft": {"name": "org/draft"}}, "has a suffix in place of a draft model, and says where this model is"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, changes: dict, message: str):
    DraftTargetPair(tiny(), SuffixDraft()).save_pretrained(tmp_path / "pair")
    path = tmp_path / "pair" / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        DraftTargetPair.from_pretrained(tmp_path / "pair")


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        (SuffixDraft(pool=SuffixPool()), {}, "a pool of texts is not saved with a pair; use SuffixDraft without it"),
        (SuffixDraft(), {"draft": "reference"}, "draft='reference' is for models, and SuffixDraft has no files"),
        (SuffixDraft(100), {}, "max_candidates of suffix is 100; give an int from 1 to 64"),
        ([SuffixDraft()], {}, "saved with a model, a SuffixDraft or an EarlyExitDraft, and its draft is a list"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, draft, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DraftTargetPair(tiny(), draft).save_pretrained(tmp_path / "pair", **options)
    assert not (tmp_path / "pair").exists()
