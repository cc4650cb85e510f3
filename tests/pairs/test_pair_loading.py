"""Loading a pair: where its models go, what is taken in place of them, and whose an argument is."""

import shutil
from pathlib import Path

import pytest
import torch
from repositories import put
from safetensors.torch import load_file
from tiny import Forwards, near, prompts, tiny
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedModel

from hf_specx import DraftTargetPair
from hf_specx.common.devices import execution_device, last_device
from hf_specx.common.drafts import PAIR_CONFIG_NAME
from hf_specx.hub import pair_models
from hf_specx.pairs import loading as pair_loading
from hf_specx.pairs.placement import Placement


SETTINGS = {"do_sample": True, "max_new_tokens": 10}
OURS = {"verification": "coupled", "num_draft_tokens": 3}
ON_DISK = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.rotary_emb": "cpu"}
ON_DISK |= {"model.layers.1": "cpu", "model.norm": "disk", "lm_head": "disk"}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def folder(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pair"
    DraftTargetPair(target, near(target, 0.1)).save_pretrained(path)
    return path


def check_text(pair: DraftTargetPair, target: PreTrainedModel, **options) -> None:
    """Equal to stock's, with fewer forwards of the target than tokens."""
    torch.manual_seed(0)
    expected = target.generate(**prompts(3), **SETTINGS)
    torch.manual_seed(0)
    with Forwards(pair.target) as judged:
        assert torch.equal(pair.generate(**prompts(3), **SETTINGS, **OURS, **options), expected)
    assert 0 < len(judged.ids) < 10


@pytest.mark.parametrize("device_map", [None, "cpu", "auto", {"": "cpu"}, ON_DISK], ids=str)
def test_devices_of_the_target(device_map: object, folder: Path, target: PreTrainedModel, tmp_path: Path):
    pair = DraftTargetPair.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path)
    assert execution_device(pair.target) == last_device(pair.target) == pair.draft.device == torch.device("cpu")
    assert any(p.is_meta for p in pair.target.parameters()) == (device_map is ON_DISK)
    check_text(pair, target)


@pytest.mark.parametrize(
    ("role", "options"),
    [
        ("target", {"device_map": "auto"}),
        ("target", {"quantization_config": object()}),
        ("draft", {"draft_device_map": "cpu"}),
        ("draft", {"draft_kwargs": {"dtype": torch.float64}}),
    ],
)
def test_arguments_for_a_model_that_is_given_are_refused(role: str, options: dict, folder: Path, tmp_path: Path):
    """Before a model is fetched: here there is none. Of a draft without weights they are refused too."""
    name = next(iter(options))
    shutil.copy(folder / PAIR_CONFIG_NAME, tmp_path)
    with pytest.raises(ValueError, match=f"^{name}= .*{role}"):
        DraftTargetPair.from_pretrained(tmp_path, **{role: tiny()}, **options)
    put("suffix", {})(tmp_path)
    put("draft", {})(tmp_path)
    with pytest.raises(ValueError, match="no weights"):
        DraftTargetPair.from_pretrained(tmp_path, draft_device_map="cpu")


def test_whose_an_argument_is(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """One for quantization is the target's alone; others are both models', but what is given for the draft."""
    seen, load = [], pair_models.load_model

    def note(files, *trust_and_target, **kwargs):
        seen.append((files.subfolder, kwargs.pop("quantization_config", None), kwargs.get("attn_implementation")))
        return load(files, *trust_and_target, **kwargs)

    monkeypatch.setattr(pair_models, "load_model", note)
    monkeypatch.setattr(pair_loading, "plan", lambda *args: Placement({}))
    DraftTargetPair.from_pretrained(
        folder, quantization_config="of the target", attn_implementation="eager", draft_kwargs={"dtype": torch.float64}
    )
    assert seen == [("", "of the target", "eager"), ("draft", None, "eager")]


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, target = tmp_path_factory.mktemp("pairs") / "pair", tiny(vocab_size=280)
    DraftTargetPair(target, near(target, 0.1), tiny_tokenizer()).save_pretrained(path)
    return path


def elsewhere(folder: Path, model: PreTrainedModel, template: str | None, texts: tuple[str, ...] = ()) -> Path:
    """A model by itself, perhaps with a tokenizer that can be told from others by its template."""
    model.save_pretrained(folder)
    if template is not None:
        tokenizer = tiny_tokenizer(texts) if texts else tiny_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "templates", [{"target": "target"}, {"draft": None}, {"target": "target", "draft": "draft"}], ids=str
)
def test_whose_tokenizers_there_are(templates: dict[str, str | None], with_tokenizer: Path, tmp_path: Path):
    """A model from elsewhere has its own, if there is one there, and the other keeps that of the pair."""
    others = {role: elsewhere(tmp_path / role, tiny(vocab_size=280), name) for role, name in templates.items()}
    pair = DraftTargetPair.from_pretrained(with_tokenizer, **others)
    assert pair.tokenizer.chat_template == templates.get("target")
    assert pair.draft_tokenizer.chat_template == templates.get("draft")
    used = (pair.strategy.tokenizer, pair.strategy.draft_tokenizer)
    assert used == (pair.tokenizer, pair.draft_tokenizer)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_from_elsewhere_with_another_tokenizer(role: str, with_tokenizer: Path, tmp_path: Path):
    """The draft's tokens are then matched with the target's, with options for the call and without."""
    other = elsewhere(tmp_path / role, tiny(vocab_size=280), "own", ("other words altogether",))
    pair = DraftTargetPair.from_pretrained(with_tokenizer, **{role: other})
    for options in ({}, {"layout": "padded"}):
        check_text(pair, pair.target, **options)
        assert pair.report.tokenizer_match["match"] == "tokens"


@pytest.mark.parametrize("pickled", [("",), ("", "draft")], ids=str)
def test_pickles_where_they_are_trusted(pickled: tuple[str], folder: Path, target: PreTrainedModel, tmp_path: Path):
    """Or safetensors all the same. Both on disk, each in a folder of its own: their weights have the same names."""
    copied = Path(shutil.copytree(folder, tmp_path / "pair"))
    for part in pickled:
        weights = copied / part / "model.safetensors"
        torch.save(load_file(weights), copied / part / "pytorch_model.bin")
        weights.unlink()
    maps = {"device_map": ON_DISK, "draft_device_map": ON_DISK, "offload_folder": tmp_path, "offload_buffers": True}
    pair = DraftTargetPair.from_pretrained(copied, use_safetensors=False, **maps)
    assert all(any(p.is_meta for p in model.parameters()) for model in pair.models)
    check_text(pair, target)
