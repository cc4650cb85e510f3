"""The draft of callers who name none: where it is looked for, loaded once, and gone with its target."""

import copy
import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from repositories import put
from tiny import near, prompts, tiny
from tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_specx
from hf_specx import DraftTargetPair, SpeculationReport
from hf_specx.common.devices import hardware
from hf_specx.hub import find_draft as resolve
from hf_specx.hub.pair_config import ModelSource, PairConfig, SavedCosts
from hf_specx.hub.publish import save


SETTINGS = {"do_sample": True, "max_new_tokens": 12}
OURS = {"num_draft_tokens": 3, "verification": "block"}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny()


def publish(folder: Path, target: PreTrainedModel, noise: float = 0.1) -> Path:
    """A repository in a folder, whose draft has moved so far from its target."""
    config = PairConfig(ModelSource(), ModelSource(subfolder="draft"), **OURS)
    save(DraftTargetPair(target, near(target, noise), config=config), folder, with_code=True)
    return folder


def seeded(generate: Callable, **options) -> torch.Tensor:
    torch.manual_seed(0)
    return generate(**prompts(3), **SETTINGS, **options)


def expected(target: PreTrainedModel, noise: float = 0.1) -> torch.Tensor:
    return seeded(hf_specx.generate, **OURS, model=target, draft_model=near(target, noise))


def by_string(model: PreTrainedModel, folder: Path, **options) -> torch.Tensor:
    return seeded(model.generate, custom_generate=str(folder), trust_remote_code=True, **options)


def test_two_folders_of_one_name_have_each_its_own_draft(target: PreTrainedModel, tmp_path: Path):
    """transformers loads code under the name of its folder, once for the same content."""
    near_by, far = (publish(tmp_path / str(n) / "pair", target, noise) for n, noise in ((0, 0.1), (1, 0.4)))
    texts = expected(target, 0.1), expected(target, 0.4)
    assert not torch.equal(*texts)
    for folder, text in ((near_by, texts[0]), (far, texts[1]), (near_by, texts[0])):
        assert torch.equal(by_string(target, folder), text)


@pytest.mark.parametrize("how", [shutil.move, shutil.copytree])
def test_a_folder_that_was_moved_or_copied_is_complete(target: PreTrainedModel, tmp_path: Path, how: Callable):
    """A copy has its own draft, also after that of the original has become another one."""
    other = how(publish(tmp_path / "pair", target), tmp_path / "other")
    if (tmp_path / "pair").exists():
        near(target, 0.4).save_pretrained(tmp_path / "pair" / "draft")
    model = AutoModelForCausalLM.from_pretrained(other)
    for each in (model, target):
        assert torch.equal(by_string(each, other), expected(target))


def test_code_of_a_folder_that_is_loaded_once(target: PreTrainedModel, tmp_path: Path):
    """The folder is then not known, and that of the target is looked in."""
    folder = publish(tmp_path / "pair", target)
    model = AutoModelForCausalLM.from_pretrained(folder)
    speculative = model.load_custom_generate(str(folder), trust_remote_code=True)
    assert torch.equal(seeded(speculative, model=model), expected(target))
    with pytest.raises(ValueError, match="draft_model="):
        seeded(speculative, model=target)


def test_the_commit_of_a_target_is_looked_for_in_the_cache_of_the_call(target: PreTrainedModel, tmp_path: Path):
    """It holds one commit, and does not say which one is the main branch's."""
    publish(tmp_path / "hub" / "models--org--pair" / "snapshots" / ("c" * 40), target)
    model = copy.deepcopy(target)
    model.name_or_path = "org/pair"
    output = seeded(hf_specx.generate, model=model, cache_dir=str(tmp_path / "hub"))
    assert torch.equal(output, expected(target))


def test_a_draft_is_loaded_once_and_goes_with_its_target(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, loads = publish(tmp_path / "pair", target), []
    find = resolve.find_model
    monkeypatch.setattr(resolve, "find_model", lambda *args: loads.append(args) or find(*args))
    model = AutoModelForCausalLM.from_pretrained(folder)
    for _ in range(2):
        hf_specx.generate(**prompts(2), max_new_tokens=3, model=model)
    (loaded,) = resolve.DRAFTS_OF_PAIRS[model].values()
    draft = weakref.ref(loaded[0])
    assert len(loads) == 1
    del model, loaded
    gc.collect()
    assert draft() is None
    assert not any(str(folder) in source for loaded in resolve.DRAFTS_OF_PAIRS.values() for source, _ in loaded)


def test_a_target_that_is_not_the_one_that_was_measured(target: PreTrainedModel, tmp_path: Path):
    """By its sizes or its commit: that is said, and its text is right all the same."""
    folder = publish(tmp_path / "pair", target)
    put("target.revision", "1" * 40)(folder)
    other = tiny(seed=3, num_hidden_layers=1)
    other.config._commit_hash = "2" * 40
    with pytest.warns(UserWarning, match="parameters, revision"):
        output = by_string(other, folder, verification="coupled")
    assert torch.equal(output, seeded(other.generate))


@pytest.mark.parametrize(
    ("noted", "other", "message"),
    [
        (True, False, None),
        (True, True, "the tokenizer of org/draft ha.* its pair was checked with"),
        (False, True, None),  # its tokens are matched with the target's
    ],
)
def test_the_tokenizer_of_a_draft_elsewhere_is_compared(tmp_path: Path, noted: bool, other: bool, message: str | None):
    """Whether the pair has noted what it was checked with or not."""
    commit = "d" * 40  # of models with one tokenizer of 277 tokens, whose vocabularies are padded to other sizes
    pair = DraftTargetPair(tiny(vocab_size=288), tiny(vocab_size=280, seed=1), tiny_tokenizer())
    save(pair, tmp_path / "pair", with_code=True)
    repository = tmp_path / "hub" / "models--org--draft" / "snapshots" / commit
    shutil.move(tmp_path / "pair" / "draft", repository)
    (tiny_tokenizer(["other words altogether"]) if other else tiny_tokenizer()).save_pretrained(repository)
    changes = {"draft.name": "org/draft", "draft.revision": commit, "draft.subfolder": ""}
    for field, value in (changes | ({} if noted else {"tokenizers": None})).items():
        put(field, value)(tmp_path / "pair")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "pair")
    call = {"model": model, "cache_dir": str(tmp_path / "hub"), "verification": "coupled", "num_draft_tokens": 3}
    if message is None:
        assert torch.equal(seeded(hf_specx.generate, **call), seeded(model.generate))
        return
    with pytest.raises(ValueError, match=message):
        seeded(hf_specx.generate, **call)


def first_number(report: SpeculationReport) -> int:
    """Candidates of the first round that has any; where little is gained, plain steps are timed before."""
    return next(record.drafted for record in report.history[0] if record.drafted)


FREE_DRAFTS = {"3": {"target": {"1": 1.0, "9": 1.0}, "draft": 0.02}}


@pytest.mark.parametrize(("alpha", "number"), [({"block": 0.35}, 3), ({}, 8)])
def test_what_a_pair_has_measured_is_gone_by(
    target: PreTrainedModel, tmp_path: Path, alpha: dict[str, float], number: int
):
    """By string as by the pair: times, and the acceptance that it has seen. None of our forwards would say so."""
    pair = DraftTargetPair(target, near(target, 0.1))
    pair.config.costs = SavedCosts(hardware(torch.device("cpu")), "float32", FREE_DRAFTS, alpha)
    save(pair, tmp_path / "pair", with_code=True)
    loaded = DraftTargetPair.from_pretrained(tmp_path / "pair")
    expected = seeded(loaded.generate, verification="block")
    assert first_number(loaded.report) == number  # then it goes by what it sees
    output = by_string(target, tmp_path / "pair", verification="block", return_dict_in_generate=True)
    assert first_number(output.speculation_report) == number
    assert torch.equal(output.sequences, expected)
