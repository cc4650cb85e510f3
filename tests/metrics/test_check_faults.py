"""The check rejects each faulty verifier, and accepts the correct ones as often as it says."""

import pytest
import torch
from check_cases import EXACT, FAULTS, PROMPTS, failed, inject, quick, tiny_pair
from scipy import stats

from hf_specx import DraftTargetPair, check
from hf_specx.metrics.check import judge_distribution, subject_of
from hf_specx.metrics.settings import Settings
from hf_specx.metrics.texts import generate_texts


RUNS, LEVEL = 200, 0.05
CHEAP = {"batch_sizes": (16,), "max_new_tokens": 6, "samples": 16, "num_draft_tokens": 2, "level": LEVEL}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_rejected(monkeypatch: pytest.MonkeyPatch, fault: str):
    checked, rejected = inject(monkeypatch, fault)
    result = quick(verifications=sorted(checked))
    assert not result.passed
    assert failed(result) >= rejected, str(result)


def test_a_fault_is_rejected_with_a_head(monkeypatch: pytest.MonkeyPatch):
    """A head says nothing of a text by itself, so that what it offered while the text was made is looked at."""
    inject(monkeypatch, "everything accepted")
    pair = DraftTargetPair.embedded()
    settings = Settings(batch_sizes=(16,), verifications=("token",), max_new_tokens=32, samples=32)
    subject = subject_of(pair, pair.prompts, settings, {"temperature": 1.0, "top_k": 0})
    generated = generate_texts(subject, "token", 16)
    result = judge_distribution(subject, "token", 16, generated["texts"], generated["observed"])
    assert not result["passed"]
    assert result["statistics"]["overrated"]["z"] > 4


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
@pytest.mark.parametrize("verification", ["token", "block"])
def test_false_alarms_are_as_rare_as_stated(verification: str):
    """More alarms than this would come with probability 1e-4 if each run had one with probability 0.05."""
    results = [
        check(tiny_pair(), PROMPTS, verifications=(verification,), seed=seed, advance=lambda: None, **CHEAP)
        for seed in range(RUNS)
    ]
    assert sum(not result.passed for result in results) <= stats.binom.isf(1e-4, RUNS, LEVEL)


@pytest.mark.slow
def test_the_embedded_pair_passes():
    result = check(DraftTargetPair.embedded(), advance=lambda: None)
    assert result.passed, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_rejected_on_the_embedded_pair(monkeypatch: pytest.MonkeyPatch, fault: str):
    """With default settings, but for the temperature, since at 1 there is no processor that could be skipped.

    A position off by one changes the distribution of this pair too little for 4,600 tokens, so where tokens have to be
    equal the fault has to be seen there.
    """
    checked, rejected = inject(monkeypatch, fault)
    temperature = 0.8 if "processor" in fault else 1.0
    result = check(
        DraftTargetPair.embedded(), verifications=sorted(checked), temperature=temperature, advance=lambda: None
    )
    assert failed(result) >= (rejected & EXACT or rejected), str(result)
