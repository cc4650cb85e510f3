"""The joint distribution of sampled tokens where candidates are given, not drawn: by chi-square, with wrong variants.

As in `test_law`: fixed seeds, and over all choices of them some test of the right distribution would fail with
probability 1e-4.
"""

from collections.abc import Callable

import pytest
import torch
from all_pairs import once
from enumerated import VOCAB_SIZE, exact_distribution, first_tokens, p_values
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

from hf_specx import SpeculativeDecoding, SuffixDraft
from hf_specx.common.round import Draft
from hf_specx.drafting.drafter import Drafter
from hf_specx.sampling import rules, verify
from hf_specx.sampling.rules import RejectionRule


NUM_TESTS = 2 * 2 * 4
MOST = 3
LARGE = {"batches": 12, "rows": 1024}


class Given(Drafter):
    """Candidates that follow from the last token, as many as it says, 0 to `MOST`."""

    def propose(self, batch, lengths):
        last = batch.last(1)
        tokens = (last + torch.arange(2, MOST + 2)) % VOCAB_SIZE
        wanted = [min(length, token % (MOST + 1)) for length, token in zip(lengths, last[:, 0].tolist(), strict=True)]
        return Draft(tokens[:, : max(wanted)], wanted)


def suffixes() -> Drafter:
    return SuffixDraft(min_match=1)


def draw(drafter: Callable[[], Drafter], verification: str, batches: int, rows: int, **settings) -> torch.Tensor:
    """The first tokens of rows that all have the same prompt: [batches * rows, DEPTH]."""
    strategy = SpeculativeDecoding(drafter(), num_draft_tokens=MOST, verification=verification)
    tokens = first_tokens(strategy, batches, rows, **settings)
    assert 0 < strategy.report.acceptance_rate < 1
    return tokens


@pytest.mark.parametrize(("verification", "drafter"), once(["token", "block"], [Given, suffixes]))
def test_the_distribution_is_that_of_the_target(drafter: Callable, verification: str):
    tokens = draw(drafter, verification, **LARGE)
    assert min(p_values(tokens, exact_distribution([]))) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize(("verification", "drafter"), once(["token", "block"], [Given, suffixes]))
def test_the_distribution_with_warpers(drafter: Callable, verification: str):
    tokens = draw(drafter, verification, **LARGE, temperature=0.6, top_k=3)
    law = exact_distribution([TemperatureLogitsWarper(0.6), TopKLogitsWarper(3)])
    assert min(p_values(tokens, law)) > 1e-4 / NUM_TESTS


class TakenAsDrawn(RejectionRule):
    """Wrong: candidates are judged as if drawn from a flat distribution."""

    def judge(self, batch, draft, scores):
        return super().judge(batch, draft._replace(probs=torch.full_like(scores[:, :-1], 1 / VOCAB_SIZE)), scores)


def from_the_target(residual: torch.Tensor, target: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """Wrong: after a rejection the candidate may be drawn all the same."""
    return verify.pick(target, choice)


CONTROLS = {
    "taken as drawn": (rules, "RejectionRule", TakenAsDrawn),
    "no residual": (verify, "_draw", from_the_target),
}


@pytest.mark.parametrize(("verification", "control"), once(["token", "block"], CONTROLS))
def test_wrong_variants_are_seen(monkeypatch: pytest.MonkeyPatch, verification: str, control: str):
    monkeypatch.setattr(*CONTROLS[control])
    tokens = draw(Given, verification, **LARGE)
    assert min(p_values(tokens, exact_distribution([]))) < 1e-8
