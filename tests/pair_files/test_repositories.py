"""Broken and hostile repositories: each is told what is wrong, none runs code, none loads wrongly."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from refused import check_of, checks_in, is_refused
from repositories import Change, code, edit, load, load_draft, pair, pickled, ran, with_code
from repository_cases import CASES as OF_CONFIGS
from repository_cases import PLAIN as PLAIN_CONFIGS
from repository_files import CASES as OF_FILES
from repository_files import PLAIN as PLAIN_FILES
from tiny import near, prompts
from transformers import AutoModelForCausalLM

from hf_specx import DraftTargetPair
from hf_specx.common.errors import CHECKS


CASES, PLAIN = OF_CONFIGS | OF_FILES, PLAIN_CONFIGS + PLAIN_FILES
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "pair"
    pair().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "pair"))


def weights_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))


def test_what_is_whole_is_loaded(folder: Path):
    loaded = load(folder)
    assert weights_equal(loaded.target, pair().target)
    assert weights_equal(loaded.draft, pair().draft)
    load_draft(folder)


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The checks that have refused something."""
    names: set[str] = set()

    def noting(name: str, check: Callable[..., str | None]) -> Callable[..., str | None]:
        def ask(*args: object, **kwargs: object) -> str | None:
            message = check(*args, **kwargs)
            names.update([] if message is None else [name])
            return message

        return ask

    for name, check in [*CHECKS.items()]:
        monkeypatch.setitem(CHECKS, name, noting(name, check))
    return names


@pytest.mark.parametrize("case", CASES)
def test_its_check_refuses_it_and_no_other(case: str, folder: Path, speaking: set[str]):
    message, misuse = CASES[case]
    with pytest.raises(ValueError, match=message):
        misuse(folder)
    assert speaking == {check_of(case)}
    assert not ran(folder)


@pytest.mark.parametrize(("message", "misuse"), PLAIN, ids=[case[0] for case in PLAIN])
def test_plain_misuse(message: str, misuse: Change, folder: Path, speaking: set[str]):
    with pytest.raises(ValueError, match=message):
        misuse(folder)
    assert not speaking
    assert not ran(folder)


def test_each_check_has_its_case():
    assert set(map(check_of, CASES)) == checks_in({"pair_files"})
    assert len(OF_CONFIGS.keys() & OF_FILES.keys()) == 0


@pytest.mark.parametrize("case", CASES)
def test_without_its_check_it_is_not_refused(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Nor is any code run then."""
    monkeypatch.setitem(CHECKS, check_of(case), lambda *args, **kwargs: None)
    assert not is_refused(CASES[case], folder)
    assert not ran(folder)


def own_model(folder: Path) -> None:
    """Give a model code of its own, that is a Llama."""
    text = code(folder, "") + "from transformers import LlamaConfig, LlamaForCausalLM\n"
    text += "class Config(LlamaConfig):\n    model_type = 'own'\n"
    text += "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    (folder / "own.py").write_text(text)
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit("config.json", model_type="own", auto_map=classes)(folder)
    edit("specx_config.json", target={"model_type": "own"})(folder)


def test_code_is_run_where_it_is_trusted(folder: Path):
    """So that what the cases look for would be seen."""
    own_model(folder)
    with pytest.raises(ValueError, match="brings code of its own"):
        load(folder)
    assert not ran(folder)
    loaded = load(folder, trust_remote_code=True)
    assert ran(folder)
    assert weights_equal(loaded.target, pair().target)


@pytest.mark.parametrize("bare", [False, True])
def test_pickles_run_code(bare: bool, folder: Path):
    pickled("x.bin", bare)(folder)
    with (folder / "x.bin").open("rb") as file:
        pickle.load(file) if bare else torch.load(file, weights_only=False)
    assert ran(folder)


def test_a_folder_of_code_is_not_looked_at(folder: Path):
    """The `custom_generate` of a pair is for those who have nothing of ours installed, and trust it."""
    with_code("custom_generate/generate.py", "generate")(folder)
    (folder / "setup.py").write_text(code(folder, ""))
    loaded = load(folder)
    load_draft(folder)
    assert not ran(folder)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        loaded.target.generate(**prompts(1), max_new_tokens=2, custom_generate=str(folder), trust_remote_code=False)
    assert not ran(folder)


def test_code_that_transformers_does_not_need_is_not_run(folder: Path):
    """Of a model type that it knows."""
    with_code("own.py", "Config Model Tokenizer")(folder)
    classes = {
        "AutoConfig": "own.Config",
        "AutoModelForCausalLM": "own.Model",
        "AutoTokenizer": ["own.Tokenizer", None],
    }
    edit("config.json", auto_map=classes)(folder)
    assert weights_equal(load(folder).target, pair().target)
    assert not ran(folder)


def test_pickles_beside_safetensors_are_left_alone(folder: Path):
    weights = (folder / "model.safetensors").read_bytes()
    pickled("pytorch_model.bin")(folder)
    (folder / "model.safetensors").write_bytes(weights)
    assert weights_equal(load(folder).target, pair().target)
    assert not ran(folder)


def test_generation_settings_select_nothing_else(folder: Path):
    """What a `generation_config.json` may say is that of a call, and checked there."""
    with_code("custom_generate/generate.py", "generate")(folder)
    foreign = {"custom_generate": str(folder), "trust_remote_code": True, "assistant_model": str(folder)}
    edit("generation_config.json", **foreign)(folder)
    loaded = load(folder)
    text = loaded.generate(**prompts(2), do_sample=False, max_new_tokens=4)
    assert torch.equal(text, pair().target.generate(**prompts(2), do_sample=False, max_new_tokens=4))
    for name, value in {"num_beams": 3, "cache_implementation": "static", "dola_layers": "low"}.items():
        edit("generation_config.json", **{name: value})(folder)
        with pytest.raises(ValueError, match=name):
            load(folder).generate(**prompts(2), do_sample=False, max_new_tokens=4)
        edit("generation_config.json", **{name: ...})(folder)
    assert not ran(folder)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.filterwarnings("default")
def test_weights_that_changed_are_named(role: str, folder: Path, recwarn: pytest.WarningsRecorder):
    load(folder)
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]
    path = folder / ("" if role == "target" else "draft")
    near(AutoModelForCausalLM.from_pretrained(path), 0.01).save_pretrained(path)
    with pytest.warns(UserWarning, match=f"the model in {path} is not the one that the pair was measured with"):
        load(folder)


def test_a_smaller_target_is_named(folder: Path):
    """One that has all its weights, and is another than the pair was measured with."""
    values = json.loads((folder / "specx_config.json").read_text())
    values["target"] |= {"parameters": 10, "fingerprint": None}
    (folder / "specx_config.json").write_text(json.dumps(values))
    with pytest.warns(UserWarning, match="differs in parameters from the one that the pair was measured with"):
        DraftTargetPair.from_pretrained(folder)
