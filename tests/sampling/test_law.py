"""The joint law of sampled tokens, through `generate`, against exact enumeration; and wrong variants, which must fail.

Each p-value is that of a chi-square test of goodness of fit. The seeds are fixed; over all choices of them, some test
of the right law would fail with probability 1e-4.
"""

from importlib import import_module

import pytest
from all_pairs import once
from enumerated import END, ENOUGH, LARGE, PAD, SETTINGS, VOCAB_SIZE, draw, exact_distribution, p_values
from wrong_rules import CONTROLS


BY_REJECTION = ["token", "block"]
NUM_TESTS = 2 * 2 * (len(SETTINGS) + 5)


@pytest.mark.parametrize(("verification", "settings"), once(["token", "block"], SETTINGS))
def test_law(verification: str, settings: str):
    options, processors = SETTINGS[settings]
    tokens = draw(verification, **ENOUGH, **options)
    law = exact_distribution(processors)
    assert min(p_values(tokens, law)) > 1e-4 / NUM_TESTS
    assert max(p_values(tokens, exact_distribution([]))) < 1e-8  # so a setting that went unnoticed would be seen


@pytest.mark.parametrize(("verification", "end"), once(["token", "block"], [None, END]))
def test_law_without_processors(verification: str, end: int | None):
    """With more draws than the wrong variants below need; and a row may end inside an accepted run."""
    tokens = draw(verification, **LARGE, eos_token_id=end, pad_token_id=PAD)
    assert min(p_values(tokens, exact_distribution([], end))) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize(("verification", "draft_vocab_size"), once(BY_REJECTION, [VOCAB_SIZE - 1, VOCAB_SIZE + 2]))
def test_law_with_a_draft_of_another_vocabulary_size(verification: str, draft_vocab_size: int):
    tokens = draw(verification, **ENOUGH, draft_vocab_size=draft_vocab_size)
    assert min(p_values(tokens, exact_distribution([]))) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize("verification", ["token", "block"])
def test_law_where_each_row_drafts_its_own_number(verification: str):
    """Up to its first unlikely candidate; "unlikely candidates dropped" below is what must not be."""
    tokens = draw(verification, **ENOUGH, assistant_confidence_threshold=0.3)
    assert min(p_values(tokens, exact_distribution([]))) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize("control", CONTROLS)
def test_wrong_variants_are_seen(monkeypatch: pytest.MonkeyPatch, control: str):
    verification, module, name, wrong = CONTROLS[control]
    monkeypatch.setattr(import_module(f"hf_specx.{module}"), name, wrong)
    assert min(p_values(draw(verification, batches=10, rows=1024), exact_distribution([]))) < 1e-8
