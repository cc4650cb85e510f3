"""The draft of callers who name none: where it is looked for, loaded once, and gone with its target."""

import gc
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from tiny import Forwards, near, prompts, tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_specx
from hf_specx import DraftTargetPair, resolve
from hf_specx.hub import write_repository


SETTINGS = {"do_sample": True, "max_new_tokens": 12}
OURS = {"num_draft_tokens": 3, "verification": "block"}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny()


def publish(folder: Path, target: PreTrainedModel, noise: float, **where: str) -> Path:
    """A repository in a folder, whose draft has moved so far from its target."""
    pair = DraftTargetPair(target, near(target, noise))
    pair.config.num_draft_tokens, pair.config.verification = OURS["num_draft_tokens"], OURS["verification"]
    write_repository(pair, folder, **where)
    return folder


def expected(target: PreTrainedModel, noise: float) -> torch.Tensor:
    torch.manual_seed(0)
    return hf_specx.generate(**prompts(3), **SETTINGS, **OURS, model=target, draft_model=near(target, noise))


def by_string(model: PreTrainedModel, folder: Path, **kwargs) -> torch.Tensor:
    torch.manual_seed(0)
    loaded = {"custom_generate": str(folder), "trust_remote_code": True}
    return model.generate(**prompts(3), **SETTINGS, **loaded, **kwargs)


def test_a_folder_by_string(target: PreTrainedModel, tmp_path: Path):
    """With the options that the pair recommends."""
    folder = publish(tmp_path / "pair", target, 0.1)
    assert torch.equal(by_string(target, folder), expected(target, 0.1))


def test_a_folder_whose_code_is_bound_to_the_model(target: PreTrainedModel, tmp_path: Path):
    folder = publish(tmp_path / "pair", target, 0.1)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    torch.manual_seed(0)
    assert torch.equal(model.generate(**prompts(3), **SETTINGS), expected(target, 0.1))


def test_the_package_finds_it_beside_the_target(target: PreTrainedModel, tmp_path: Path):
    folder = publish(tmp_path / "pair", target, 0.1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    assert torch.equal(hf_specx.generate(**prompts(3), **SETTINGS, model=model), expected(target, 0.1))


def test_a_draft_that_is_given_comes_first(target: PreTrainedModel, tmp_path: Path):
    folder = publish(tmp_path / "pair", target, 0.1)
    given = near(target, 0.4)
    with Forwards(given) as drafted:
        output = by_string(target, folder, assistant_model=given, **OURS)
    assert drafted.ids
    assert torch.equal(output, expected(target, 0.4))


def test_two_folders_of_one_name_have_each_its_own_draft(target: PreTrainedModel, tmp_path: Path):
    """transformers loads code under the name of its folder, once for the same content."""
    near_by, far = (publish(tmp_path / str(n) / "pair", target, noise) for n, noise in ((0, 0.1), (1, 0.4)))
    for _ in range(2):
        assert torch.equal(by_string(target, near_by), expected(target, 0.1))
        assert torch.equal(by_string(target, far), expected(target, 0.4))
    assert not torch.equal(expected(target, 0.1), expected(target, 0.4))


def test_the_code_of_one_pair_comes_before_the_folder_of_the_target(target: PreTrainedModel, tmp_path: Path):
    near_by, far = (publish(tmp_path / str(n) / "pair", target, noise) for n, noise in ((0, 0.1), (1, 0.4)))
    model = AutoModelForCausalLM.from_pretrained(near_by)
    assert torch.equal(by_string(model, far), expected(target, 0.4))


def test_a_folder_that_was_moved_is_found_beside_its_target(target: PreTrainedModel, tmp_path: Path):
    publish(tmp_path / "pair", target, 0.1)
    moved = shutil.move(tmp_path / "pair", tmp_path / "moved")
    model = AutoModelForCausalLM.from_pretrained(moved)
    assert torch.equal(by_string(model, moved), expected(target, 0.1))
    with pytest.raises(ValueError, match=r"no draft: pass draft_model= or assistant_model=.*not there.*target was lo"):
        by_string(target, moved)


def test_a_draft_is_loaded_once_and_goes_with_its_target(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, loads = publish(tmp_path / "pair", target, 0.1), []
    load = resolve.load_model
    monkeypatch.setattr(resolve, "load_model", lambda *args, **kwargs: loads.append(args) or load(*args, **kwargs))
    model = AutoModelForCausalLM.from_pretrained(folder)
    for _ in range(3):
        hf_specx.generate(**prompts(2), max_new_tokens=3, model=model)
    (found,) = resolve.LOADED[model].values()
    draft = weakref.ref(found.draft)
    assert len(loads) == 1
    del model, found
    gc.collect()
    assert draft() is None
    assert not any(str(folder) in source for loaded in resolve.LOADED.values() for source, _ in loaded)


def test_another_precision(target: PreTrainedModel, tmp_path: Path):
    """A draft has that of its target."""
    folder = publish(tmp_path / "pair", target, 0.1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    hf_specx.generate(**prompts(2), max_new_tokens=3, model=model)
    (found,) = resolve.LOADED[model].values()
    assert found.draft.dtype == torch.float64
    assert not found.draft.training


def test_a_target_that_is_not_the_one_that_was_measured(target: PreTrainedModel, tmp_path: Path):
    """It is named, and its text is right all the same."""
    folder = publish(tmp_path / "pair", target, 0.1)
    other = tiny(seed=3, num_hidden_layers=1)
    with pytest.warns(UserWarning, match="differs in parameters from the one that the pair was measured with"):
        output = by_string(other, folder, verification="coupled")
    torch.manual_seed(0)
    assert torch.equal(output, other.generate(**prompts(3), **SETTINGS))


def test_the_number_of_a_call_counts_more_than_that_of_a_pair(target: PreTrainedModel, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(publish(tmp_path / "pair", target, 0.1))
    for given in ({"num_assistant_tokens": 2}, {"num_draft_tokens": 2}):
        output = hf_specx.generate(**prompts(1), **given, max_new_tokens=9, model=model, return_dict_in_generate=True)
        assert output.speculation_report.num_draft_tokens == 2


def test_nothing_is_run_without_trust(target: PreTrainedModel, tmp_path: Path):
    folder = publish(tmp_path / "pair", target, 0.1)
    (folder / "custom_generate" / "generate.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(**prompts(1), max_new_tokens=2, custom_generate=str(folder), trust_remote_code=False)
    DraftTargetPair.from_pretrained(folder)
    assert not (tmp_path / "ran").exists()
