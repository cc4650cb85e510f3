"""The check rejects each faulty verifier, and accepts the correct ones."""

import pytest
import torch
from check_cases import EXACT, FAULTS, failed, inject, quick, tiny_pair

from hf_specx import DraftTargetPair, check


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_rejected(monkeypatch: pytest.MonkeyPatch, fault: str):
    checked, rejected = inject(monkeypatch, fault)
    result = quick(verifications=sorted(checked))
    assert not result.passed
    assert failed(result) >= rejected, str(result)


HALF = "one candidate too many", "position off by one"


@pytest.mark.parametrize("fault", HALF)
def test_a_fault_is_rejected_in_half_precision(monkeypatch: pytest.MonkeyPatch, fault: str):
    """By equal tokens, though rounding explains gaps that are 65,536 times as wide as in float32."""
    checked, rejected = inject(monkeypatch, fault)
    result = quick(tiny_pair(torch.bfloat16), verifications=sorted(checked & EXACT))
    assert failed(result) == rejected & EXACT, str(result)


def test_right_ones_pass():
    """With the settings under which the faults are seen; by chance it would fail for one seed in a thousand."""
    result = quick()
    assert result.passed, str(result)
    assert {line.verdict for line in result.lines} == {"passed"}


@pytest.mark.slow
def test_the_embedded_pair_passes():
    result = check(DraftTargetPair.embedded(), advance=lambda: None)
    assert result.passed, str(result)
