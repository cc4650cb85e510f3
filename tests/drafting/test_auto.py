"""What "auto" drafts, through `generate`, where a fake clock says how long forwards take."""

import pytest
import torch
from runs import COUPLED, KNOWN, drafted, run
from tiny import near, prompts, tiny

from hf_specx import Costs, SpeculativeDecoding


class Wild:
    """A clock that makes no sense, otherwise each time."""

    def __init__(self, seed: int):
        self.generator, self.now = torch.Generator().manual_seed(seed), 0.0

    def __call__(self) -> float:
        self.now += float(torch.rand((), generator=self.generator)) ** 8 * 100
        return self.now


@pytest.mark.parametrize("mode", ["token", "block"])
def test_the_clock_of_a_call_does_not_change_what_it_draws(mode: str):
    """What it saw is kept for later calls; there it does. Rounds that take otherwise than plain steps would count."""
    target = tiny()
    draft, texts, numbers = near(target, 0.05), [], []
    for seed in range(3):
        costs = Costs({4: KNOWN}, rounds={4: {0: 1.0}}, clock=Wild(seed))
        strategy = SpeculativeDecoding(draft, verification=mode, costs=costs)
        texts.append(run(target, prompts(4), strategy, **COUPLED))
        numbers.append(drafted(strategy))
        assert costs.rounds
        assert 4 in costs.table
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(set(numbers[0])) > 2


@pytest.mark.parametrize("mode", ["token", "block"])
def test_two_strategies_with_the_same_costs_emit_the_same(mode: str):
    """Costs that calls have filled, one of them after a way through text."""
    target = tiny()
    draft, costs = near(target, 0.2), Costs({4: KNOWN})
    teacher = SpeculativeDecoding(draft, verification=mode, costs=costs)
    for _ in range(3):
        run(target, prompts(4), teacher, **COUPLED)
    saved, texts, numbers = costs.to_dict(), [], []
    assert saved["rounds"]
    for _ in range(2):
        strategy = SpeculativeDecoding(draft, verification=mode, costs=Costs.from_dict(saved))
        texts.append([run(target, prompts(4), strategy, **COUPLED)])
        numbers.append(drafted(strategy))
    assert torch.equal(texts[0][0], texts[1][0])
    assert numbers[0] == numbers[1]
