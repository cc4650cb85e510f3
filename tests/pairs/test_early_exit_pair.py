"""A pair that drafts with the target's first layers: saved, published, loaded by both ways, and refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import Forwards, prompts, tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specx import DraftTargetPair, EarlyExitDraft
from hf_specx.hub.publish import write_repository
from hf_specx.pair_files.exit_head import HEAD_NAME
from hf_specx.pair_files.pair_config import CONFIG_NAME


GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, "num_draft_tokens": 4}


def predicting() -> PreTrainedModel:
    """A target whose later layers add nothing, so that its first one says what all say."""
    model = tiny()
    for layer in model.model.layers[1:]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


class LastLayer:
    """Counts the forwards of a target's last layer, which a draft of its first layers does not run."""

    def __init__(self, target: PreTrainedModel):
        self.count = 0
        self.handle = target.model.layers[-1].register_forward_pre_hook(self._note)

    def _note(self, *args):
        self.count += 1

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.handle.remove()


def plain(target: PreTrainedModel, rows: int) -> torch.Tensor:
    return target.generate(**prompts(rows), **GREEDY | {"num_draft_tokens": None})


def test_saved_and_loaded(tmp_path: Path):
    folder, target = tmp_path / "pair", predicting()
    DraftTargetPair(target, EarlyExitDraft(1)).save_pretrained(folder)
    text = json.loads((folder / CONFIG_NAME).read_text())
    assert text["early_exit"] == {"exit_layer": 1}
    assert "suffix" not in text
    assert not (folder / "draft").exists()
    pair = DraftTargetPair.from_pretrained(folder)
    assert isinstance(pair.draft, EarlyExitDraft)
    with LastLayer(pair.target) as seen:
        assert torch.equal(pair.generate(**prompts(3), **GREEDY), plain(target, 3))
    assert seen.count < 12
    assert pair.report.sources.keys() == {"early exit"}
    pair.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / CONFIG_NAME).read_text() == (folder / CONFIG_NAME).read_text()


def test_by_string(tmp_path: Path):
    target, folder = predicting(), tmp_path / "pair"
    write_repository(DraftTargetPair(target, EarlyExitDraft(1)), folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with LastLayer(model) as seen:
        output = model.generate(**prompts(4), **GREEDY, custom_generate=str(folder), trust_remote_code=True)
    assert torch.equal(output, plain(target, 4))
    assert seen.count < 12
    card = (folder / "README.md").read_text()
    assert "its own first layers propose a few tokens, the target judges all of them" in card
    assert "none: `EarlyExitDraft` with `exit_layer` 1" in card


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"early_exit": {"exit_layer": 0}}, "exit_layer of early_exit is 0; give an int from 1 to"),
        ({"early_exit": {"exit_layer": True}}, "exit_layer is True, not int"),
        ({"early_exit": {}}, "early_exit has no 'exit_layer'"),
        ({"suffix": {}}, "has both a suffix and an early_exit; take one of them out"),
        ({"draft": {"name": "org/draft"}}, "has an early_exit in place of a draft model, and says where this model"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, changes: dict, message: str):
    DraftTargetPair(tiny(), EarlyExitDraft(1)).save_pretrained(tmp_path / "pair")
    path = tmp_path / "pair" / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        DraftTargetPair.from_pretrained(tmp_path / "pair")


def with_trained_head(target: PreTrainedModel, bias: bool = False) -> EarlyExitDraft:
    """An exit whose head swaps two numbers of the hidden state, so that other tokens are drafted than without it."""
    width = target.config.hidden_size
    head = torch.nn.Linear(width, width, bias=bias)
    with torch.no_grad():
        head.weight.copy_(torch.eye(width).roll(1, 0))
    return EarlyExitDraft(1, head=head.eval())


def drafts_of(pair: DraftTargetPair) -> torch.Tensor:
    """What the first layers say after a prompt."""
    return pair.draft.first_layers(pair.target)(prompts(1)["input_ids"]).logits


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_is_saved_with_its_exit(tmp_path: Path, bias: bool):
    folder, target = tmp_path / "pair", predicting()
    saved = DraftTargetPair(target, with_trained_head(target, bias))
    saved.save_pretrained(folder)
    assert json.loads((folder / CONFIG_NAME).read_text())["early_exit"] == {"exit_layer": 1, "head": True}
    pair = DraftTargetPair.from_pretrained(folder)
    assert torch.equal(drafts_of(pair), drafts_of(saved))
    assert not torch.equal(drafts_of(pair), drafts_of(DraftTargetPair(target, EarlyExitDraft(1))))
    assert torch.equal(pair.generate(**prompts(3), **GREEDY), plain(target, 3))
    pair.save_pretrained(tmp_path / "again")
    for name in (CONFIG_NAME, HEAD_NAME):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    half = DraftTargetPair.from_pretrained(folder, dtype=torch.bfloat16)
    assert half.draft.head.weight.dtype == torch.bfloat16


def test_a_head_by_string(tmp_path: Path):
    """The published code drafts with the head: with one that spoils the candidates, all layers run more often."""
    target, seen = predicting(), []
    for name, draft in (("without", EarlyExitDraft(1)), ("with", with_trained_head(target))):
        folder = tmp_path / name
        write_repository(DraftTargetPair(target, draft), folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        with LastLayer(model) as layer:
            output = model.generate(**prompts(4), **GREEDY, custom_generate=str(folder), trust_remote_code=True)
        assert torch.equal(output, plain(target, 4))
        seen.append(layer.count)
    assert seen[0] < 12 < seen[1]
    assert "no weights but those of its head, and serves this target" in (folder / "README.md").read_text()


def other_tensors(path: Path, **tensors: torch.Tensor) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "has no exit_head.safetensors: weights are missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "exit_head.safetensors is not whole"),
        (lambda path: path.write_bytes(b"pickle"), "is not whole, or no safetensors"),
        (lambda path: other_tensors(path, weight=torch.zeros(3, 3)), "the head of this target is a weight"),
        (lambda path: other_tensors(path, bias=torch.zeros(32)), "the head of this target is a weight"),
        (lambda path: other_tensors(path, weight=torch.zeros(32, 32).long()), "the head of this target is a weight"),
        (lambda path: path.rename(path.parent.parent / "x") and path.symlink_to(path.parent.parent / "x"), "a link"),
    ],
)
def test_heads_that_are_refused(tmp_path: Path, damage, message: str):
    target, folder = tiny(), tmp_path / "pair"
    assert target.config.hidden_size == 32
    write_repository(DraftTargetPair(target, with_trained_head(target)), folder)
    damage(folder / HEAD_NAME)
    with pytest.raises(ValueError, match=message):
        DraftTargetPair.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with Forwards(model) as forwards, pytest.raises(ValueError, match=message):
        model.generate(**prompts(1), **GREEDY, custom_generate=str(folder), trust_remote_code=True)
    assert not forwards.ids


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        (EarlyExitDraft(1, head=torch.nn.Identity()), {}, "a square torch.nn.Linear as the head .* is Identity"),
        (
            EarlyExitDraft(1),
            {"draft": "reference"},
            "is for models, and EarlyExitDraft has no files",
        ),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, draft, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DraftTargetPair(tiny(), draft).save_pretrained(tmp_path / "pair", **options)
    assert not (tmp_path / "pair").exists()
