"""What is kept of the noise of plain sampling, and its precision; that it is plain's is in test_equality.py."""

import pytest
import torch

from hf_specx.common.batch import Batch, RowState
from hf_specx.common.round import Draft
from hf_specx.sampling import noise as module
from hf_specx.sampling import verifiers
from hf_specx.sampling.noise import ReplayedNoise
from hf_specx.sampling.verifiers import CoupledVerifier
from hf_specx.sampling.verify import sample_exponential_race


def test_few_states_are_kept_of_a_long_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LATEST_STATES", 8)
    monkeypatch.setattr(module, "STATE_EVERY", 4)
    noise = ReplayedNoise(2, torch.device("cpu"), window=2)
    for position in (*range(38), 3, 11, 37, 0, 21):
        noise.vectors_at([0, 1], [0, 0], torch.empty(2, 1, 7), position)
    assert list(noise.generator_states) == [*range(0, 31, 4), *range(31, 39)]


def test_noise_is_held_for_those_behind(monkeypatch: pytest.MonkeyPatch):
    """Each position is drawn once while rows stay within the window, and what a row has passed is let go."""
    positions, draw = [], ReplayedNoise._draw
    monkeypatch.setattr(ReplayedNoise, "_draw", lambda self, t: (positions.append(t), draw(self, t))[1])
    noise = ReplayedNoise(2, torch.device("cpu"), window=4)
    like = torch.empty(2, 3, 7)
    for counts in ([0, 0], [1, 3], [1, 4], [2, 5]):
        noise.vectors_at([0, 1], counts, like, ahead=0)
    assert positions == list(range(8))
    assert [sorted(vectors) for vectors in noise.drawn] == [[2, 3, 4], [5, 6, 7]]
    noise.vectors_at([0, 1], [4, 8], like, ahead=0)  # 5 and 6 were beyond the window of the row behind
    assert positions[8:] == [5, 6, 8, 9, 10]


@pytest.mark.parametrize(("most", "held"), [(2**30, 12), (0, 3)])
def test_no_more_noise_is_held_than_there_is_memory(most: int, held: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_NOISE_BYTES", most)
    noise = ReplayedNoise(2, torch.device("cpu"), window=100)
    for counts in ([0, 0], [0, 3], [0, 6], [0, 9]):
        noise.vectors_at([0, 1], counts, torch.empty(2, 3, 7), ahead=0)
    assert len(noise.drawn[0]) == held


@pytest.mark.parametrize("seeds", [None, [3, 4]])
def test_noise_has_the_precision_of_the_target(seeds: list | None, monkeypatch: pytest.MonkeyPatch):
    """On a GPU other numbers are drawn for another; a stateful processor may give one that the draft does not have."""
    verifier, seen = CoupledVerifier(2, torch.device("cpu"), 4, seeded=seeds is not None), []

    def sample(probs, noise):
        seen.append(noise.dtype)
        return sample_exponential_race(probs, noise)

    monkeypatch.setattr(verifiers, "sample_exponential_race", sample)
    verifier.start()
    table = [RowState(seed=seed) for seed in seeds or [None, None]]
    batch = Batch(torch.ones(2, 4, dtype=torch.int64), None, 0, row_states=table)
    draft = Draft(torch.empty(2, 0, dtype=torch.int64), [0, 0])
    verifier.verify(batch, draft, torch.zeros(2, 1, 7, dtype=torch.float64))
    verifier.draw_candidates(batch, torch.zeros(2, 7), 1, [2, 2])
    assert seen == [torch.float64, torch.float64]
