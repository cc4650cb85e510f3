"""Acceptance, through `generate`: at each position it is the overlap of p and q, and block keeps more than token.

The seeds are fixed. Bounds are five standard errors, a false alarm of 6e-7 for each comparison and 4e-6 for the file.
"""

import math
from functools import cache

import pytest
import torch
from tiny import tiny
from transformers import PreTrainedModel

from hf_specx import SpeculationReport, SpeculativeDecoding
from hf_specx.common.round import Listener, Round


VOCAB_SIZE = 5
PROMPT = torch.tensor([[1, 2, 1]])
NUM_DRAFT_TOKENS = 3
ROWS = 1024
either = pytest.mark.parametrize("verification", ["token", "block"])


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A pair for which block verification keeps 1.34 candidates a round and token verification 1.16."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "initializer_range": 0.25, "max_position_embeddings": 16}
    return tiny("llama", seed=0, **sizes), tiny("llama", seed=12, **sizes)


def sample(draft: PreTrainedModel, verification: str, batches: int, *listeners: Listener) -> list[SpeculationReport]:
    """Reports of calls whose first round has room for all candidates."""
    strategy = SpeculativeDecoding(draft, num_draft_tokens=NUM_DRAFT_TOKENS, verification=verification)
    strategy.listeners = listeners
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": NUM_DRAFT_TOKENS + 2}
    torch.manual_seed(0)
    reports = []
    for _ in range(batches):
        models()[0].generate(PROMPT.expand(ROWS, -1), custom_generate=strategy, **options)
        reports.append(strategy.report)
    return reports


@torch.no_grad()
def exact_accepted_length(verification: str) -> float:
    """E[τ] of the first round, by every text of one token from the target and K from the draft."""
    texts = torch.cartesian_prod(*[torch.arange(VOCAB_SIZE)] * (NUM_DRAFT_TOKENS + 1))
    ids = torch.cat([PROMPT.expand(len(texts), -1), texts], 1)
    laws = [model(ids).logits[:, PROMPT.shape[1] - 1 : -1].double().softmax(-1) for model in models()]
    p, q = (law.gather(-1, texts[..., None])[..., 0] for law in laws)  # [V^(K + 1), K + 1]
    weights = p[:, 0] * q[:, 1:].prod(1)
    reach, length = torch.ones(len(texts), dtype=torch.float64), 0.0
    for ratio in (p / q)[:, 1:].unbind(1):
        reach = (reach * ratio).clamp(max=1) if verification == "block" else reach * ratio.clamp(max=1)
        length += (weights * reach).sum().item()
    return length


class Overlaps:
    """Listens: candidates that a row kept in a round, and the overlap at each that it drafted."""

    def __init__(self):
        self.seen: list[tuple[int, list[float]]] = []

    def observe(self, done: Round) -> None:
        self.seen += zip(done.accepted, done.overlap, strict=True)


def test_acceptance_is_the_overlap_at_each_position():
    """Token verification: given its prefix, a candidate is kept with probability o = sum_x min(p, q).

    So kept - o are increments of a martingale, of variance o (1 - o).
    """
    overlaps = Overlaps()
    reports, seen = sample(models()[1], "token", 20, overlaps), overlaps.seen
    for i in range(NUM_DRAFT_TOKENS):
        judged = [(accepted > i, overlap[i]) for accepted, overlap in seen if accepted >= i and len(overlap) > i]
        surplus = sum(kept - overlap for kept, overlap in judged)
        variance = sum(overlap * (1 - overlap) for _, overlap in judged)
        assert len(judged) > 5_000
        assert abs(surplus) < 5 * math.sqrt(variance)
    of_judged = [o for accepted, overlap in seen for o in overlap[: accepted + 1]]
    assert sum(r.judged for r in reports) == len(of_judged)
    assert math.isclose(sum(r.alpha * r.judged for r in reports), sum(of_judged), rel_tol=1e-5)
    assert sum(r.accepted for r in reports) == sum(accepted for accepted, _ in seen)


def test_accepted_length_is_the_exact_one_and_longer_under_block():
    means = {}
    for verification in ("token", "block"):
        reports = sample(models()[1], verification, batches=20)
        first = torch.tensor([r.history[row][1][:6] for r in reports for row in range(ROWS)]).double()
        assert (first[:, 0] == NUM_DRAFT_TOKENS).all()
        accepted = first[:, 1]
        error = accepted.std().item() / math.sqrt(len(accepted))
        means[verification] = accepted.mean().item()
        assert abs(means[verification] - exact_accepted_length(verification)) < 5 * error
    gain = exact_accepted_length("block") - exact_accepted_length("token")
    assert gain > 15 * error  # so that the two cannot be mistaken for each other
    assert means["block"] > means["token"] + gain / 2


@either
def test_a_draft_equal_to_the_target_is_always_accepted(verification: str):
    (report,) = sample(models()[0], verification, batches=1)
    assert report.acceptance_rate == 1
    assert report.alpha == pytest.approx(1, abs=1e-6)
    assert report.mean_acceptance_length == 1 + report.drafted / sum(report.rounds_per_row)
