"""What forwards should cost before they were timed, and how times take its place."""

import itertools

import pytest
import torch
from tiny import near, prompts, tiny
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specx import EarlyExitDraft, SpeculativeDecoding, SuffixDraft
from hf_specx.drafting.costs import SHARE, Costs
from hf_specx.drafting.measuring import TIMED_ROUNDS
from hf_specx.drafting.prior import ACCELERATOR, NOTHING, QUERY_LENGTHS, ForwardSize, assumed_times, size_of


CPU = torch.device("cpu")
SAMPLED = {"do_sample": True, "max_new_tokens": 24}
PRIOR = {"target": {1: 1.0, 9: 2.0}, "draft": 0.1}


def forwards_of(model: PreTrainedModel) -> list[int]:
    """Grows by the query length of each forward of a model."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    return seen


def test_a_first_call_times_nothing():
    """The target runs for the prompts and the rounds alone."""
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.02))
    seen = forwards_of(target)
    target.generate(**prompts(2), **SAMPLED, custom_generate=strategy)
    report = strategy.report
    assert len(seen) == report.rounds + report.plain_steps
    assert report.rounds > 0
    part = report.rounds / (report.rounds + report.plain_steps)
    assert strategy.costs.allowance == pytest.approx(SHARE * report.seconds["total"] * part)


def test_plain_steps_give_no_time_for_measuring():
    """On text where nothing repeats a suffix draft costs no forwards but those of plain decoding, in any call."""
    target = tiny()
    strategy = SpeculativeDecoding(SuffixDraft(min_match=32))
    seen = forwards_of(target)
    for _ in range(3):
        target.generate(**prompts(2), **SAMPLED, eos_token_id=None, custom_generate=strategy)
    assert len(seen) == 3 * SAMPLED["max_new_tokens"]
    assert strategy.costs.allowance == 0


def test_an_early_exit_costs_what_a_model_of_its_layers_costs():
    assert EarlyExitDraft(2).of(tiny(num_hidden_layers=5)).size() == size_of(tiny(num_hidden_layers=2))


def test_what_is_assumed_is_not_reported_as_measured():
    target = tiny()
    strategy = SpeculativeDecoding(near(target, 0.02))
    target.generate(**prompts(2), **SAMPLED, custom_generate=strategy)
    report, costs = strategy.report, strategy.costs
    assert (report.cost_coefficient, report.expected_speedup, report.forward_limited_speedup) == (None, None, None)
    assert (set(costs.table), costs.to_dict()["table"], costs.knows(2)) == ({2}, {}, False)
    assert "batch sizes []" in repr(costs)
    strategy.calibrate(target, prompts(2)["input_ids"])
    assert report.cost_coefficient > 0


@pytest.mark.parametrize(
    "draft", [SuffixDraft(), PromptLookupCandidateGenerator(num_output_tokens=3, max_length=50)], ids=["ours", "stock"]
)
def test_a_draft_without_forwards_takes_next_to_no_time(draft):
    strategy = SpeculativeDecoding(draft)
    strategy.calibrate(tiny(), prompts(2)["input_ids"])
    assert strategy.costs.knows(2)
    assert strategy.costs.cost_coefficient(2) < 0.05


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_a_new_strategy_gives_the_same_text_whatever_the_clock(verification: str):
    target, texts = tiny(), []
    draft = near(target, 0.05)
    for slowness in (1e-6, 1e3):
        ticks = itertools.count()
        costs = Costs(clock=lambda ticks=ticks, slowness=slowness: slowness * next(ticks))
        strategy = SpeculativeDecoding(draft, verification=verification, costs=costs)
        torch.manual_seed(3)
        texts.append(target.generate(**prompts(3), **SAMPLED, custom_generate=strategy))
    assert torch.equal(*texts)


def test_measuring_keeps_to_its_share_and_ends():
    """Each forward takes 1 s: after 75 s of allowance all are known, and no call takes a step more than it may."""
    clock, calls = itertools.count(), []
    costs, taken = Costs(clock=lambda: float(next(clock))), 0.0
    for call in itertools.count(1):
        costs.allowance += 5.0
        costs.prepare(2, calls.append, calls.append, PRIOR)
        if costs.knows(2):
            break
        assert costs.table[2] is PRIOR
        taken = 5.0 * call - costs.allowance
        assert taken <= 5.0 * call + 3.0
    assert len(calls) == 3 * len(QUERY_LENGTHS) * (1 + TIMED_ROUNDS)
    assert call == len(calls) / 5.0
    assert costs.table[2]["target"].keys() == set(QUERY_LENGTHS)


def test_what_was_measured_stays():
    costs = Costs({2: PRIOR})
    costs.allowance = 1e9
    costs.prepare(2, None, None, {"target": {1: 5.0, 9: 6.0}, "draft": 1.0})
    assert costs.table == {2: PRIOR}


def test_sizes_count_what_a_forward_after_the_prompt_reads():
    tied, untied = (tiny(tie_word_embeddings=tied) for tied in (True, False))
    table = 4 * tied.get_input_embeddings().weight.numel()
    weights = 4 * sum(weight.numel() for weight in tied.parameters())
    assert size_of(tied) == ForwardSize(tied.config.num_hidden_layers, weights)
    assert size_of(untied).dense == weights  # the table that is looked up is not read, the head is
    assert 4 * untied.num_parameters() == weights + table
    shape = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}
    whole = T5ForConditionalGeneration(T5Config(num_layers=6, num_decoder_layers=2, **shape))
    assert size_of(whole).dense < 0.5 * 4 * whole.num_parameters()
    assert size_of(whole).layers == 2
    assert size_of(tied.to(torch.bfloat16)).dense == weights / 2
    assert size_of(tied.to("meta")) is None


def test_experts_are_read_as_far_as_tokens_choose_them():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, **sizes)
    size = size_of(MixtralForCausalLM(config))
    assert size.experts == 4 * 2 * 8 * 3 * 16 * 16
    assert size.share == 0.25


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_larger_forwards_cost_more(device: str):
    target, draft, where = ForwardSize(32, 14e9, weight=2.0), ForwardSize(4, 1e9, weight=2.0), torch.device(device)
    one, many = (assumed_times(target, draft, batch, where) for batch in (1, 64))
    for row in (one, many):
        assert list(row["target"].values()) == sorted(row["target"].values())
        assert 0 < row["draft"] < row["target"][1]
    assert many["target"][9] > one["target"][9]
    assert assumed_times(target, NOTHING, 1, where)["draft"] == 0


def test_a_small_model_on_an_accelerator_is_bound_by_its_layers():
    small, deep = (ForwardSize(layers, 1e6) for layers in (2, 8))
    row = assumed_times(deep, small, 1, torch.device("cuda"))
    assert row["target"][1] == row["target"][9] > 8 * ACCELERATOR.layer
    assert row["draft"] < row["target"][1] / 2
