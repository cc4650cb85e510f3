"""The choice of a layout and its reason; the law and the warning of lockstep. The sweep walks all architectures."""

import warnings

import pytest
import torch
from enumerated import exact_distribution, first_tokens, models, p_values
from plain import assert_plain, coupled
from tiny import prompts, tiny

from hf_specx import SpeculativeDecoding
from hf_specx.common.batch import Batch


def in_lockstep(verification: str, batches: int) -> torch.Tensor:
    strategy = SpeculativeDecoding(models()[1], num_draft_tokens=3, verification=verification, layout="lockstep")
    return first_tokens(strategy, batches, rows=4)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_the_law_where_all_rows_advance_alike(verification: str):
    """Rows are cut where another one is rejected. False alarms with probability 1e-4 over both; see test_law.py."""
    assert min(p_values(in_lockstep(verification, batches=100), exact_distribution([]))) > 1e-4 / 4


def test_a_cut_that_ends_in_another_positions_token_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Rows that are cut emit the token that was drawn after all that they accepted."""
    append = Batch.append

    def wrong(self, draft, verdict, *rest):
        least = verdict.accepted.amin().expand_as(verdict.accepted)
        return append(self, draft, verdict._replace(accepted=least), *rest)

    monkeypatch.setattr(Batch, "append", wrong)
    assert min(p_values(in_lockstep("token", batches=100), exact_distribution([]))) < 1e-8


def test_lockstep_says_once_what_it_costs():
    target = tiny("lfm2", layer_types=["conv", "full_attention"])
    strategy, settings = coupled(target, 0.05), {"do_sample": False, "max_new_tokens": 20}
    with pytest.warns(UserWarning, match="fewest"):
        assert_plain(target, strategy, **settings)
    assert strategy.report.layout == "lockstep"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(**prompts(4), **settings, custom_generate=strategy)
