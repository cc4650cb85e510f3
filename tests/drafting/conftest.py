"""What several files of this room use."""

from collections.abc import Callable, Sequence

import pytest
import torch

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round
from hf_specx.drafting.costs import MAX_DRAFT_TOKENS
from hf_specx.drafting.schedule import DraftLengthSchedule
from hf_specx.models.runner import ModelRunner


class Forced(DraftLengthSchedule):
    """Given numbers in turns; each row is `between` rounds ahead of the row before."""

    def __init__(self, numbers: Sequence[int], between: int = 0):
        super().__init__(MAX_DRAFT_TOKENS)
        self.numbers, self.between, self.rounds = numbers, between, 0

    def wanted_length(self, batch: Batch, row: int) -> int:
        return self.numbers[(self.rounds + self.between * row) % len(self.numbers)]

    def observe(self, done: Round) -> None:
        self.rounds += any(done.emitted_before)  # which the prompts' own step has not


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has calls draft so many candidates, round by round."""
    return lambda *numbers: monkeypatch.setattr("hf_specx.engine.run.Run._make_schedule", lambda run: Forced(*numbers))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the logits of each step of a draft are those of a forward of the whole text, without a cache."""
    are_equal, step = [], ModelRunner.decode_step

    def compared_step(runner, batch, ahead, num_unfed=0):
        logits = step(runner, batch, ahead, num_unfed)
        if ahead == 0 and any(batch.counts):
            for index, row in enumerate(batch.rows):
                fresh = runner.model(input_ids=batch.row(row)[None]).logits[0, -1]
                are_equal.append(torch.allclose(fresh, logits[index, -1], atol=1e-3))
        return logits

    monkeypatch.setattr(ModelRunner, "decode_step", compared_step)
    return are_equal
