"""Calls with changing numbers of candidates, and what they drafted."""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding


KNOWN = {"target": {1: 1.0, 9: 1.6}, "draft": 0.1}
GREEDY, COUPLED = {"do_sample": False}, {"do_sample": True, "top_k": 0}
NEW_TOKENS = 60


def run(target: PreTrainedModel, inputs: dict, strategy: SpeculativeDecoding | None = None, **settings: Any):
    torch.manual_seed(5)
    return target.generate(**inputs, **{"max_new_tokens": NEW_TOKENS} | settings, custom_generate=strategy)


def drafted(strategy: SpeculativeDecoding) -> list[int]:
    """Candidates of each step of row 0 behind its prompt."""
    return [record.drafted for record in strategy.report.history[0][1:]]
