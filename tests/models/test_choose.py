"""Each layout forced on models that it claims, the choice, and the reports; the sweep walks all architectures."""

import warnings

import pytest
import torch
from all_pairs import all_pairs
from enumerated import exact_distribution, first_tokens, models, p_values
from tiny import Forwards, near, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import SpeculativeDecoding
from hf_specx.common.batch import Batch
from hf_specx.engine.report import SpeculationReport
from hf_specx.models.choose import DECODERS, choose_layout, layouts_of


MODEL_TYPES = ("cohere", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "phi3", "qwen2", "smollm3", "stablelm")
NEW_TOKENS = 31


def pair(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny(model_type)
    return target, near(target, 0.05)


def run(target: PreTrainedModel, draft: PreTrainedModel, layout: str, verification: str = "coupled", **settings):
    strategy = SpeculativeDecoding(draft, num_draft_tokens=4, verification=verification, layout=layout)
    torch.manual_seed(3)
    with Forwards(target) as forwards:
        output = target.generate(**prompts(4), **settings, custom_generate=strategy)
    return output, strategy.report, forwards.lengths


@pytest.mark.parametrize(("model_type", "layout", "do_sample"), all_pairs(MODEL_TYPES, DECODERS, [False, True]))
def test_every_layout_equals_stock(model_type: str, layout: str, do_sample: bool):
    target, draft = pair(model_type)
    settings = {"do_sample": do_sample, "top_k": 0, "max_new_tokens": NEW_TOKENS}
    torch.manual_seed(3)
    expected = target.generate(**prompts(4), **settings)
    output, report, lengths = run(target, draft, layout, **settings)
    assert torch.equal(output, expected)
    assert report.layout == layout
    assert 1 + 6 <= len(lengths) < NEW_TOKENS
    assert report.accepted > 0


def verdicts(report: SpeculationReport) -> list[dict[int, bool]]:
    """For each row, whether the candidate at each judged position was accepted."""
    rows = []
    for history in report.history:
        found, end = {}, 0
        for record in history:
            found |= {end + i: i < record.accepted for i in range(min(record.accepted + 1, record.drafted))}
            end += record.emitted
        rows.append(found)
    return rows


@pytest.mark.parametrize(
    ("model_type", "verification"),
    [("llama", "token"), ("llama", "block"), ("llama", "coupled"), ("mistral", "coupled"), ("gpt2", "coupled")],
)
def test_acceptance_does_not_depend_on_the_layout(model_type: str, verification: str):
    """Row by row; in lockstep the rounds differ, but not the verdict on any position that both judged."""
    target, draft = pair(model_type)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, "verification": verification}
    expected, report, _ = run(target, draft, "ragged", **settings)
    assert 0 < report.accepted < report.drafted
    for layout in ("padded", "packed"):
        output, found, _ = run(target, draft, layout, **settings)
        assert torch.equal(output, expected)
        assert (found.history, found.accepted_per_row) == (report.history, report.accepted_per_row)
    if verification == "coupled":  # else other numbers are drawn
        lockstep = run(target, draft, "lockstep", **settings)[1]
        for one, other in zip(verdicts(report), verdicts(lockstep), strict=True):
            both = one.keys() & other.keys()
            assert len(both) > NEW_TOKENS / 2
            assert all(one[position] == other[position] for position in both)
        assert lockstep.rounds > report.rounds


def in_lockstep(verification: str, batches: int) -> torch.Tensor:
    """First tokens of batches of four rows."""
    strategy = SpeculativeDecoding(models()[1], num_draft_tokens=3, verification=verification, layout="lockstep")
    return first_tokens(strategy, batches, rows=4)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_the_law_where_all_rows_advance_alike(verification: str):
    """Rows are cut where another one is rejected. False alarms with probability 1e-4 over both; see test_law.py."""
    assert min(p_values(in_lockstep(verification, batches=100), exact_distribution([]))) > 1e-4 / 4


def test_a_cut_that_ends_in_another_positions_token_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Rows that are cut emit the token that was drawn after all that they accepted."""
    append = Batch.append

    def wrong(self, draft, judgement, *rest):
        least = judgement.accepted.amin().expand_as(judgement.accepted)
        return append(self, draft, judgement._replace(accepted=least), *rest)

    monkeypatch.setattr(Batch, "append", wrong)
    assert min(p_values(in_lockstep("token", batches=100), exact_distribution([]))) < 1e-8


def test_the_choice_and_its_reason_are_reported():
    assert choose_layout(tiny("llama")) == (
        "ragged",
        "chosen: llama takes positions and a 4D mask by position under sdpa",
    )
    assert choose_layout(tiny("llama"), "padded")[1].startswith("asked for")


def test_flash_attention_has_no_mask_by_position():
    llama = tiny("llama")
    llama.config._attn_implementation = "flash_attention_2"
    assert layouts_of(llama)[0] == "padded"
    with pytest.raises(ValueError, match="layout='ragged' has not been shown .* use 'padded', 'lockstep' or 'auto'"):
        choose_layout(llama, "ragged")


def test_a_type_that_needs_a_mask_by_position_says_so():
    llama = tiny("llama")
    llama.config.model_type, llama.config._attn_implementation = "moshi", "flash_attention_2"
    with pytest.raises(ValueError, match="'moshi' is exact with a mask by position only.*implementation='sdpa'"):
        layouts_of(llama)


def test_lockstep_says_once_what_it_costs():
    target, draft = pair("llama")
    target.config.model_type = "never_heard_of"
    settings = {"do_sample": False, "max_new_tokens": 20}
    strategy = SpeculativeDecoding(draft, num_draft_tokens=4)
    with pytest.warns(UserWarning, match="as the row that accepted the fewest"):
        output = target.generate(**prompts(4), **settings, custom_generate=strategy)
    assert torch.equal(output, target.generate(**prompts(4), **settings))
    assert strategy.report.layout == "lockstep"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.generate(**prompts(4), **settings, custom_generate=strategy)
