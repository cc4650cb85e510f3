"""The examples of docstrings run, and show what they say."""

import doctest
import importlib
import pkgutil
from importlib.util import find_spec
from threading import Thread
from types import SimpleNamespace
from typing import Any

import evaluate
import pytest
from head_files import random_head, write
from tiny import near, tiny
from transformers import PreTrainedTokenizerFast

import hf_specx
from hf_specx import metrics
from hf_specx.hub.known_pairs import embedded_folder


NEEDS = {"hf_specx.pairs.lm_eval_model": "lm_eval"}  # what a module needs that may not be installed
MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(hf_specx.__path__, "hf_specx.")
    if not found.name.endswith("__main__") and (found.name not in NEEDS or find_spec(NEEDS[found.name]))
]
EXAMPLES = {
    test.name: test
    for module in MODULES
    for test in doctest.DocTestFinder(exclude_empty=True).find(module)
    if test.examples and test.globs.get("__name__") == module.__name__
}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[str, Any]:
    """What an example may take for given."""
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path)
    monkeypatch.chdir(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded_folder())
    model = tiny(vocab_size=len(tokenizer), max_position_embeddings=512, num_hidden_layers=5)
    write(random_head(vocab=len(tokenizer), layer_ids=(1, 2, 3)), tmp_path / "org" / "head")
    prompts, draft_model = ["import os", "def main("], near(model, 0.1)
    inputs = dict(tokenizer(prompts, return_tensors="pt", padding=True))
    strategy, trainer = hf_specx.SpeculativeDecoding(draft_model), SimpleNamespace(train=lambda: None)
    pair = hf_specx.DraftTargetPair(model, draft_model, tokenizer)
    given = {name: getattr(hf_specx, name) for name in hf_specx.__all__} | {"hf_specx": hf_specx, "path": metrics.path}
    given |= {"model": model, "draft_model": draft_model, "tokenizer": tokenizer, "inputs": inputs, "prompts": prompts}
    given |= {"strategy": strategy, "trainer": trainer, "pair": pair, "Thread": Thread}
    return given | {name: evaluate.load(metrics.path(name)) for name in metrics.NAMES}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_shows_what_it_says(name: str, names: dict[str, Any]):
    for example in EXAMPLES[name].examples:
        if example.want:
            assert repr(eval(example.source, names)) == example.want.strip()
        else:
            exec(example.source, names)


def test_there_are_examples():
    assert {"SpeculativeDecoding", "BatchStreamer"} <= {name.rpartition(".")[2] for name in EXAMPLES}
