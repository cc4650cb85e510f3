"""Fixtures of tests that try drafts."""

from dataclasses import replace

import pytest
from tiny import near, tiny
from tiny_tokenizer import tiny_tokenizer
from tune_cases import FREE, SIZES, saved

from hf_specx import SpeculativeDecoding
from hf_specx.bench import tune


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and drafts of all kinds."""
    root = tmp_path_factory.mktemp("models")
    target = tiny(**SIZES)
    models = {
        "target": (target, tiny_tokenizer()),
        "same": (target, tiny_tokenizer()),
        "near": (near(target, 0.1), tiny_tokenizer()),
        "bare": (near(target, 0.1), None),
        "stranger": (tiny(**SIZES), tiny_tokenizer(["some other words"])),
    }
    return {name: saved(root / name, *parts) for name, parts in models.items()}


@pytest.fixture
def costs(monkeypatch):
    """Known times of forwards, by batch size; and each draft pays."""
    table = {1: FREE, 2: FREE}

    def calibrate(strategy, model, input_ids):
        target, draft = table[len(input_ids)]
        strategy.costs.table[len(input_ids)] = {"target": dict(target), "draft": draft}

    monkeypatch.setattr(SpeculativeDecoding, "calibrate", calibrate)
    measured = tune._measurement
    monkeypatch.setattr(tune, "_measurement", lambda *args: replace(measured(*args), measured_speedup=1.5))
    return table
