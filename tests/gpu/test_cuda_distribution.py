"""The joint distribution of tokens that are sampled on the device, against exact enumeration, as in `test_law`.

The seeds are fixed; over all choices of them, some test of a right distribution fails with probability 1e-4.
"""

import enumerated
import pytest
from device import DEVICE, on_device
from enumerated import LARGE, SETTINGS, draw, exact_distribution, p_values
from wrong_rules import CONTROLS


pytestmark = on_device
CHOSEN = {"plain": ({}, [])} | {name: SETTINGS[name] for name in ("top-p", "repetition penalty")}
NUM_TESTS = 2 * 2 * len(CHOSEN)


@pytest.fixture(autouse=True)
def models_on_the_device():
    for model in enumerated.models():
        model.to(DEVICE)
    yield
    for model in enumerated.models():
        model.cpu()


def exact(processors: list):
    """By forwards on the CPU, where the processors' tensors are."""
    target = enumerated.models()[0].cpu()
    found = exact_distribution(processors)
    target.to(DEVICE)
    return found


@pytest.mark.parametrize("settings", CHOSEN)
@pytest.mark.parametrize("verification", ["token", "block"])
def test_distribution(verification: str, settings: str):
    options, processors = CHOSEN[settings]
    assert min(p_values(draw(verification, **LARGE, **options), exact(processors))) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_wrong_residual_is_seen(verification: str, monkeypatch: pytest.MonkeyPatch):
    _, module, name, wrong = CONTROLS["residual replaced by the target"]
    monkeypatch.setattr(f"hf_specx.{module}.{name}", wrong)
    assert min(p_values(draw(verification, **LARGE), exact([]))) < 1e-8
