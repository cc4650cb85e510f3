"""transformers' `assistant_early_exit`, wherever it may stand, and a target that changes between calls."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from exit_cases import GREEDY, NEW_TOKENS, Layers, made, run, target
from tiny import prompts
from transformers import AutoTokenizer, GenerationConfig, pipeline

import hf_specx
from hf_specx import EarlyExitDraft
from hf_specx.hub.flatten import PACKAGE
from hf_specx.hub.publish import write_code


@pytest.mark.parametrize("where", ["call", "config", "model"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox"])
def test_the_setting_of_transformers_is_an_early_exit(model_type: str, where: str):
    """At a batch size that it refuses itself, and for types where it ignores the number."""
    model, inputs, asked = target(model_type), prompts(3), {"assistant_early_exit": 2}
    expected, settings = run(model, inputs, do_sample=False), GREEDY
    if where == "call":
        settings = settings | asked
    elif where == "config":
        settings = {"generation_config": GenerationConfig(**settings, **asked)}
    else:
        model.generation_config.assistant_early_exit = 2
    with Layers(model) as layers:
        output = hf_specx.generate(**inputs, **settings, num_draft_tokens=3, model=model)
    assert torch.equal(output, expected)
    assert layers.forwards < NEW_TOKENS
    assert layers.steps > 0
    assert model.generation_config.assistant_early_exit == (2 if where == "model" else None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (100, "assistant_early_exit=100 leaves out no layer of LlamaForCausalLM, which has 3; give 1 to 2"),
        (0, "assistant_early_exit=0 is not an int of 1 or more"),
    ],
)
def test_the_setting_is_named_where_it_is_wrong(given: int, message: str):
    model = target()
    with Layers(model) as layers, pytest.raises(ValueError, match=message):
        hf_specx.generate(**prompts(1), **GREEDY, assistant_early_exit=given, model=model)
    assert layers.forwards == layers.steps == 0


def test_a_layer_that_is_replaced():
    """The draft goes by the layers that the target has by then."""
    model, strategy = copy.deepcopy(target()), made(EarlyExitDraft(2))
    run(model, prompts(2), strategy)
    other = target(seed=3).model.layers[0]
    model.model.layers[0] = other
    expected = run(model, prompts(2))
    seen = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(1))
    with Layers(model) as layers:
        assert torch.equal(run(model, prompts(2), strategy), expected)
    handle.remove()
    assert len(seen) == layers.forwards + layers.steps
    assert layers.steps > 0


@pytest.mark.parametrize("way", ["folder", "pipeline"])
def test_the_setting_by_string(tmp_path: Path, way: str):
    tokenizer = AutoTokenizer.from_pretrained(PACKAGE / "hub" / "embedded")
    model = target(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    write_code(tmp_path, str(tmp_path))
    asked: dict[str, Any] = {"custom_generate": str(tmp_path), "trust_remote_code": True, "assistant_early_exit": 2}
    settings = GREEDY | {"pad_token_id": tokenizer.pad_token_id}
    if way == "folder":
        expected = run(model, prompts(2), **settings).tolist()
    else:
        write = pipeline("text-generation", model=model, tokenizer=tokenizer)
        expected = write(["def main(", "import"], batch_size=2, **settings)
    with Layers(model) as layers:
        if way == "folder":
            output = model.generate(**prompts(2), **settings, **asked, num_draft_tokens=3).tolist()
        else:
            output = write(["def main(", "import"], batch_size=2, **settings, **asked, num_draft_tokens=3)
    assert output == expected
    assert 0 < layers.forwards < NEW_TOKENS
    assert layers.steps > 0
