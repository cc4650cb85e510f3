"""The noise of sampling on the device: drawn again as `torch.multinomial` draws it, in any order and for any shape."""

import pytest
import torch
from device import DEVICE, on_device
from plain import generator_state

from hf_specx.common.batch import Batch, RowState
from hf_specx.sampling.noise import ReplayedNoise
from hf_specx.sampling.verifiers import CoupledVerifier, RejectionVerifier
from hf_specx.sampling.verify import sample_exponential_race


pytestmark = on_device
SHAPES = [(1, 48), (3, 1000), (8, 151936)]  # the last one is drawn by more than one number for each thread
DTYPES = [torch.float32, torch.float64]


def text(rows: int, seeds: list[int] | None = None, device: torch.device = DEVICE) -> Batch:
    table = [RowState(seed=seed) for seed in seeds or [None] * rows]
    return Batch(torch.ones(rows, 4, dtype=torch.int64, device=device), None, 0, row_states=table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_race_is_how_torch_draws(shape: tuple[int, int], dtype: torch.dtype):
    """Coupled verification stands on this: the token is the argmax of p / E, E being one `exponential_`."""
    probs = torch.randn(shape, device=DEVICE, dtype=dtype).softmax(-1)
    torch.manual_seed(0)
    expected = [torch.multinomial(probs, 1)[:, 0] for _ in range(5)]
    state = generator_state(DEVICE)
    torch.manual_seed(0)
    assert all(
        torch.equal(sample_exponential_race(probs, torch.empty_like(probs).exponential_()), tokens)
        for tokens in expected
    )
    assert torch.equal(generator_state(DEVICE), state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_noise_in_any_order_and_the_generator_after_it(shape: tuple[int, int], dtype: torch.dtype):
    rows, vocab_size = shape
    torch.manual_seed(0)
    expected = [torch.empty(shape, device=DEVICE, dtype=dtype).exponential_() for _ in range(6)]
    like = torch.empty(rows, 1, vocab_size, device=DEVICE, dtype=dtype)
    for window in (0, 2, 100):
        torch.manual_seed(0)
        noise = ReplayedNoise(rows, DEVICE, window)
        for position in (2, 0, 5, 2, 1, 5, 0):
            assert torch.equal(
                noise.vectors_at(list(range(rows)), [0] * rows, like, position)[:, 0], expected[position]
            )
        noise.finish(4)
        assert torch.equal(torch.empty_like(expected[0]).exponential_(), expected[4])


def test_a_row_with_a_seed_gets_what_is_drawn_for_it_alone():
    seeds, expected = [7, 0, 2**40 + 3], []
    for seed in seeds:
        torch.manual_seed(seed)
        expected.append(torch.cat([torch.empty(1, 9, device=DEVICE).exponential_() for _ in range(4)]))
    verifier = CoupledVerifier(3, DEVICE, 4, seeded=True)
    verifier.start()
    drawn = verifier.noise(text(3, seeds), torch.empty(3, 4, 9, device=DEVICE), 0)
    assert torch.equal(drawn, torch.stack(expected))


def test_numbers_for_rejection_are_those_of_a_cpu():
    drawn = []
    for device in (DEVICE, torch.device("cpu")):
        batch = text(2, [7, 8], device)
        verifier = RejectionVerifier(True, device, seeded=True)
        verifier.start()
        drawn.append(verifier.uniforms("accepting", batch, 5, [5, 2]))
    found, expected = drawn
    assert found.device.type == DEVICE.type
    assert torch.equal(found.cpu(), expected)
