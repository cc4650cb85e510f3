"""Early exit as users ask for it: settings, heads, hooks; and what a call leaves alone, whatever happens in it."""

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from accelerate.hooks import ModelHook, add_hook_to_module
from all_pairs import each_value
from exit_cases import GREEDY, Fed, early_exit, run, target
from tiny import prompts, tiny
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

import hf_specx
from hf_specx import EarlyExitDraft, SpeculativeDecoding
from hf_specx.hub.publish import write_code


def state(model: PreTrainedModel) -> tuple:
    """Everything that a call must leave as it is, by identity and by value."""
    attributes = []
    for module in model.modules():
        attributes.append((id(module), sorted((name, id(value)) for name, value in vars(module).items())))
    configs = [id(model.config), model.config.to_dict(), model.generation_config.to_dict()]
    weights = {name: (value.data_ptr(), value.tolist()) for name, value in model.state_dict().items()}
    return attributes, configs, weights


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_the_target_is_left_as_it_was(layout: str):
    """Also by a call that ends with an error, in the middle of a round."""
    model = target()
    run(model, prompts(2))  # transformers itself notes things at its first call
    before, strategy = state(model), early_exit(EarlyExitDraft(1), layout=layout)
    run(model, prompts(2), strategy)
    assert state(model) == before
    for layer in (0, -1):  # in a step of the draft, and where the target has more layers
        calls: list[None] = []

        def failing(*_: Any, calls: list[None] = calls) -> None:
            calls.append(None)
            if len(calls) == 7:
                raise RuntimeError("in the middle")

        handle = model.model.layers[layer].register_forward_pre_hook(failing)
        with pytest.raises(RuntimeError, match="in the middle"):
            run(model, prompts(2), strategy)
        handle.remove()
        assert state(model) == before


def hook(model: PreTrainedModel) -> None:
    """Each forward is replaced by one that is bound to its module."""
    for module in (model, model.model, *model.model.layers):
        add_hook_to_module(module, ModelHook())


CHANGED = {
    "hooked": hook,
    "compiled": lambda model: model.compile(backend="eager"),
    "its forward compiled": lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
}


@pytest.mark.parametrize("how", CHANGED)
def test_the_target_is_not_kept_alive(how: str):
    """Not by its first layers, which alone draft, however it was changed in its place."""
    model, draft = target(), EarlyExitDraft(1)
    expected = EarlyExitDraft(1).first_layers(target())(**prompts(2)).logits
    CHANGED[how](model)
    assert torch.equal(draft.first_layers(model)(**prompts(2)).logits, expected)
    assert len(draft.models) == 1
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert not draft.models


def test_a_target_that_was_changed_since():
    """Its first layers are those that it has now; as long as it is the same, so are they."""
    model, draft = target(), EarlyExitDraft(2)
    layers = draft.first_layers(model)
    model.generation_config = GenerationConfig(pad_token_id=0)
    assert draft.first_layers(model) is layers
    assert layers.generation_config is model.generation_config
    model.lm_head = nn.Linear(32, 48, bias=False)
    assert draft.first_layers(model).lm_head is model.lm_head
    model.model.layers = nn.ModuleList(model.model.layers[i] for i in (2, 1, 0))
    assert torch.equal(run(model, prompts(2), early_exit(draft)), run(model, prompts(2)))
    assert draft.first_layers(model).model.layers[0] is model.model.layers[0]


def test_what_cannot_exit_early_is_refused_before_any_forward(monkeypatch: pytest.MonkeyPatch):
    xlm, seen = tiny("xlm", n_layers=2, emb_dim=32, n_heads=2), []
    cases = [
        (target(), EarlyExitDraft(3), "exit_layer=3 leaves out no layer"),
        (tiny(num_hidden_layers=1), EarlyExitDraft(1), "which has 1"),
        (xlm, EarlyExitDraft(1), "no single list"),
        (target(), EarlyExitDraft(1, head=nn.Dropout()), "training mode"),
    ]
    monkeypatch.setattr(PreTrainedModel, "__call__", lambda *arguments, **named: seen.append(arguments))
    for model, draft, message in cases:
        with pytest.raises(ValueError, match=message):
            run(model, prompts(1), SpeculativeDecoding(draft))
    for wrong in (0, 1.0, True, "2", [1]):
        with pytest.raises(ValueError, match="assistant_early_exit="):
            hf_specx.generate(**prompts(1), model=target(), assistant_early_exit=wrong)
    with pytest.raises(ValueError, match="exit_layer=0"):
        EarlyExitDraft(0)
    with pytest.raises(ValueError, match="head is an int"):
        EarlyExitDraft(1, head=3)
    with pytest.raises(ValueError, match="encoder-decoder"):
        EarlyExitDraft(1).first_layers(zoo.build("seq2seq", "t5"))
    assert not seen


def test_a_head_of_its_own():
    """It is no part of the target; one that says nothing changes nothing, another one changes what is drafted."""
    model, inputs, histories = target(), prompts(4), []
    before = state(model)
    for head in (None, nn.Identity(), nn.Linear(32, 32)):
        strategy = early_exit(EarlyExitDraft(2, head=None if head is None else head.eval()))
        assert torch.equal(run(model, inputs, strategy), run(model, inputs))
        histories.append(strategy.report.history)
    assert histories[0] == histories[1] != histories[2]
    assert state(model) == before


@pytest.mark.filterwarnings("ignore:compile=True compiles")
@pytest.mark.usefixtures("traced")
def test_compiled():
    """Forwards are compiled once for all calls with one draft."""
    model, draft, compilations = target(), EarlyExitDraft(2), []
    expected = run(model, prompts(2))
    for _ in range(2):
        strategy = early_exit(draft, compile=True)
        assert torch.equal(run(model, prompts(2), strategy), expected)
        compilations.append(strategy.report.compilations)
        assert strategy.report.accepted > 0
    assert compilations[0] > 0
    assert compilations[1] == 0


@pytest.mark.parametrize(
    ("model_type", "where"), each_value(["llama", "gpt2", "gpt_neox"], ["call", "string", "config", "model"])
)
def test_the_setting_of_transformers_is_an_early_exit(model_type: str, where: str, tmp_path: Path):
    """At a batch size that it refuses itself, and for types where it ignores the number."""
    model, inputs, asked = target(model_type), prompts(3), {"assistant_early_exit": 2}
    expected, settings = run(model, inputs, do_sample=False), GREEDY
    call = partial(hf_specx.generate, model=model)
    if where == "string":
        write_code(tmp_path, str(tmp_path))
        call = partial(model.generate, custom_generate=str(tmp_path), trust_remote_code=True)
    if where in ("call", "string"):
        settings = settings | asked
    elif where == "config":
        settings = {"generation_config": GenerationConfig(**settings, **asked)}
    else:
        model.generation_config.assistant_early_exit = 2
    with Fed(model) as layers:
        output = call(**inputs, **settings, num_draft_tokens=3)
    assert torch.equal(output, expected)
    layers.assert_drafted()
    assert model.generation_config.assistant_early_exit == (2 if where == "model" else None)
