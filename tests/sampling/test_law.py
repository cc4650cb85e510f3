"""The joint law of sampled tokens, through `generate`, against exact enumeration; and wrong variants, which must fail.

Each p-value is that of a chi-square test of goodness of fit. The seeds are fixed; over all choices of them, some test
of the right law would fail with probability 1e-4. Drafts with another tokenizer are in test_law_of_other_tokens.py.
"""

from importlib import import_module
from typing import Any

import pytest
import torch
from all_pairs import once
from enumerated import (
    END,
    ENOUGH,
    LARGE,
    NUM_DRAFT_TOKENS,
    PAD,
    SETTINGS,
    VOCAB_SIZE,
    draw,
    exact_distribution,
    first_tokens,
    models,
    p_values,
)
from transformers import SynthIDTextWatermarkingConfig
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper
from wrong_rules import CONTROLS, SEEDED_CONTROLS

from hf_specx import SpeculativeDecoding, SuffixDraft
from hf_specx.common.round import Draft
from hf_specx.drafting import several
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.several import SeveralDrafts
from hf_specx.sampling import verifiers, verify
from hf_specx.sampling.verifiers import RejectionVerifier


BOTH = ["token", "block"]
SYNTHID = SynthIDTextWatermarkingConfig(keys=list(range(1, 9)), ngram_len=2, sampling_table_size=64)
# arguments of `draw`, and the processors that they stand for
CASES: dict[str, tuple[dict[str, Any], list]] = SETTINGS | {
    "none": (LARGE, []),  # more draws than the wrong variants below need
    "an end": (LARGE | {"eos_token_id": END, "pad_token_id": PAD}, []),  # also inside an accepted run
    "a smaller vocabulary of the draft": ({"draft_vocab_size": VOCAB_SIZE - 1}, []),
    "a larger vocabulary of the draft": ({"draft_vocab_size": VOCAB_SIZE + 2}, []),
    "rows up to their first unlikely candidate": ({"assistant_confidence_threshold": 0.3}, []),
    "seeds": ({"seeded": True}, []),
    "SynthID": ({"watermarking_config": SYNTHID}, [SYNTHID.construct_processor(VOCAB_SIZE, "cpu")]),
}
NUM_TESTS = 2 * 2 * (len(CASES) + 6)


@pytest.mark.parametrize(("verification", "case"), once(BOTH, CASES))
def test_law(verification: str, case: str):
    options, processors = CASES[case]
    tokens = draw(verification, **ENOUGH | options)
    assert min(p_values(tokens, exact_distribution(processors, options.get("eos_token_id")))) > 1e-4 / NUM_TESTS
    if processors or "eos_token_id" in options:  # so that what went unnoticed would be seen
        assert max(p_values(tokens, exact_distribution([]))) < 1e-8


@pytest.mark.parametrize("control", CONTROLS | SEEDED_CONTROLS)
def test_wrong_variants_are_seen(monkeypatch: pytest.MonkeyPatch, control: str):
    verification, module, name, wrong = (CONTROLS | SEEDED_CONTROLS)[control]
    monkeypatch.setattr(import_module(f"hf_specx.{module}"), name, wrong)
    tokens = draw(verification, batches=10, rows=1024, seeded=control in SEEDED_CONTROLS)
    assert min(p_values(tokens, exact_distribution([]))) < 1e-8


class FromLastToken(Drafter):
    """Candidates that follow from the last token, as many as it says, from none to all; it hopes for much."""

    def propose(self, batch, lengths):
        last = batch.last(1)
        tokens = (last + torch.arange(2, NUM_DRAFT_TOKENS + 2)) % VOCAB_SIZE
        most = [token % (NUM_DRAFT_TOKENS + 1) for token in last[:, 0].tolist()]
        wanted = [min(pair) for pair in zip(lengths, most, strict=True)]
        return Draft(tokens[:, : max(wanted)], wanted, None, "given", [[0.99] * length for length in wanted])


DRAFTS = {
    "given": lambda: FromLastToken(),
    "suffix": lambda: SuffixDraft(min_match=1),
    "several": lambda: [FromLastToken(), models()[1]],
}


def only_without_others(drafts: SeveralDrafts, batch, offered: list, hoped: list) -> list[bool]:
    """So that rows of each round take either source, whatever the times."""
    return [not other for other in offered]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch):
    """`first_tokens` with one of `DRAFTS`."""
    monkeypatch.setattr(SeveralDrafts, "_asks_model", only_without_others)

    def draw_by(drafts: str, verification: str, **settings) -> torch.Tensor:
        strategy = SpeculativeDecoding(DRAFTS[drafts](), num_draft_tokens=NUM_DRAFT_TOKENS, verification=verification)
        tokens = first_tokens(strategy, **ENOUGH, **settings)
        assert len(strategy.report.sources) == (2 if drafts == "several" else 1)
        assert all(0 < each["accepted"] < each["drafted"] for each in strategy.report.sources.values())
        return tokens

    return draw_by


@pytest.mark.parametrize("verification", BOTH)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_law_of_given_candidates(drawn, drafts: str, verification: str):
    """Which are not drawn, but follow from the text; also beside others that are."""
    assert min(p_values(drawn(drafts, verification), exact_distribution([]))) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize(("verification", "drafts"), once(BOTH, DRAFTS))
def test_law_of_given_candidates_with_warpers(drawn, drafts: str, verification: str):
    law = exact_distribution([TemperatureLogitsWarper(0.6), TopKLogitsWarper(3)])
    assert min(p_values(drawn(drafts, verification, temperature=0.6, top_k=3), law)) > 1e-4 / NUM_TESTS


class TakenAsDrawn(RejectionVerifier):
    """Wrong: candidates are judged as if drawn from a flat distribution."""

    def verify(self, batch, draft, scores):
        return super().verify(batch, draft._replace(probs=torch.full_like(scores[:, :-1], 1 / VOCAB_SIZE)), scores)


def as_if_drawn(*args) -> Draft:
    """Wrong: given candidates are judged as if they had been drawn by the model, which was asked for other rows."""
    draft, drafts = joined(*args), args[1]
    if draft.probs is None or draft.model_free is None:
        return draft
    probs = drafts[-1].probs
    return draft._replace(probs=torch.nn.functional.pad(probs, (0, 0, 0, draft.tokens.shape[1] - probs.shape[1])))


def looking(drafts: SeveralDrafts, batch, lengths: list[int]) -> Draft:
    """Wrong: where the model has drawn an even token, the other's candidates are taken instead."""
    if not any(lengths):
        return propose(drafts, batch, lengths)
    from_last_token, drawn = (part.propose(batch, lengths) for part in drafts.parts)
    drafts.chosen = (drawn.tokens[:, 0] % 2).tolist()
    return joined(batch, [from_last_token, drawn], drafts.chosen, 1)


joined, propose = several._joined, SeveralDrafts.propose
WRONG = {
    "taken as drawn": ("given", verifiers, "RejectionVerifier", TakenAsDrawn),
    "residual replaced by the target": ("given", verify, "_draw", CONTROLS["residual replaced by the target"][-1]),
    "as if drawn": ("several", several, "_joined", as_if_drawn),
    "looking": ("several", SeveralDrafts, "propose", looking),
}


@pytest.mark.parametrize(("verification", "wrong"), once(BOTH, WRONG))
def test_wrong_variants_of_given_candidates_are_seen(
    monkeypatch: pytest.MonkeyPatch, drawn, verification: str, wrong: str
):
    drafts, *replaced = WRONG[wrong]
    monkeypatch.setattr(*replaced)
    assert min(p_values(drawn(drafts, verification), exact_distribution([]))) < 1e-8
