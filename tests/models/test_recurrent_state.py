"""Models whose past is a state: put back as it was, and fed again what was accepted since."""

import pytest
import zoo
from all_pairs import each_value
from plain import assert_plain, coupled
from sweep import MODES

from hf_specx import SpeculativeDecoding
from hf_specx.common.architectures import INEXACT


STATEFUL = """
    mamba2 bamba granitemoehybrid zamba2 nemotron_h qwen3_next kimi_linear olmo_hybrid lfm2
""".split()  # noqa: SIM905
NEW_TOKENS = 24


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize(("model_type", "mode", "rows"), each_value(STATEFUL, MODES, [1, 4]))
def test_equals_stock(model_type: str, mode: str, rows: int):
    target = zoo.build("causal", model_type)
    inputs, settings = zoo.inputs(target, rows), MODES[mode] | {"max_new_tokens": NEW_TOKENS}
    if rows > 1:
        settings |= {"eos_token_id": [5, 6, 7]}  # so that rows leave
    compared = None
    for noise in (0.0, 0.02, 0.3):
        strategy = coupled(target, noise)
        compared = assert_plain(target, strategy, inputs, before=compared, **settings)
        rounds = strategy.report.rounds
        # the prompt, and at the end perhaps a single step; convolutions alone are cropped, else what was accepted of a
        # round is fed again
        assert compared.forwards <= 2 + (rounds if model_type == "lfm2" else 2 * rounds)
    assert strategy.report.accepted < strategy.report.drafted


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize("model_type", sorted(INEXACT))
def test_as_a_draft_any_of_them_serves(model_type: str):
    """Whatever distribution a draft has, its candidates are judged by it."""
    target, draft = zoo.build("causal", "llama"), zoo.build("causal", model_type)
    strategy = SpeculativeDecoding(draft, num_draft_tokens=3, verification="coupled")
    assert_plain(target, strategy, zoo.inputs(target), **MODES["coupled"], max_new_tokens=NEW_TOKENS)
    assert strategy.report.drafted > 0
