"""Broken and hostile repositories: each is told what is wrong, none runs code, none loads wrongly."""

import shutil
from pathlib import Path

import pytest
import torch
from repositories import Change, code, edit, load, load_draft, pair, pickled, put, ran, weights_equal, with_code
from repository_cases import CASES
from tiny import prompts


COMMIT = "c0ffee" + 34 * "0"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("message", "misuse"), CASES, ids=[message for message, _ in CASES])
def test_what_is_wrong_is_said_and_no_code_is_run(message: str, misuse: Change, folder: Path):
    with pytest.raises(ValueError, match=message):
        misuse(folder)
    assert not ran(folder)


def own_model(folder: Path, ran_in: Path, own: str = "own") -> None:
    """Give a model code of its own, that is a Llama; running it leaves a file in another folder."""
    text = code(ran_in, "") + "from transformers import LlamaConfig, LlamaForCausalLM\n"
    text += "class Config(LlamaConfig):\n    model_type = 'own'\n"
    text += "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    (folder / "own.py").write_text(text)
    classes = {"AutoConfig": f"{own}.Config", "AutoModelForCausalLM": f"{own}.Model"}
    edit("config.json", model_type="own", auto_map=classes)(folder)


def test_code_is_run_where_it_is_trusted(folder: Path):
    """So that what the cases look for would be seen."""
    own_model(folder, folder)
    edit("specx_config.json", target={"model_type": "own"})(folder)
    with pytest.raises(ValueError, match="brings code of its own"):
        load(folder)
    assert not ran(folder)
    loaded = load(folder, trust_remote_code=True)
    assert ran(folder)
    assert weights_equal(loaded.target, pair().target)


@pytest.fixture
def elsewhere(folder: Path, tmp_path: Path) -> Path:
    """The draft's repository, in a cache beside the pair; its code leaves a file in the pair's folder."""
    repository = tmp_path / "hub" / "models--org--draft"
    (repository / "refs").mkdir(parents=True)
    for name in ("main", "c0ffee"):
        (repository / "refs" / name).write_text(COMMIT)
    shutil.move(folder / "draft", repository / "snapshots" / COMMIT)
    for field, value in {"name": "org/draft", "subfolder": "", "fingerprint": None, "model_type": None}.items():
        put(f"draft.{field}", value)(folder)
    return repository / "snapshots" / COMMIT


@pytest.mark.parametrize("revision", [None, "main", "c0ffee", COMMIT])
def test_code_of_another_repository_is_run_at_a_full_commit_only(
    folder: Path, elsewhere: Path, tmp_path: Path, revision: str | None
):
    """Whoever pins the pair has pinned this code too, or it is not run."""
    own_model(elsewhere, folder)
    put("draft.revision", revision)(folder)
    options = {"trust_remote_code": True, "cache_dir": str(tmp_path / "hub")}
    if revision != COMMIT:
        with pytest.raises(ValueError, match="names its repository without a full commit"):
            load(folder, **options)
        edit("config.json", model_type="llama")(elsewhere)  # for which it is not needed
    assert weights_equal(load(folder, **options).draft, pair().draft)
    assert ran(folder) == (revision == COMMIT)


def test_trusted_files_take_no_code_from_third_repositories(folder: Path):
    """transformers would take it from their main branches."""
    own_model(folder, folder, "org/other--own")
    with pytest.raises(ValueError, match="takes code from 'org/other--own.Config', another repository at no commit"):
        load(folder, trust_remote_code=True)
    edit("config.json", model_type="llama", auto_map=...)(folder)
    for kernel in ("org/kernel", "org/kernel@main", "org/kernel:f"):
        edit("config.json", attn_implementation=kernel)(folder)
        with pytest.raises(ValueError, match=f"has attn_implementation='{kernel}', code from elsewhere"):
            load(folder, trust_remote_code=True)
    edit("config.json", attn_implementation=...)(folder)
    edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["org/other--own.T", None]})(folder)
    with pytest.raises(ValueError, match="takes code from 'org/other--own.T'"):
        load(folder, trust_remote_code=True)
    edit("tokenizer_config.json", auto_map=..., tokenizer_class=...)(folder)
    edit("config.json", model_type="own", auto_map={"AutoConfig": "org/other--own.Config"})(folder)
    with pytest.raises(ValueError, match="takes code from 'org/other--own.Config'"):
        load(folder, target=pair().target, trust_remote_code=True)  # the tokenizer alone would be read by it


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


def test_code_and_pickles_that_are_not_needed_are_left_alone(folder: Path):
    """Of a model type that transformers knows, which may keep the name of code that is elsewhere, and beside
    safetensors."""
    with_code("own.py", "Config Model Tokenizer")(folder)
    weights = (folder / "model.safetensors").read_bytes()
    pickled("pytorch_model.bin")(folder)
    (folder / "model.safetensors").write_bytes(weights)
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.T", None]}
    for classes in (own, {"AutoConfig": "org/other--own.Config"}):
        edit("config.json", auto_map=classes)(folder)
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
    edit("generation_config.json", cache_implementation="static")(folder)  # which plain generate has, and so has ours
    assert torch.equal(load(folder).generate(**prompts(2), do_sample=False, max_new_tokens=4), text)
    edit("generation_config.json", cache_implementation=...)(folder)
    for name, value in {"num_beams": 3, "dola_layers": "low"}.items():
        edit("generation_config.json", **{name: value})(folder)
        with pytest.raises(ValueError, match=name):
            load(folder).generate(**prompts(2), do_sample=False, max_new_tokens=4)
        edit("generation_config.json", **{name: ...})(folder)
    assert not ran(folder)
