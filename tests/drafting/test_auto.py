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
def test_costs_and_seed_decide_what_is_drawn_and_the_clock_of_the_call_does_not(mode: str):
    """Costs that calls have filled, after a way through text; what a call sees is kept for later ones.

    There it changes numbers of candidates: rounds that take otherwise than plain steps would count.
    """
    target = tiny()
    draft, texts, numbers = near(target, 0.05), [], []
    teacher = Costs({4: KNOWN}, rounds={4: {0: 1.0}}, clock=Wild(9))
    run(target, prompts(4), SpeculativeDecoding(draft, verification=mode, costs=teacher), **COUPLED)
    saved = teacher.to_dict()
    for seed in range(3):
        costs = Costs.from_dict(saved)
        costs.clock = Wild(seed)
        strategy = SpeculativeDecoding(draft, verification=mode, costs=costs)
        texts.append(run(target, prompts(4), strategy, **COUPLED))
        numbers.append(drafted(strategy))
        assert costs.to_dict()["rounds"] != saved["rounds"]
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(set(numbers[0])) > 2
