"""Compiled forwards, on CUDA captured in graphs: the tokens of eager decoding and of plain `generate`."""

from functools import cache
from typing import Any

import pytest
import torch
from device import DEVICE, moved, on_device
from tiny import near, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.models.compiled import has_compiler


pytestmark = [
    *on_device,
    pytest.mark.filterwarnings("ignore:compile=True compiles"),
    pytest.mark.skipif(not has_compiler(DEVICE.type), reason="torch finds no compiler"),
]
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 30}
ENDS = {"eos_token_id": [29, 32, 38], "pad_token_id": 0}


@cache
def pair(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny(model_type, num_hidden_layers=2 if model_type == "qwen2" else 1)  # one of two with a window
    draft = near(target, 0.05)
    return target.to(DEVICE), draft.to(DEVICE)


def text(model_type: str, rows: int, strategy: SpeculativeDecoding | None = None, **call: Any) -> torch.Tensor:
    target, _ = pair(model_type)  # before the seed, since making it draws
    torch.manual_seed(3)
    return target.generate(**moved(prompts(rows)), **call, custom_generate=strategy)


@pytest.mark.parametrize(
    ("model_type", "rows", "ends"),
    [("llama", 1, {}), ("llama", 3, {}), ("llama", 3, ENDS), ("llama", 8, {}), ("gpt2", 3, {}), ("qwen2", 3, {})],
)
def test_equals_generate(model_type: str, rows: int, ends: dict, record_property):
    """Where rows end one after another, smaller sizes follow; a second call finds all of them compiled."""
    _, draft = pair(model_type)
    for call in (SAMPLED | ends, {"do_sample": False, "max_new_tokens": 30} | ends):
        expected, compilations = text(model_type, rows, **call), []
        for _ in range(2):
            strategy = SpeculativeDecoding(draft, num_draft_tokens=2, verification="coupled", compile=True)
            assert torch.equal(text(model_type, rows, strategy, **call), expected)
            compilations.append(strategy.report.compilations)
        assert compilations[1] == 0
        record_property("compilations", compilations[0])


@pytest.mark.parametrize("verification", ["block", "token"])
def test_equals_eager(verification: str):
    _, draft = pair("llama")
    options = {"num_draft_tokens": 2, "verification": verification}
    strategies = [SpeculativeDecoding(draft, compile=compiles, **options) for compiles in (True, False)]
    assert torch.equal(*(text("llama", 3, strategy, **SAMPLED) for strategy in strategies))
