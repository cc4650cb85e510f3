"""transformers' `assistant_early_exit`, wherever it may stand, and a target that changes between calls."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exit_cases import GREEDY, NEW_TOKENS, Layers, run, target
from tiny import prompts
from transformers import AutoTokenizer, GenerationConfig, pipeline

import hf_specx
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
