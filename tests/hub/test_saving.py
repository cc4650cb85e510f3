"""Saving a pair: whole or not at all, inside or by reference, and loaded again as it was."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from card_cases import full
from hub_on_disk import HubOnDisk
from repositories import weights_equal
from tiny import near, prompts, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer
from zoo import build

from hf_specx import DraftTargetPair
from hf_specx.common.drafts import PAIR_CONFIG_NAME
from hf_specx.hub.facts import tokenizer_facts
from hf_specx.hub.fetch import fingerprint
from hf_specx.hub.pair_config import ModelSource, PairConfig, SavedCosts, TokenizerFacts
from hf_specx.hub.publish import reference_to, save


EMBEDDED = Path(__file__).parents[2] / "hf_specx" / "hub" / "embedded"
COSTS = SavedCosts("a clock", "float32", {"2": {"target": {"1": 1.0, "9": 2.0}, "draft": 0.25}}, {"block": 0.5})


@pytest.fixture
def pair() -> DraftTargetPair:
    target, config = tiny(vocab_size=4096), full(target=ModelSource(), draft=ModelSource(), costs=COSTS)
    config.prompts = ["a", "b"]
    return DraftTargetPair(target, near(target, 0.1), AutoTokenizer.from_pretrained(EMBEDDED), config)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("role", ["target", "draft"])
def test_adapters_are_merged_before(pair: DraftTargetPair, tmp_path: Path, role: str):
    """They are not in the files of a model."""
    adapter = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    getattr(pair, role).model.layers[0].mlp.up_proj = adapter(32, 64, bias=False)
    with pytest.raises(ValueError, match="merge_and_unload"):
        pair.save_pretrained(tmp_path / "pair")
    assert not list(tmp_path.iterdir())


def test_a_pair_comes_back_as_it_was(pair: DraftTargetPair, tmp_path: Path, recwarn: pytest.WarningsRecorder):
    before = pair.config.to_text()
    pair.save_pretrained(tmp_path / "pair")
    assert pair.config.to_text() == before
    loaded = DraftTargetPair.from_pretrained(tmp_path / "pair")
    assert not [warned for warned in recwarn if "measured with" in str(warned.message)]
    assert weights_equal(loaded.target, pair.target)
    assert weights_equal(loaded.draft, pair.draft)
    assert loaded.tokenizer.get_vocab() == pair.tokenizer.get_vocab()
    for name in ("num_draft_tokens", "verification", "layout", "costs", "measurements", "prompts", "license", "notes"):
        assert getattr(loaded.config, name) == getattr(pair.config, name)
    assert loaded.config.tokenizers.method == "one"
    assert loaded.config.target.fingerprint == fingerprint(tmp_path / "pair")
    assert loaded.config.draft.fingerprint == fingerprint(tmp_path / "pair" / "draft")
    assert (loaded.config.draft.subfolder, loaded.config.draft.parameters) == ("draft", pair.draft.num_parameters())
    assert weights_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "pair"), pair.target)  # an ordinary model
    assert not list((tmp_path / "pair").rglob("*.bin"))
    loaded.generate(**prompts(2), max_new_tokens=6, do_sample=True)
    report = loaded.report
    assert (report.num_draft_tokens, report.verification, report.layout) == (3, "token", "padded")


def on_hub(pair: DraftTargetPair, hub: HubOnDisk) -> dict[str, str]:
    """Put the target and the draft, which is in a folder of its repository, on the Hub; the commit of each."""
    commits = {}
    for role, folder in (("target", ""), ("draft", "small/")):
        with tempfile.TemporaryDirectory() as work:
            getattr(pair, role).save_pretrained(work)
            files = {f"{folder}{path.name}": path.read_bytes() for path in Path(work).iterdir()}
            commits[role] = hub.put(f"org/{role}", files)
    pair.target.name_or_path, pair.target.config._commit_hash = "org/target", commits["target"]
    pair.sources["draft"], pair.cache_dir = ModelSource("org/draft", commits["draft"], "small"), hub.cache
    return commits


def test_a_pair_whose_models_come_from_elsewhere(pair: DraftTargetPair, tmp_path: Path):
    """By reference to the Hub at a commit; the draft's folder in its repository is not known to the model itself."""
    commits = on_hub(pair, HubOnDisk(tmp_path / "home"))
    pair.save_pretrained(tmp_path / "both", target="reference", draft="reference")
    config = PairConfig.from_file(tmp_path / "both" / PAIR_CONFIG_NAME)
    assert (config.target.name, config.target.revision) == ("org/target", commits["target"])
    assert (config.draft.name, config.draft.revision, config.draft.subfolder) == (
        "org/draft",
        commits["draft"],
        "small",
    )
    assert not list((tmp_path / "both").rglob("*.safetensors"))
    loaded = DraftTargetPair.from_pretrained(tmp_path / "both", cache_dir=pair.cache_dir)
    assert weights_equal(loaded.target, pair.target)
    loaded.save_pretrained(tmp_path / "again", target="reference", draft="reference")
    assert (tmp_path / "again" / PAIR_CONFIG_NAME).read_text() == (tmp_path / "both" / PAIR_CONFIG_NAME).read_text()
    pair.save_pretrained(tmp_path / "one", target="reference")
    loaded = DraftTargetPair.from_pretrained(tmp_path / "one", target=pair.target)
    assert weights_equal(loaded.draft, pair.draft)


def altered(model: torch.nn.Module, change: str) -> None:
    """Change a loaded model, as training and merged adapters do."""
    with torch.no_grad():
        if change == "last number of a weight":
            model.model.layers[-1].mlp.down_proj.weight[-1, -1] += 1
        elif change == "another setting":
            model.config.rope_parameters["rope_theta"] = 5e5
        elif change == "tied no more":
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
        elif change == "buffers":
            weight = model.lm_head.weight.detach()
            del model.lm_head.weight
            model.lm_head.register_buffer("weight", -weight)


CHANGES = {
    "last number of a weight": "its model.layers.1.mlp.down_proj.weight was changed",
    "another setting": "its config has another rope_parameters.rope_theta",
    "tied no more": "lm_head.weight is not in the files",
    "buffers": "its lm_head.weight was changed",
    "nothing": "",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_reference_is_to_what_the_model_is(tmp_path: Path, role: str, change: str):
    """A model that was changed since it was loaded has no place on the Hub; in another precision it has."""
    tied = change == "tied no more"
    models = [tiny(tie_word_embeddings=tied), tiny(seed=1, tie_word_embeddings=tied)]
    pair, hub = DraftTargetPair(*models), HubOnDisk(tmp_path / "home")
    on_hub(pair, hub)
    altered(getattr(pair, role), change)
    references = {"target": "reference", "draft": "reference"}
    if CHANGES[change]:
        with pytest.raises(ValueError, match=f"org/{role}.*{CHANGES[change]}"):
            pair.save_pretrained(tmp_path / "pair", **references)
        assert not (tmp_path / "pair").exists()
        references[role] = "inside"
    else:
        getattr(pair, role).to(torch.bfloat16)
    pair.save_pretrained(tmp_path / "pair", **references)


def test_a_reference_to_layers_that_are_fused_in_memory(tmp_path: Path):
    """The experts of a Mixtral are apart in its files; one of them was changed."""
    model, hub = build("causal", "mixtral"), HubOnDisk(tmp_path / "home")
    pair = DraftTargetPair(model, tiny(vocab_size=model.config.vocab_size))
    on_hub(pair, hub)
    model.save_pretrained(tmp_path / "files")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "files")
    loaded.name_or_path, loaded.config._commit_hash = model.name_or_path, model.config._commit_hash
    for each in (model, loaded):
        again = DraftTargetPair(each, pair.draft)
        again.cache_dir = hub.cache
        assert reference_to(again, "target")[1] == ""
        next(weight for name, weight in each.named_parameters() if "experts" in name).data[-1].mul_(2)
        assert "was changed" in reference_to(again, "target")[1]


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_a_reference_to_a_model_that_is_offloaded(tmp_path: Path, offload: Callable):
    """Its weights are loaded and compared one by one."""
    for last in (0, 1):
        pair, hub = DraftTargetPair(tiny(), tiny(seed=1)), HubOnDisk(tmp_path / f"home {last}")
        on_hub(pair, hub)
        pair.target.lm_head.weight.data[-1] += last
        offload(pair.target, *([tmp_path / f"offloaded {last}"] if offload is disk_offload else []))
        why = reference_to(pair, "target")[1]
        assert why.endswith("its lm_head.weight was changed" if last else "")
        assert bool(why) == bool(last)


def test_a_reference_without_files_to_compare_with(pair: DraftTargetPair, tmp_path: Path):
    pair.sources["draft"], pair.cache_dir = ModelSource("org/draft", "1" * 40), tmp_path
    with pytest.raises(ValueError, match="org/draft at 1{40}.*cache"):
        pair.save_pretrained(tmp_path / "pair", draft="reference")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_that_is_nowhere_is_refused_before_anything_is_written(role: str, tmp_path: Path):
    with pytest.raises(ValueError, match=f"{role}.*no repository"):
        DraftTargetPair(tiny(), tiny(seed=1)).save_pretrained(tmp_path / "pairs" / "one", **{role: "reference"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["new", "pair"])
@pytest.mark.parametrize("step", ["writing", "renaming"])
def test_what_goes_wrong_leaves_nothing(
    pair: DraftTargetPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, step: str
):
    """Also in place of an earlier pair, which stays as it was or is put back."""
    pair.save_pretrained(tmp_path / "pair")
    before, rename, other = content(tmp_path), Path.rename, DraftTargetPair(pair.target, near(pair.target, 0.3))
    if step == "writing":
        monkeypatch.setattr(other.draft, "save_pretrained", lambda *args, **kwargs: 1 / 0)
    else:
        monkeypatch.setattr(Path, "rename", lambda path, to: 1 / 0 if path.name == "new" else rename(path, to))
    with pytest.raises(ZeroDivisionError):
        other.save_pretrained(tmp_path / place, overwrite=True)
    assert content(tmp_path) == before


def test_a_pair_is_replaced_whole(pair: DraftTargetPair, tmp_path: Path):
    """A link to its folder stays one."""
    folder, link = tmp_path / "pair", tmp_path / "link"
    pair.save_pretrained(folder)
    (folder / "left over.safetensors").touch()
    link.symlink_to(folder)
    other = DraftTargetPair(pair.target, near(pair.target, 0.3), pair.tokenizer)
    other.save_pretrained(link, overwrite=True)
    assert link.is_symlink()
    assert not folder.is_symlink()
    assert not (folder / "left over.safetensors").exists()
    assert weights_equal(DraftTargetPair.from_pretrained(folder).draft, other.draft)
    assert {*tmp_path.iterdir()} == {folder, link}


@pytest.mark.parametrize("write", [DraftTargetPair.save_pretrained, partial(save, with_code=True)])
def test_nothing_but_a_pair_is_ever_replaced(write: Callable[..., object], pair: DraftTargetPair, tmp_path: Path):
    """A folder of work, with a pair below it, and a file; an empty folder is as good as none."""
    work, empty = tmp_path / "work", tmp_path / "empty"
    pair.save_pretrained(work / "pair")
    (work / "thesis.txt").write_text("years of it")
    before = content(work)
    for place in (work, work / "thesis.txt"):
        with pytest.raises(ValueError, match="no specx_config.json"):
            write(pair, place, overwrite=True)
    assert content(work) == before
    empty.mkdir()
    write(pair, empty)
    with pytest.raises(ValueError, match="overwrite=True"):
        write(pair, empty)


def test_the_embedded_pair_is_as_its_config_says():
    config = PairConfig.from_file(EMBEDDED / PAIR_CONFIG_NAME)
    assert config.to_text() == (EMBEDDED / PAIR_CONFIG_NAME).read_text()
    assert config.target.fingerprint == fingerprint(EMBEDDED)
    assert config.draft.fingerprint == fingerprint(EMBEDDED / config.draft.subfolder)
    assert config.tokenizers == tokenizer_facts(AutoTokenizer.from_pretrained(EMBEDDED))
    special = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    assert replace(config.tokenizers, vocabulary=None) == TokenizerFacts("one", 4096, special)


@pytest.mark.parametrize(
    ("role", "how"), [("target", "weights"), ("target", "folder"), ("draft", "weights"), ("draft", "model")]
)
def test_what_was_measured_is_of_those_models(role: str, how: str, pair: DraftTargetPair, tmp_path: Path):
    """With others, it is forgotten, and with it what was recommended; texts and notes stay."""
    folder, other = tmp_path / "pair", near(getattr(pair, role), 0.2)
    pair.save_pretrained(folder)
    if how == "model":
        loaded = DraftTargetPair.from_pretrained(folder, **{role: other})
    elif how == "folder":
        other.save_pretrained(tmp_path / "other")
        loaded = DraftTargetPair.from_pretrained(folder, **{role: tmp_path / "other"})
    else:
        other.save_pretrained(folder / ("" if role == "target" else "draft"))
        with pytest.warns(UserWarning, match="specx tune"):
            loaded = DraftTargetPair.from_pretrained(folder)
    loaded.save_pretrained(tmp_path / "again")
    config = PairConfig.from_file(tmp_path / "again" / PAIR_CONFIG_NAME)
    assert (config.costs, config.measurements, config.prompts, config.license) == (None, [], ["a", "b"], "apache-2.0")
    assert (config.num_draft_tokens, config.verification, config.layout) == ("auto", None, "auto")
    assert weights_equal(getattr(DraftTargetPair.from_pretrained(tmp_path / "again"), role), other)


def test_the_same_models_from_elsewhere_keep_what_was_measured(pair: DraftTargetPair, tmp_path: Path):
    pair.save_pretrained(tmp_path / "pair")
    for role in ("target", "draft"):
        getattr(pair, role).save_pretrained(tmp_path / role)
        loaded = DraftTargetPair.from_pretrained(tmp_path / "pair", **{role: tmp_path / role})
        assert loaded.config.costs == COSTS
        assert loaded.config.measurements == pair.config.measurements


def test_a_tokenizer_that_was_changed(pair: DraftTargetPair, tmp_path: Path):
    """It is noted anew, and so is that there is none any more."""
    pair.save_pretrained(tmp_path / "0")
    loaded = DraftTargetPair.from_pretrained(tmp_path / "0")
    loaded.tokenizer.add_special_tokens({"bos_token": "<more>"})
    loaded.save_pretrained(tmp_path / "1")
    again = DraftTargetPair.from_pretrained(tmp_path / "1")
    assert again.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    assert (again.config.tokenizers.tokens, again.config.tokenizers.special_tokens["bos_token"]) == (4097, "<more>")
    again.tokenizer = None
    again.save_pretrained(tmp_path / "2")
    last = DraftTargetPair.from_pretrained(tmp_path / "2")
    assert (last.tokenizer, last.config.tokenizers) == (None, None)
