"""The law of tokens with random heads, whose q is far from p, by enumeration.

Over all choices of seeds, some test of the right law would fail with probability 1e-4.
"""

from pathlib import Path
from typing import Any

import pytest
from alignment import loaded
from enumerated import ENOUGH, SETTINGS, exact_distribution, first_tokens, models, p_values
from head_files import random_head

from hf_specx import DraftHead, SpeculativeDecoding


SIZES: dict[str, Any] = {"vocab": 5, "draft_vocab": 3, "states": 16, "layer_ids": (0, 1)}
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": SIZES,
    "peagle": SIZES,
    "dflash": SIZES | {"block": 4},
    "dspark": SIZES | {"block": 4, "markov": "rnn", "confidence": True},
    "domino": SIZES | {"block": 4},
    "dflash2": {"vocab": 5, "states": 16, "layer_ids": (0, 1), "block": 4, "top_k": 3},
    "medusa": {"vocab": 5, "states": 16},
    "dflash causal": SIZES | {"block": 4, "extra": {"is_causal": True}},
    "dspark fill-in": SIZES | {"block": 5, "from_anchor": False, "markov": "gated"},
}
NUM_TESTS = 2 * (2 * len(KINDS) + 2)


def head(kind: str, folder: Path) -> DraftHead:
    """A target of one layer has no other states but the embeddings and its last ones before the norm."""
    layers = {} if kind == "medusa" else {"layer_ids": [0, 1]}
    return loaded(random_head(kind.split()[0], **KINDS[kind]), folder / "head", models()[0], **layers)


CASES = [(kind, verification) for kind in KINDS for verification in ("token", "block")]
# each kind by one of the two, in turns, and the other one slowly: what a head adds to the law is its q
BY_DEFAULT = [(kind, ("token", "block")[number % 2]) for number, kind in enumerate(KINDS)]
SLOWLY = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in BY_DEFAULT]


@pytest.mark.parametrize(("kind", "verification"), [*BY_DEFAULT, *SLOWLY])
def test_law(kind: str, verification: str, tmp_path: Path):
    strategy = SpeculativeDecoding(head(kind, tmp_path), num_draft_tokens=3, verification=verification)
    tokens = first_tokens(strategy, **ENOUGH)
    assert strategy.report.accepted > 0
    assert min(p_values(tokens, exact_distribution([]))) > 1e-4 / NUM_TESTS


@pytest.mark.parametrize("verification", ["block", pytest.param("token", marks=pytest.mark.slow)])
def test_law_where_the_head_ends_rows(verification: str, tmp_path: Path):
    """Its confidence cuts a row's candidates, and does not look at the one that is cut."""
    strategy = SpeculativeDecoding(head("dspark", tmp_path), num_draft_tokens=3, verification=verification)
    options, processors = SETTINGS["temperature"]
    tokens = first_tokens(strategy, **ENOUGH, **options, assistant_confidence_threshold=0.5)
    assert 0 < strategy.report.drafted < 3 * strategy.report.rounds * ENOUGH["rows"]
    assert min(p_values(tokens, exact_distribution(processors))) > 1e-4 / NUM_TESTS
