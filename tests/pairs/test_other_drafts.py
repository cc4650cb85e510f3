"""Pairs of a `SuffixDraft`, an `EarlyExitDraft` or a head: saved, published, loaded, exported, refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import counting
from gemma4_models import assistant_of, gemma4_target
from head_files import random_head, write
from other_tokens import pair_of
from safetensors.torch import save_file
from tiny import prompts, tiny, without_layers
from tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specx import DraftHead, DraftTargetPair, EarlyExitDraft, SuffixDraft, SuffixPool, generate
from hf_specx.common.drafts import PAIR_CONFIG_NAME
from hf_specx.hub.pair_config import PairConfig
from hf_specx.hub.pair_models import HEAD_NAME
from hf_specx.hub.publish import save
from hf_specx.hub.vllm import vllm
from hf_specx.pairs.fingerprint import arguments_of


GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, "num_draft_tokens": 4}
SIZE = 280
OPTIONS = {"max_candidates": 7, "min_match": 1, "max_match": 9}
KINDS: dict[str, tuple[Any, dict[str, int]]] = {  # a draft, and its entry in the config
    "suffix": (SuffixDraft(**OPTIONS), OPTIONS),
    "early_exit": (EarlyExitDraft(1), {"exit_layer": 1}),
}


def predicting() -> PreTrainedModel:
    """A target whose first layer says what all say."""
    return without_layers(tiny(), 1)


def plain(target: PreTrainedModel, rows: int) -> torch.Tensor:
    return target.generate(**prompts(rows), **GREEDY | {"num_draft_tokens": None})


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(tmp_path: Path, kind: str):
    (draft, options), folder, target = KINDS[kind], tmp_path / "pair", predicting()
    DraftTargetPair(target, draft).save_pretrained(folder)
    values = json.loads((folder / PAIR_CONFIG_NAME).read_text())
    assert {name: values[name] for name in KINDS if name in values} == {kind: options}
    assert not (folder / "draft").exists()
    pair = DraftTargetPair.from_pretrained(folder)
    assert type(pair.draft) is type(draft)
    assert torch.equal(pair.generate(**prompts(3), **GREEDY), plain(target, 3))
    assert pair.report.sources.keys() <= {kind.replace("_", " ")}  # a text that never repeats has no suffix
    pair.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / PAIR_CONFIG_NAME).read_text() == (folder / PAIR_CONFIG_NAME).read_text()
    pair = DraftTargetPair.from_pretrained(folder, draft=tiny(seed=1))  # a model may take its place
    assert isinstance(pair.draft, PreTrainedModel)
    pair.save_pretrained(tmp_path / "with model")
    assert getattr(PairConfig.from_file(tmp_path / "with model" / PAIR_CONFIG_NAME), kind) is None


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
def test_a_head_is_saved_with_its_exit(tmp_path: Path):
    folder, target = tmp_path / "pair", predicting()
    saved = DraftTargetPair(target, with_trained_head(target, bias=True))
    saved.save_pretrained(folder)
    assert json.loads((folder / PAIR_CONFIG_NAME).read_text())["early_exit"] == {"exit_layer": 1, "head": True}
    pair = DraftTargetPair.from_pretrained(folder)
    assert torch.equal(drafts_of(pair), drafts_of(saved))
    assert not torch.equal(drafts_of(pair), drafts_of(DraftTargetPair(target, EarlyExitDraft(1))))
    pair.save_pretrained(tmp_path / "again")
    for name in (PAIR_CONFIG_NAME, HEAD_NAME):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    half = DraftTargetPair.from_pretrained(folder, dtype=torch.bfloat16)
    assert half.draft.head.weight.dtype == torch.bfloat16


def test_a_draft_by_the_name_of_commands(tmp_path: Path):
    """That of a model is loaded at once, so that it is told from others, as any draft of a pair."""
    target = tiny(vocab_size=SIZE)
    assert DraftTargetPair(target, "exit:1").draft.exit_layer == 1
    assert isinstance(DraftTargetPair(target, "suffix").draft, SuffixDraft)
    for seed in (1, 2):
        tiny(vocab_size=SIZE, seed=seed).save_pretrained(tmp_path / str(seed))
    one, other = (DraftTargetPair(target, tmp_path / name, tiny_tokenizer()) for name in "12")
    assert one.models[1:] == [one.draft]
    assert arguments_of(one, 0, {}) != arguments_of(other, 0, {})


def other_tensors(path: Path, **tensors: torch.Tensor) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "has no exit_head.safetensors: weights are missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "exit_head.safetensors is not whole"),
        (lambda path: other_tensors(path, weight=torch.zeros(3, 3)), "the head of this target is a weight"),
        (lambda path: other_tensors(path, weight=torch.zeros(32, 32).long()), "the head of this target is a weight"),
        (lambda path: path.rename(path.parent.parent / "x") and path.symlink_to(path.parent.parent / "x"), "a link"),
    ],
)
def test_heads_that_are_refused(tmp_path: Path, damage, message: str):
    """By the package and by what finds the draft of a loaded target."""
    target, folder = tiny(), tmp_path / "pair"
    DraftTargetPair(target, with_trained_head(target)).save_pretrained(folder)
    damage(folder / HEAD_NAME)
    with pytest.raises(ValueError, match=message):
        DraftTargetPair.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with counting(model) as forwards, pytest.raises(ValueError, match=message):
        generate(**prompts(1), **GREEDY, model=model)
    assert not forwards


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (SuffixDraft(pool=SuffixPool()), "a pool of texts is not saved with a pair; use SuffixDraft without it"),
        (SuffixDraft(100), "max_candidates is 100, no int from 1 to 64"),
        ([SuffixDraft()], "saved with a model, a SuffixDraft or an EarlyExitDraft, and its draft is a list"),
        (EarlyExitDraft(1, head=torch.nn.Identity()), "a square torch.nn.Linear as the head .* is Identity"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, draft, message: str):
    with pytest.raises(ValueError, match=message):
        DraftTargetPair(tiny(), draft).save_pretrained(tmp_path / "pair")
    assert not (tmp_path / "pair").exists()


@pytest.fixture(scope="module")
def target():
    return tiny(vocab_size=SIZE, num_hidden_layers=8)


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory) -> Path:
    return write(random_head(vocab=SIZE, draft_vocab=100), tmp_path_factory.mktemp("head"), "specforge")


@pytest.fixture
def pair(target, head_folder) -> DraftTargetPair:
    pair = DraftTargetPair(target, DraftHead.from_pretrained(head_folder, target=target), tiny_tokenizer())
    pair.config.num_draft_tokens = 2
    return pair


FORMS = {  # of heads whose config says how their blocks are drafted
    "dflash2": {"form": "z-lab 2"},
    "domino": {"form": "domino"},
    "dspark": {"form": "specforge dspark", "markov": "rnn"},
    "dflash": {"form": "z-lab", "causal": True, "parts": {"causal_head": True}},
}


@pytest.fixture(scope="module")
def block_pairs(target, tmp_path_factory) -> dict[str, DraftTargetPair]:
    folder, pairs = tmp_path_factory.mktemp("heads"), {}
    for kind, form in FORMS.items():
        head = DraftHead.from_pretrained(write(random_head(kind, vocab=SIZE, **form), folder / kind), target=target)
        pairs[kind] = DraftTargetPair(target, head, tiny_tokenizer())
    return pairs


@pytest.mark.parametrize("kind", ["eagle3", *FORMS])
def test_a_pair_is_saved_and_loaded_with_its_head(kind: str, pair, block_pairs, tmp_path: Path):
    pair = block_pairs.get(kind, pair)
    pair.save_pretrained(tmp_path / "pair")
    again = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert isinstance(again.draft, DraftHead)
    assert again.config.draft.model_type == kind
    same = again.draft.state_dict()
    assert all(torch.equal(same[name], tensor) for name, tensor in pair.draft.state_dict().items())
    assert torch.equal(again.generate(**prompts(3), **GREEDY), plain(pair.target, 3))
    assert again.report.drafted > 0
    if kind == "domino":
        with pytest.raises(ValueError, match="Domino"):
            vllm(again.config, str(tmp_path / "pair"))
        return
    export = vllm(again.config, str(tmp_path / "pair"))
    assert export.speculative_config["method"] == {"dflash2": "dflash"}.get(kind, kind)
    assert any("z-lab's form" in remark for remark in export.remarks) == (kind == "dflash2")


@pytest.mark.parametrize("name", ["suffix", "exit:1", "HEAD", "head:HEAD"])
def test_a_draft_by_its_name_in_place_of_the_pairs_own(name: str, target, head_folder, tmp_path: Path):
    folder, kinds = tmp_path / "pair", {"suffix": SuffixDraft, "exit:1": EarlyExitDraft}
    DraftTargetPair(target, tiny(vocab_size=SIZE, seed=1), tiny_tokenizer()).save_pretrained(folder)
    pair = DraftTargetPair.from_pretrained(folder, draft=name.replace("HEAD", str(head_folder)))
    assert type(pair.draft) is kinds.get(name, DraftHead)
    assert torch.equal(pair.generate(**prompts(3), **GREEDY), plain(target, 3))
    pair.save_pretrained(tmp_path / "again")
    assert type(DraftTargetPair.from_pretrained(tmp_path / "again").draft) is type(pair.draft)


def test_what_stands_in_place_of_a_draft_is_refused(target, tmp_path: Path):
    folder = tmp_path / "pair"
    DraftTargetPair(target, tiny(vocab_size=SIZE, seed=1), tiny_tokenizer()).save_pretrained(folder)
    with pytest.raises(ValueError, match="no head"):
        DraftTargetPair.from_pretrained(folder, draft=f"head:{folder / 'draft'}")
    with pytest.raises(ValueError, match="pair/draft"):
        DraftTargetPair.from_pretrained(folder, draft=folder)


def test_published_pairs_by_string(pair, block_pairs, tmp_path: Path):
    """With what is published alone: transformers loads its code, and that the draft, its head and its tokenizer."""
    target, reports = predicting(), {}
    pairs = {"exit": EarlyExitDraft(1), "spoilt": with_trained_head(target), "suffix": SuffixDraft()}
    pairs = {name: DraftTargetPair(target, draft) for name, draft in pairs.items()}
    gemma = gemma4_target("E2B", vocab_size=48, vocab_size_per_layer_input=48)
    pairs |= {kind: block_pairs[kind] for kind in ("dflash2", "domino")}
    pairs["assistant"] = DraftTargetPair(gemma, assistant_of(gemma))
    pairs |= {"eagle3": pair, "other tokenizer": pair_of("byte-level", "byte-level, other merges")}
    for name, published in pairs.items():
        folder = tmp_path / name
        save(published, folder, with_code=True)
        model = AutoModelForCausalLM.from_pretrained(folder)
        options = {"custom_generate": str(folder), "trust_remote_code": True, "return_dict_in_generate": True}
        output = model.generate(**prompts(4), **GREEDY, **options)
        assert torch.equal(output.sequences, plain(published.target, 4))
        reports[name] = output.speculation_report
        assert type(reports[name]).__module__.startswith("transformers_modules")
    assert reports["exit"].acceptance_rate > 0.9 > reports["spoilt"].acceptance_rate
    assert reports["eagle3"].num_draft_tokens == 4  # that of the call, not the pair's
    assert reports["eagle3"].drafted > 0 < reports["other tokenizer"].drafted
    assert all(reports[kind].drafted > 0 for kind in ("dflash2", "domino", "assistant"))
    assert reports["other tokenizer"].tokenizer_match["match"] == "tokens"
