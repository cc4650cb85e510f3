"""What is kept of the noise of plain sampling, and its precision; that it is plain's is in test_equality.py."""

import pytest
import torch

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft
from hf_specx.sampling import noise as module
from hf_specx.sampling import rules
from hf_specx.sampling.noise import StockNoise
from hf_specx.sampling.rules import CoupledRule
from hf_specx.sampling.verify import race


def test_few_states_are_kept_of_a_long_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LATEST_STATES", 8)
    monkeypatch.setattr(module, "STATE_EVERY", 4)
    noise = StockNoise(2, torch.device("cpu"))
    for position in (*range(38), 3, 11, 37, 0, 21):
        noise.at([0, 1], [0, 0], torch.empty(2, 1, 7), position)
    assert list(noise.states) == [*range(0, 31, 4), *range(31, 39)]


@pytest.mark.parametrize(("most", "drawn"), [(2**30, []), (4 * 2 * 7 * 4, [5, 5, 6]), (0, [4, 4, 5, 5, 6])])
def test_noise_is_held_for_those_behind(most: int, drawn: list[int], monkeypatch: pytest.MonkeyPatch):
    """Each position is drawn once while there is memory for it, and what all rows have passed is let go."""
    monkeypatch.setattr(module, "MOST_HELD", most)  # bytes, in the second case of four positions
    positions, draw = [], StockNoise._draw
    monkeypatch.setattr(StockNoise, "_draw", lambda self, t: (positions.append(t), draw(self, t))[1])
    noise = StockNoise(2, torch.device("cpu"))
    like = torch.empty(2, 3, 7)
    for counts in ([0, 0], [1, 3], [1, 4], [2, 5]):
        noise.at([0, 1], counts, like, ahead=0)
    assert sorted(positions) == sorted([*range(8), *drawn])
    assert min(noise.held) == 2
    assert len(noise.held) == (6 if most > 1000 else 4 if most else 3)


@pytest.mark.parametrize("seeds", [None, [3, 4]])
def test_noise_has_the_precision_of_the_target(seeds: list | None, monkeypatch: pytest.MonkeyPatch):
    """On a GPU other numbers are drawn for another; a stateful processor may give one that the draft does not have."""
    rule, seen = CoupledRule(2, torch.device("cpu"), seeds), []
    monkeypatch.setattr(rules, "race", lambda probs, noise: (seen.append(noise.dtype), race(probs, noise))[1])
    rule.begin()
    batch = Batch(torch.ones(2, 4, dtype=torch.int64), None, 0)
    draft = Draft(torch.empty(2, 0, dtype=torch.int64), [0, 0])
    rule.judge(batch, draft, torch.zeros(2, 1, 7, dtype=torch.float64))
    rule.choose(batch, torch.zeros(2, 7), 1, [2, 2])
    assert seen == [torch.float64, torch.float64]
