"""Contenders by name: each generates in its way and leaves the models as they were."""

import pytest
import torch
from bench_cases import tiny_pair
from transformers import CompileConfig

from hf_specx.bench import contenders
from hf_specx.bench.contenders import Contender, stock_settings
from hf_specx.bench.ways import OUR_KINDS, Way, way


EXITS = ("exit-5", "exit:2", "exit:0-5", "exit:a-5", "exit:-auto", "stock:", "block:2-5", "lookup:2-10")  # wrong ones
OPTIONS = {"do_sample": False, "max_new_tokens": 8}


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("plain", ("plain", None, False)),
        ("plain-compiled", ("plain", None, True)),
        ("stock", ("stock", None, False)),
        ("stock-5", ("stock", 5, False)),
        ("block-5", ("block", 5, False)),
        ("token-auto", ("token", "auto", False)),
        ("coupled-12-compiled", ("coupled", 12, True)),
        ("suffix-auto", ("suffix", "auto", False)),
        ("exit:2-auto", ("exit", "auto", False, 2)),
        ("stock:3", ("stock", None, False, 3)),
        ("stock:3-5", ("stock", 5, False, 3)),
    ],
)
def test_names(name, means):
    assert way(name) == Way(*means)


@pytest.mark.parametrize(
    "name",
    ["", "plain-5", "stock-auto", "stock-5-compiled", "block", "block-0", "block-x", "block-5-6", "greedy-5", *EXITS],
)
def test_names_that_mean_nothing(name):
    with pytest.raises(ValueError, match=r"is unknown; give plain"):
        way(name)


@pytest.mark.parametrize(
    "name", ["plain", "stock", "stock-3", "stock:1-2", "exit:1-2", "suffix-3", "block-3", "token-3"]
)
def test_all_are_greedy_alike(name):
    pair = tiny_pair()
    inputs = pair.inputs(1, 5, 8, seed=0)
    expected = pair.target.generate(**inputs, **OPTIONS)
    contender = Contender(name, pair.target, pair.draft)
    assert torch.equal(contender(inputs, OPTIONS), expected)
    assert (contender.report is not None) == (way(name).kind in OUR_KINDS)


def test_stock_drafts_as_many_as_it_is_told(monkeypatch):
    pair = tiny_pair()
    seen = []
    generate = type(pair.target).generate

    def note(model, *args, **kwargs):
        settings = pair.draft.generation_config
        if "assistant_model" in kwargs:
            seen.append((settings.num_assistant_tokens, settings.num_assistant_tokens_schedule))
            seen.append(settings.assistant_confidence_threshold)
        return generate(model, *args, **kwargs)

    monkeypatch.setattr(type(pair.target), "generate", note)
    inputs = pair.inputs(1, 5, 8, seed=0)
    before = pair.draft.generation_config.to_dict()
    Contender("stock-3", pair.target, pair.draft)(inputs, OPTIONS)
    Contender("stock", pair.target, pair.draft)(inputs, OPTIONS)
    assert seen[:2] == [(3, "constant"), 0.0]
    assert seen[2:] == [(before.get("num_assistant_tokens"), before.get("num_assistant_tokens_schedule")), None]


@pytest.mark.parametrize("number", [None, 4])
def test_stock_settings_are_put_back_after_an_error(number):
    draft = tiny_pair().draft
    config, before = draft.generation_config, draft.generation_config.to_dict()

    def fail():
        with stock_settings(draft, number):
            draft.generation_config.assistant_confidence_threshold = 0.123  # as transformers does
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draft.generation_config is config
    assert config.to_dict() == before


def test_plain_compiled_compiles(monkeypatch):
    """By the backend that only notes what it was given."""
    graphs = []

    def backend(module, example_inputs):
        graphs.append(module)
        return module

    monkeypatch.setattr(
        contenders, "CompileConfig", lambda mode, dynamic: CompileConfig(backend=backend, mode=None, dynamic=dynamic)
    )
    pair = tiny_pair()
    inputs = pair.inputs(1, 5, 8, seed=0)
    output = Contender("plain-compiled", pair.target, pair.draft)(inputs, OPTIONS)
    torch.compiler.reset()
    assert graphs
    assert torch.equal(output, pair.target.generate(**inputs, **OPTIONS))


def test_plain_that_was_not_compiled_is_not_called_so(monkeypatch):
    pair = tiny_pair()
    monkeypatch.setattr(type(pair.target), "_valid_auto_compile_criteria", lambda *args: False)
    with pytest.raises(RuntimeError, match="has not compiled"):
        Contender("plain-compiled", pair.target, pair.draft)(pair.inputs(1, 5, 8, seed=0), OPTIONS)
