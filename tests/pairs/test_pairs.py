"""Pairs: the embedded one, folders, and the wheel that carries it."""

import warnings
from pathlib import Path

import pytest
import torch
from setuptools import find_packages
from tiny import near, prompts, tiny

from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.hub.known_pairs import embedded_folder


@pytest.fixture(scope="module")
def pair() -> DraftTargetPair:
    return DraftTargetPair.embedded()


def test_embedded_is_small_and_speaks_python(pair: DraftTargetPair):
    """So well that its draft is worth it."""
    assert 0 < sum(f.stat().st_size for f in embedded_folder().rglob("*.safetensors")) <= 40 * 2**20
    assert pair.target.dtype == torch.float32
    assert next(pair.draft.parameters()).dtype == torch.bfloat16  # a head is read as it was saved
    text = "def read(self, n=-1):\n    return self.buffer[:n]\n"
    assert pair.tokenizer.decode(pair.tokenizer(text)["input_ids"]) == text
    inputs = pair.tokenizer(pair.prompts[:8], return_tensors="pt", padding=True)
    torch.manual_seed(0)
    pair.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=32, num_draft_tokens=4)
    assert pair.report.alpha > 0.6
    assert pair.report.mean_acceptance_length > 2


def test_coupled_equals_stock_on_real_text(pair: DraftTargetPair):
    inputs = pair.tokenizer(pair.prompts[:4], return_tensors="pt", padding=True)
    settings = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "max_new_tokens": 40}
    torch.manual_seed(0)
    expected = pair.target.generate(**inputs, **settings)
    torch.manual_seed(0)
    output = pair.generate(**inputs, **settings, verification="coupled", num_draft_tokens=4)
    assert torch.equal(output, expected)


def test_the_precision_of_the_embedded_pair_is_that_of_its_device(monkeypatch: pytest.MonkeyPatch):
    """As on a machine with an accelerator."""
    asked = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(DraftTargetPair, "from_pretrained", lambda _, **options: asked.append(options["dtype"]))
    for place in (None, torch.device("cpu"), {"": "cpu"}, "auto", {"model": "cpu", "lm_head": 0}):
        DraftTargetPair.embedded(device_map=place)
    assert asked == [torch.float32] * 3 + ["auto"] * 2


def test_a_folder_of_two_models(tmp_path: Path, pair: DraftTargetPair, monkeypatch: pytest.MonkeyPatch):
    """A local folder named like the alias comes first."""
    target = tiny(vocab_size=pair.target.config.vocab_size)
    DraftTargetPair(target, near(target, 0.1), pair.tokenizer).save_pretrained(tmp_path / "embedded")
    monkeypatch.chdir(tmp_path)
    loaded = DraftTargetPair.from_pretrained("embedded")
    assert loaded.target.config.hidden_size == 32
    output = loaded.generate(**prompts(2), do_sample=False, max_new_tokens=5, num_draft_tokens=2)
    assert torch.equal(output, target.generate(**prompts(2), do_sample=False, max_new_tokens=5))
    assert loaded.report.num_draft_tokens == 2
    assert loaded.strategy.num_draft_tokens == "auto"


def test_a_pair_goes_on_where_it_left_off():
    """Also with options for one call, and with a strategy that its user has put there."""
    target = tiny()
    pair = DraftTargetPair(target, near(target, 0))
    asked = {"num_assistant_tokens": 2, "do_sample": False}
    for strategy in (pair.strategy, SpeculativeDecoding(pair.draft, verification="token")):
        pair.strategy, alphas = strategy, []
        for options in ({}, {"layout": "padded"}, {}):
            pair.generate(**prompts(2), **asked, **options, max_new_tokens=20)
            alphas.append(strategy.costs.alpha["greedy"])
            assert pair.report.layout == options.get("layout", "ragged")
        assert alphas == sorted(set(alphas))  # the draft is always right, which each call shows anew
        assert pair.strategy is strategy


def test_a_report_is_of_its_own_call():
    """Whatever its user has decoded by the pair's strategy before."""
    target = tiny()
    pair, call = DraftTargetPair(target, near(target, 0.1)), prompts(2) | {"do_sample": False, "max_new_tokens": 8}
    target.generate(**call, custom_generate=pair.strategy)
    pair.generate(**call)
    assert pair.report.emitted == pair.strategy.report.emitted == 16


def test_every_file_of_the_package_is_carried_by_its_wheel():
    """Code in packages, and what pyproject.toml names besides; READMEs are for readers of the tree."""
    root, tomllib = Path(__file__).parents[2], pytest.importorskip("tomllib")  # of Python 3.11
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = find_packages(str(root), include=settings["packages"]["find"]["include"])
    named = [*settings["package-data"].items(), *((package, ["*.py"]) for package in packages)]
    globs = [f"{room.replace('.', '/')}/{pattern}" for room, patterns in named for pattern in patterns]
    carried = {path for pattern in globs for path in root.glob(pattern)}
    files = {path for path in (root / "hf_specx").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {path.name for path in files - carried} <= {"README.md"}


def test_a_pair_warns_once_whatever_options_its_calls_have():
    pair = DraftTargetPair(tiny(), tiny())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for more in ({"verification": "token"}, {}, {"verification": "block"}):
            pair.generate(**prompts(1), do_sample=False, max_new_tokens=2, num_draft_tokens=0, **more)
    assert sum("num_draft_tokens=0" in str(one.message) for one in warned) == 1
