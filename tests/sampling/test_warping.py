"""Warpers on the likeliest tokens give what stock's give on all of them."""

import pytest
import torch
from transformers.generation import logits_process as host

from hf_specx.common.batch import Batch
from hf_specx.sampling.processors import NUM_TOP_TOKENS, Processors, TopTokensWarper, fuse_warpers


VOCAB = 3000
RUNS = {
    "top-k": [host.TopKLogitsWarper(50)],
    "top-p": [host.TopPLogitsWarper(0.9)],
    "top-p that keeps some": [host.TopPLogitsWarper(0.3, min_tokens_to_keep=7)],
    "top-k, top-p": [host.TopKLogitsWarper(50), host.TopPLogitsWarper(0.9)],
    "top-p, top-k": [host.TopPLogitsWarper(0.8), host.TopKLogitsWarper(9)],
    "top-k, temperature, top-p": [
        host.TopKLogitsWarper(50),
        host.TemperatureLogitsWarper(3.0),
        host.TopPLogitsWarper(0.8),
    ],
    "all": [
        host.TopKLogitsWarper(100),
        host.TopPLogitsWarper(0.95),
        host.MinPLogitsWarper(0.02),
        host.TypicalLogitsWarper(0.9),
        host.EpsilonLogitsWarper(1e-3),
        host.EtaLogitsWarper(1e-3),
        host.TemperatureLogitsWarper(0.7),
        host.LogitNormalization(),
    ],
}


def by_stock(warpers: list, scores: torch.Tensor) -> torch.Tensor:
    for warper in warpers:
        scores = warper(torch.zeros(len(scores), 1, dtype=torch.int64), scores)
    return scores


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen, sort = [], torch.sort

    def noted(scores, *args, **kwargs):
        seen.append(scores.shape[-1])
        return sort(scores, *args, **kwargs)

    monkeypatch.setattr(torch, "sort", noted)
    return seen


def normal(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))


def handful() -> torch.Tensor:
    """Constraints leave a few tokens; a broken model gives NaN, a processor may exclude every token."""
    scores = torch.full((4, VOCAB), -torch.inf)
    scores[0, :3] = torch.tensor([1.0, 2.0, -1.0])
    scores[1] = torch.nan
    scores[3] = 8 * normal(4)[3]
    return scores


def ties() -> torch.Tensor:
    """More than the head holds; stock keeps all tokens that tie with the last of the k."""
    scores = torch.zeros(2, VOCAB)
    scores[:, 7] = 1.0
    scores[1, : 5 * NUM_TOP_TOKENS] = 2.0
    return scores


PEAKED_TO_FLAT = torch.linspace(3, 8, 400)[:, None] * normal(400)
CASES = [(PEAKED_TO_FLAT, name) for name in RUNS] + [(PEAKED_TO_FLAT.double(), name) for name in RUNS]
CASES += [(normal(3), "top-p"), (ties(), "top-k"), *((handful(), name) for name in ("top-k", "top-p", "top-k, top-p"))]


@pytest.mark.parametrize(("scores", "run"), CASES)
def test_equals_stock(scores: torch.Tensor, run: str, widths: list[int]):
    """What is kept is the same set, and the values but for rounding; a head that is not enough falls back to all."""
    (warper,) = fuse_warpers(RUNS[run])
    output = warper(None, scores)
    if len(scores) > 4:
        assert VOCAB not in widths
    expected = by_stock(RUNS[run], scores)
    some = expected.isfinite().any(-1)
    torch.testing.assert_close(output[some], expected[some])
    assert output[~some].softmax(-1).isnan().all()


@pytest.mark.parametrize("run", RUNS)
def test_of_tokens_that_tie_as_many_stay_as_in_stock(run: str):
    """Logits of half precision have many; which of them stay is up to an unstable sort."""
    scores = PEAKED_TO_FLAT.bfloat16().float()
    output, expected = TopTokensWarper(RUNS[run])(None, scores), by_stock(RUNS[run], scores)
    torch.testing.assert_close(output.sort().values, expected.sort().values)


@pytest.mark.parametrize("run", [[host.TopHLogitsWarper(0.4)], [host.TopKLogitsWarper(9), host.EtaLogitsWarper(0.02)]])
def test_rows_without_a_distribution_are_left_as_they_are(run: list, monkeypatch: pytest.MonkeyPatch):
    """Behind a candidate nothing may be allowed; in transformers these warpers raise there."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # which `torch.compile` ends
    scores = normal(3)
    scores[0], scores[1, 5] = -torch.inf, torch.nan
    with pytest.raises(ValueError, match="Expected parameter logits"):
        by_stock(run, scores)
    output = Processors(run)(Batch(torch.ones(1, 3, dtype=torch.int64), None, 0), None, scores[None])[0]
    assert output.softmax(-1)[:2].isnan().all()
    assert torch.equal(output[2:], by_stock(run, scores[2:]))
