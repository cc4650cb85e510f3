"""The joint distribution of sampled tokens where rows of a round have different drafts: chi-square, with controls.

As in `test_law`: fixed seeds, and over all choices of them some test of the right distribution would fail with
probability 1e-4.
"""

import pytest
import torch
from all_pairs import once
from enumerated import VOCAB_SIZE, exact_distribution, first_tokens, models, p_values
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

from hf_specx import SpeculativeDecoding
from hf_specx.common.round import Draft
from hf_specx.drafting import several
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.several import SeveralDrafts


NUM_TESTS = 2 * 2 * 2
MOST = 3
LARGE = {"batches": 12, "rows": 1024}


class Given(Drafter):
    """Candidates that follow from the last token, after some tokens none; it hopes for much."""

    def propose(self, batch, lengths):
        last = batch.last(1)
        tokens = (last + torch.arange(2, MOST + 2)) % VOCAB_SIZE
        wanted = [min(length, token % 3) for length, token in zip(lengths, last[:, 0].tolist(), strict=True)]
        chances = [[0.99] * length for length in wanted]
        return Draft(tokens[:, : max(wanted)], wanted, None, "given", chances)


def draw(verification: str, batches: int, rows: int, **settings) -> torch.Tensor:
    """The first tokens of rows that all have the same prompt: [batches * rows, DEPTH]."""
    strategy = SpeculativeDecoding([Given(), models()[1]], num_draft_tokens=MOST, verification=verification)
    tokens = first_tokens(strategy, batches, rows, **settings)
    counts = strategy.report.sources
    assert counts.keys() == {"given", "model"}
    assert all(0 < each["accepted"] < each["drafted"] for each in counts.values())
    return tokens


@pytest.mark.parametrize("verification", ["token", "block"])
def test_the_distribution_is_that_of_the_target(monkeypatch: pytest.MonkeyPatch, verification: str):
    monkeypatch.setattr(SeveralDrafts, "_asks_model", only_without_others)
    assert min(p_values(draw(verification, **LARGE), exact_distribution([]))) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize("verification", [pytest.param("token", marks=pytest.mark.slow), "block"])
def test_the_distribution_with_warpers(monkeypatch: pytest.MonkeyPatch, verification: str):
    monkeypatch.setattr(SeveralDrafts, "_asks_model", only_without_others)
    law = exact_distribution([TemperatureLogitsWarper(0.6), TopKLogitsWarper(3)])
    tokens = draw(verification, **LARGE, temperature=0.6, top_k=3)
    assert min(p_values(tokens, law)) > 1e-4 / NUM_TESTS


def only_without_others(drafts: SeveralDrafts, batch, offered: list, hoped: list) -> list[bool]:
    """So that rows of each round take either source, whatever the times."""
    return [not other for other in offered]


def as_if_drawn(*args) -> Draft:
    """Wrong: given candidates are judged as if they had been drawn by the model, which was asked for other rows."""
    draft, drafts = several_joined(*args), args[1]
    if draft.probs is None or draft.free is None:
        return draft
    drawn = drafts[-1].probs
    return draft._replace(probs=torch.nn.functional.pad(drawn, (0, 0, 0, draft.tokens.shape[1] - drawn.shape[1])))


def looking(drafts: SeveralDrafts, batch, lengths: list[int]) -> Draft:
    """Wrong: where the model has drawn an even token, the other's candidates are taken instead."""
    if not any(lengths):
        return propose(drafts, batch, lengths)
    given, drawn = (part.propose(batch, lengths) for part in drafts.parts)
    drafts.taken = (drawn.tokens[:, 0] % 2).tolist()
    return several_joined(batch, [given, drawn], drafts.taken, 1)


several_joined, propose = several._joined, SeveralDrafts.propose
CONTROLS = {"as if drawn": (several, "_joined", as_if_drawn), "looking": (SeveralDrafts, "propose", looking)}


@pytest.mark.parametrize(("verification", "control"), once(["token", "block"], CONTROLS))
def test_wrong_variants_are_seen(monkeypatch: pytest.MonkeyPatch, verification: str, control: str):
    monkeypatch.setattr(SeveralDrafts, "_asks_model", only_without_others)
    monkeypatch.setattr(*CONTROLS[control])
    assert min(p_values(draw(verification, **LARGE), exact_distribution([]))) < 1e-8
