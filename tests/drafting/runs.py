"""Calls with numbers of candidates that change, by the number of the round and of the row."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.common.round import Round
from hf_specx.drafting.draft_length import MAX_DRAFT_TOKENS
from hf_specx.drafting.schedule import Schedule


KNOWN = {"target": {1: 1.0, 9: 1.6}, "draft": 0.1}
GREEDY, COUPLED = {"do_sample": False}, {"do_sample": True, "top_k": 0}
NEW_TOKENS = 60


def run(target: PreTrainedModel, inputs: dict, strategy: SpeculativeDecoding | None = None, **settings: Any):
    torch.manual_seed(5)
    return target.generate(**inputs, **{"max_new_tokens": NEW_TOKENS} | settings, custom_generate=strategy)


def drafted(strategy: SpeculativeDecoding) -> list[int]:
    """Candidates of each step of row 0 behind its prompt."""
    return [record.drafted for record in strategy.report.history[0][1:]]


class Forced(Schedule):
    """Given numbers in turns; each row is `between` rounds ahead of the row before."""

    def __init__(self, numbers: Sequence[int], between: int = 0):
        super().__init__(MAX_DRAFT_TOKENS)
        self.numbers, self.between, self.rounds = numbers, between, 0

    def number(self, row: int) -> int:
        return self.numbers[(self.rounds + self.between * row) % len(self.numbers)]

    def observe(self, done: Round) -> None:
        self.rounds += any(done.before)  # which the prompts' own step has not


def in_turns(monkeypatch: pytest.MonkeyPatch, numbers: Sequence[int], between: int = 0) -> None:
    """Have calls draft so many candidates, round by round."""
    monkeypatch.setattr("hf_specx.engine.run.Run._make_schedule", lambda run: Forced(numbers, between))
