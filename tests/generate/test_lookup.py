"""transformers' options of prompt lookup, wherever they may stand: a suffix draft, at any batch size."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Forwards, prompts, tiny
from transformers import GenerationConfig, PreTrainedModel

import hf_specx
from hf_specx.hub.publish import write_code


ASKED = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3}
GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}


def repetitive(rows: int) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A target of few tokens, and prompts of them."""
    inputs = prompts(rows)
    return tiny("llama", vocab_size=8), inputs | {"input_ids": inputs["input_ids"] % 8}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each suffix draft that is made."""
    found: list[dict[str, Any]] = []
    init = hf_specx.SuffixDraft.__init__

    def noted(draft, *args, **kwargs):
        found.append({"args": args, **kwargs})
        init(draft, *args, **kwargs)

    monkeypatch.setattr(hf_specx.SuffixDraft, "__init__", noted)
    return found


@pytest.mark.parametrize("asked", [{"prompt_lookup_num_tokens": 4}, ASKED], ids=["number", "number and size"])
@pytest.mark.parametrize("where", ["call", "config", "model", "folder"])
@pytest.mark.parametrize("rows", [1, 4])
def test_in_the_call_and_in_configs(made: list, rows: int, where: str, asked: dict, tmp_path: Path):
    target, inputs = repetitive(rows)
    expected, call = target.generate(**inputs, **GREEDY), partial(hf_specx.generate, model=target)
    settings = {"config": {"generation_config": GenerationConfig(**GREEDY, **asked)}, "model": GREEDY}
    if where == "model":
        target.generation_config.update(**asked)
    elif where == "folder":
        write_code(tmp_path, str(tmp_path))
        call = partial(target.generate, custom_generate=str(tmp_path), trust_remote_code=True)
    with Forwards(target) as forwards:
        assert torch.equal(call(**inputs, **settings.get(where, GREEDY | asked)), expected)
    assert len(forwards.lengths) < 40
    assert 1 < max(forwards.lengths[1:]) <= 5
    if where != "folder":  # whose code is another module
        assert made == [{"args": (4,)} | ({"min_match": 1, "max_match": 3} if asked is ASKED else {})]
