"""Acceptance, through `generate`: at each position it is the overlap of p and q, and block keeps more than token.

The seeds are fixed. Bounds are five standard errors, a false alarm of 6e-7 for each comparison and 4e-6 for the file.
"""

import math

import torch
from enumerated import NUM_DRAFT_TOKENS, PROMPT, VOCAB_SIZE, models
from rounds import Heard

from hf_specx import SpeculationReport, SpeculativeDecoding
from hf_specx.common.round import Listener


ROWS = 1024


def sample(verification: str, *listeners: Listener) -> list[SpeculationReport]:
    """Reports of calls whose first round has room for all candidates."""
    target, draft = models()
    strategy = SpeculativeDecoding(draft, num_draft_tokens=NUM_DRAFT_TOKENS, verification=verification)
    strategy.listeners = listeners
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": NUM_DRAFT_TOKENS + 2}
    torch.manual_seed(0)
    reports = []
    for _ in range(20):
        target.generate(PROMPT.expand(ROWS, -1), custom_generate=strategy, **options)
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


def test_acceptance_is_the_overlap_at_each_position():
    """Token verification: given its prefix, a candidate is kept with probability o = sum_x min(p, q).

    So kept - o are increments of a martingale, of variance o (1 - o).
    """
    rounds = Heard(lambda done: zip(done.accepted, done.overlap, strict=True))
    reports = sample("token", rounds)
    # candidates that a row kept in a round, and the overlap at each that it drafted
    seen: list[tuple[int, list[float]]] = [row for rows in rounds for row in rows]
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
        reports = sample(verification)
        first = torch.tensor([r.history[row][1][:2] for r in reports for row in range(ROWS)]).double()
        assert (first[:, 0] == NUM_DRAFT_TOKENS).all()
        accepted = first[:, 1]
        error = accepted.std().item() / math.sqrt(len(accepted))
        means[verification] = accepted.mean().item()
        assert abs(means[verification] - exact_accepted_length(verification)) < 5 * error
    gain = exact_accepted_length("block") - exact_accepted_length("token")
    assert gain > 15 * error  # so that the two cannot be mistaken for each other
    assert means["block"] > means["token"] + gain / 2
