"""How long forwards and rounds take: assumed, timed, remembered, and read by a call; by fake forwards and clocks."""

import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import near, prompts, tiny
from transformers import MixtralConfig, MixtralForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specx import EarlyExitDraft, SpeculativeDecoding, SuffixDraft
from hf_specx.drafting.costs import ASSUMED, ENOUGH, MEMORY, NOT_TIMED, PAYS_FOR_TIMING, Costs, Pace
from hf_specx.drafting.draft_length import (
    MAX_DRAFT_TOKENS,
    PRIOR_ALPHA,
    WEIGHT,
    expected_tokens,
)
from hf_specx.drafting.forward_times import (
    ACCELERATOR,
    GRID,
    NOTHING,
    QUERY_LENGTHS,
    ForwardSize,
    assumed_times,
    size_of,
)


SAMPLED = {"do_sample": True, "max_new_tokens": 24}
PRIOR = {"target": {1: 1.0, 9: 2.0}, "draft": 0.1}
ROW = {"target": {1: 1.0, 2: 1.2, 9: 4.0}, "draft": 0.2}

# where a target forward of any length takes 1 and a draft step c: c, α, the best γ, its speed-up
CLOSED_FORM = [
    (0.05, 0.5, 3, 1.63),
    (0.05, 0.8, 8, 3.09),
    (0.1, 0.6, 3, 1.67),
    (0.2, 0.5, 1, 1.25),
    (0.2, 0.9, 7, 2.37),
    (0.4, 0.8, 2, 1.36),
    (0.6, 0.9, 2, 1.23),
]


def flat(draft: float, alpha: float) -> Costs:
    """Target forwards take 1 at any length."""
    return Costs({4: {"target": dict.fromkeys(QUERY_LENGTHS, 1.0), "draft": draft}}, {"block": alpha})


@pytest.mark.parametrize(("c", "alpha", "gamma", "speedup"), CLOSED_FORM)
def test_best_number_is_that_of_the_closed_form(c: float, alpha: float, gamma: int, speedup: float):
    costs = flat(c, alpha)
    assert costs.best_num_draft_tokens(4, "block") == gamma
    assert costs.forward_limited_speedup(4, expected_tokens(alpha, gamma), gamma) == pytest.approx(speedup, abs=0.006)
    of_theorem = expected_tokens(alpha, gamma) / (gamma * costs.cost_coefficient(4) + 1)
    assert of_theorem == pytest.approx(speedup, abs=0.006)


def test_best_number_stays_in_its_range_where_every_number_is_tried():
    """In the last case a forward of 5 costs as one of 9, so speed falls from γ = 1 to 4 and is best at 8."""
    assert flat(0.01, 0.999).best_num_draft_tokens(4, "block") == MAX_DRAFT_TOKENS
    assert flat(2.0, 0.1).best_num_draft_tokens(4, "block") == 1
    costs = Costs({1: {"target": {1: 1.0, 2: 1.0, 3: 2.0, 5: 3.5, 9: 3.5, 10: 9.0}, "draft": 0.01}}, {"token": 0.95})
    assert costs.best_num_draft_tokens(1, "token") == 8


def test_forward_limited_speedup_by_hand():
    costs = Costs({2: {"target": {1: 1.0, 2: 1.5, 4: 2.0}, "draft": 0.2}})
    assert costs.cost_coefficient(2) == pytest.approx(0.2)
    assert costs.forward_limited_speedup(2, tokens_per_round=1.9, num_draft_tokens=2) == pytest.approx(1.9 / 2.15)


@pytest.mark.parametrize(("query_length", "seconds"), [(1, 1.0), (2, 1.5), (3, 2.5), (5, 4.5), (9, 8.5)])
def test_lengths_between_and_beyond_the_measured_are_on_a_line(query_length: int, seconds: float):
    costs = Costs({1: {"target": {1: 1.0, 2: 1.5, 4: 3.5}, "draft": 0.2}})
    assert costs.target(1, query_length) == pytest.approx(seconds)
    falling = Costs({1: {"target": {1: 1.0, 5: 1.2, 9: 1.1}, "draft": 0.2}})  # noise; not prolonged below
    assert falling.target(1, 20) == pytest.approx(1.1)


def test_other_batch_sizes_take_as_long_as_forwards_of_as_many_tokens():
    """Of the nearest size; fewer tokens go on along the line, not faster than they grow fewer."""
    costs = Costs({4: ROW})
    assert costs.target(2, 4) == costs.target(8, 1) == pytest.approx(1.2)
    assert costs.target(2, 1) == pytest.approx(1 - 0.2 / 2)
    assert costs.draft(1) == pytest.approx(0.2 * 0.85)
    assert Costs({4: {"target": {1: 1.0, 2: 4.0}, "draft": 0.2}}).target(1, 1) == pytest.approx(0.25)
    assert Costs({4: {"target": {1: 1.0, 2: 0.9}, "draft": 0.2}}).target(2, 1) == 1
    two = Costs({2: ROW, 6: {"target": {1: 3.0, 9: 11.0}, "draft": 0.6}})
    assert two.target(3, 4) == pytest.approx(two.target(2, 6))
    assert two.target(5, 6) == pytest.approx(two.target(6, 5))


def fake_forward(clock: SimpleNamespace, seconds: dict[int, float], calls: list[int]) -> Callable[[int], None]:
    """Advances a clock by the seconds of a query length; the first call and one more are slow."""

    def forward(query_length: int) -> None:
        calls.append(query_length)
        clock.now += seconds[query_length] * (100 if calls.count(query_length) in (1, 3) else 1)

    return forward


def measured(target: dict[int, float], draft: float) -> Costs:
    clock = SimpleNamespace(now=5.0)
    costs = Costs(clock=lambda: clock.now)
    costs.measure(8, fake_forward(clock, target, []), fake_forward(clock, {1: draft}, []))
    return costs


def test_measure_takes_typical_times():
    """On a grid, so that two processes that time the same machine mostly draft the same numbers."""
    seconds = {1: 0.010, 3: 0.013, 9: 0.030}
    costs = measured(seconds, 0.003)
    for query_length, expected in seconds.items():
        assert GRID**-0.5 <= costs.target(8, query_length) / expected <= GRID**0.5
    assert GRID**-0.5 <= costs.draft(8) / 0.003 <= GRID**0.5
    tables = []
    for factor in (0.99, 1.01):
        near_it = {q: factor * GRID ** -(50 - q) for q in QUERY_LENGTHS}
        tables.append(measured(near_it, factor * GRID**-60).table)
    assert tables[0] == tables[1]


def test_what_was_measured_elsewhere_is_taken_over():
    """By batch size, and only where it is asked for; what is measured here is found there."""
    elsewhere = {8: {"target": {1: 1.0, 9: 2.0}, "draft": 0.1}, 2: {"target": {1: 3.0, 9: 4.0}, "draft": 0.2}}
    calls, costs = list[int](), Costs(clock=lambda: 1.0, measured=elsewhere)
    costs.prepare(8, calls.append, calls.append)
    assert not calls
    assert costs.table == {8: elsewhere[8]}
    costs.prepare(4, calls.append, calls.append)
    assert calls
    assert elsewhere[4] is costs.table[4]


def test_forwards_are_timed_once_earlier_rounds_pay_for_it():
    calls, ticks = list[int](), itertools.count()
    costs = Costs(clock=lambda: float(next(ticks)))
    for rounds in (0, PAYS_FOR_TIMING - 1):
        costs.remember("block", 0.5, 0, rounds)
        costs.prepare(2, calls.append, calls.append, PRIOR)
        assert costs.table == {2: PRIOR}
        assert not calls
    costs.remember("block", 0.5, 0, rounds=1)
    costs.prepare(2, calls.append, calls.append, PRIOR)
    assert len(calls) == 45
    assert costs.knows(2)
    assert costs.table[2]["target"].keys() == set(QUERY_LENGTHS)
    costs.prepare(3, calls.append, calls.append, PRIOR)  # that was spent
    assert not costs.knows(3)


def test_round_trip_through_json():
    costs = measured({q: 0.01 + 0.001 * q for q in QUERY_LENGTHS}, 0.003)
    costs.alpha["block"], costs.rounds[3] = 0.8, {0: 1.0, 4: 2.0}
    back = Costs.from_dict(json.loads(json.dumps(costs.to_dict())))
    assert (back.table, back.alpha, back.rounds) == (costs.table, {"block": 0.8}, {3: {0: 1.0, 4: 2.0}})


def test_a_copy_remembers_other_calls():
    costs = Costs(alpha={"block": 0.5}, rounds={1: {1: 1.0}}, clock=lambda: 7.0)
    costs.prepare(2, lambda _: None, lambda _: None, PRIOR)
    other = costs.apart()
    assert other.table == {2: PRIOR}
    assert not other.knows(2)
    other.measure(2, lambda _: None, lambda _: None)
    other.alpha["block"], other.rounds[1][1] = 0.9, 2.0
    assert costs.table == {2: PRIOR}
    assert (costs.alpha, costs.rounds, other.clock()) == ({"block": 0.5}, {1: {1: 1.0}}, 7.0)


def test_acceptance_is_remembered_by_verification():
    """What is assumed gives way to what was seen; then 100 judged candidates weigh as much as all before."""
    costs = Costs()
    costs.remember("block", 0.1, judged=WEIGHT)
    costs.remember("token", 0.5, judged=0)
    assert costs.alpha == {"block": pytest.approx((PRIOR_ALPHA + 0.1) / 2)}  # nothing was seen of the other
    costs.remember("block", 0.8, judged=MEMORY)
    assert costs.alpha["block"] == pytest.approx((0.4 + 0.8) / 2)


def remembered(costs: Costs, *rounds: tuple[int, float]) -> dict[int, float]:
    """What is kept of a call of four rows that had each of these rounds as often as is needed."""
    costs.remember_rounds({(4, number): [seconds] * ENOUGH for number, seconds in rounds})
    return costs.rounds.get(4, {})


def test_later_calls_know_what_was_seen_often_enough():
    costs = Costs({4: ROW})
    costs.remember_rounds({(4, 1): [2.0] * ENOUGH, (4, 2): [3.0] * (ENOUGH - 1)})
    assert costs.rounds == {4: {1: pytest.approx(2.0, rel=0.02)}}
    assert remembered(costs, (1, 8.0)) == {1: pytest.approx(4.0, rel=0.02)}  # halfway, so that no call decides alone


def test_times_of_numbers_that_a_call_left_for_others_are_dropped():
    """Plain steps stay known, and a call of plain steps leaves all others as they are."""
    costs = Costs({4: ROW}, rounds={4: {0: 1.0, 5: 9.0}})
    assert remembered(costs, (0, 1.0))[5] == 9.0
    assert remembered(costs, (1, 2.0)).keys() == {0, 1}


def lasting(costs: Costs, seconds: list[tuple[int, float]], online: bool) -> Pace:
    """A call of four rows after rounds of so many candidates that took so long."""
    now, pace = [0.0], Pace(Costs(costs.table, costs.alpha, costs.rounds, clock=lambda: now[0]), online)
    for drafted, took in seconds:
        now[0] += took
        pace.observe(4, drafted)
    return pace


def test_rounds_take_what_they_were_seen_to_take():
    """Plain steps, and rounds with any number of candidates, each in relation to their forwards."""
    costs = Costs({4: ROW})
    bare = [costs.forwards(4, number) for number in range(6)]
    seen = [(0, 9.0)] + [(0, 3 * bare[0])] * ENOUGH
    seen += [(3, 5.0)] + [(1, 2 * bare[1])] * ENOUGH + [(3, 8 * bare[3])] * ENOUGH
    for rows in (4, 2):  # another batch size goes by the nearest
        forwards = [costs.forwards(rows, number) for number in range(6)]
        ratios = [t / b for t, b in zip(lasting(costs, seen, online=True).times(rows, 5), forwards, strict=True)]
        assert ratios == pytest.approx([3, 4, 4, 4, 4, 4], rel=0.02)
    assert lasting(costs, seen, online=False).times(4, 5) == bare
    assert lasting(costs, seen[:ENOUGH], online=True).times(4, 5) == bare
    assert Pace(costs).times(4, 5, steps=False) == [costs.target(4, number) for number in range(1, 7)]
    costs.rounds = {4: {2: 2 * costs.forwards(4, 2)}}  # of plain steps nothing is known
    assert Pace(costs).times(4, 3)[0] == pytest.approx(2 * costs.forwards(4, 0))


def test_rounds_that_are_not_typical_do_not_count():
    """The first, and those in which a draft catches up."""
    pace = lasting(Costs({4: ROW}), [(2, 99.0), (0, 1.3), (0, 1.1), (2, 60.0), (2, 2.5), (2, 2.5)], online=True)
    assert {kind: list(took) for kind, took in pace.seen.items()} == {
        (4, 0): pytest.approx([1.3, 1.1]),
        (4, 2): pytest.approx([2.5, 2.5]),
    }


def test_whether_plain_steps_were_timed():
    """By another call or in this one, at about as many rows."""
    costs = Costs({4: ROW})
    assert not lasting(costs, [(0, 1.0)] * ENOUGH, online=False).has_seen_plain(4)
    assert lasting(costs, [(0, 1.0)] * (1 + ENOUGH), online=False).has_seen_plain(4)
    earlier = Pace(Costs({4: ROW}, rounds={4: {0: 1.0}}))
    assert [earlier.has_seen_plain(rows) for rows in (1, 2, 4, 8, 9)] == [False, True, True, True, False]


def test_a_call_is_not_moved_by_what_others_learn_meanwhile():
    costs = Costs({4: ROW})
    pace = Pace(costs)
    before = pace.times(4, 3), pace.reading(2, 5)
    costs.table[2], costs.rounds[4] = {"target": {1: 9.0, 9: 9.0}, "draft": 9.0}, {0: 8.0}
    assert (pace.times(4, 3), pace.reading(2, 5)) == before
    assert pace.reading(4, 16) == pytest.approx(0.2 * (4 + 7 * 0.4))  # grows as the target's forward


def test_without_times_a_candidate_adds_a_fifth():
    for pace in (Pace(None), Pace(Costs())):
        assert pace.times(8, 2) == pytest.approx([1, 1 + 2 * ASSUMED, 1 + 4 * ASSUMED])
        assert pace.times(8, 2, steps=False) == pytest.approx([1, 1 + ASSUMED, 1 + 2 * ASSUMED])


def test_times_of_a_call_without_a_table_change_no_other_call():
    before, now = Pace(None).times(1, 3), itertools.count()
    pace = Pace(Costs(clock=lambda: next(now) ** 2), online=True)
    for _ in range(2 * ENOUGH):
        pace.observe(1, 0)
    assert Pace(None).times(1, 3) == before
    assert not NOT_TIMED.rounds


def test_a_first_call_times_nothing_and_reports_nothing_as_measured():
    """The target runs for the prompts and the rounds alone."""
    target, seen = tiny(), []
    strategy = SpeculativeDecoding(near(target, 0.02))
    hook = target.register_forward_pre_hook(lambda *given: seen.append(1), with_kwargs=True)
    target.generate(**prompts(2), **SAMPLED, custom_generate=strategy)
    hook.remove()
    report, costs = strategy.report, strategy.costs
    assert len(seen) == report.rounds + report.plain_steps
    assert costs.unspent == report.rounds > 0
    assert (report.cost_coefficient, report.expected_speedup, report.forward_limited_speedup) == (None, None, None)
    assert (set(costs.table), costs.to_dict()["table"], costs.knows(2)) == ({2}, {}, False)
    strategy.calibrate(target, prompts(2)["input_ids"])
    assert report.cost_coefficient > 0


@pytest.mark.parametrize(
    "draft", [SuffixDraft(), PromptLookupCandidateGenerator(num_output_tokens=3, max_length=50)], ids=["ours", "stock"]
)
def test_a_draft_without_forwards_takes_next_to_no_time(draft: Any):
    strategy = SpeculativeDecoding(draft)
    strategy.calibrate(tiny(), prompts(2)["input_ids"])
    assert strategy.costs.cost_coefficient(2) < 0.05


def test_sizes_of_models():
    """Weights that every token needs: a head, but no looked-up table; of the decoder alone; experts by their share."""
    tied, free = tiny(tie_word_embeddings=True), tiny()
    for model in (tied, free):
        weights = sum(weight.numel() for name, weight in model.model.named_parameters() if "embed" not in name)
        weights += model.lm_head.weight.numel()
        assert size_of(model) == ForwardSize(2, 4 * weights)
    sizes = {"d_model": 32, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 4, "num_decoder_layers": 2}
    assert size_of(T5ForConditionalGeneration(T5Config(vocab_size=32, **sizes))).layers == 2
    assert size_of(tied.to(torch.bfloat16)).dense == 2 * sum(
        weight.numel() for name, weight in tied.named_parameters()
    )
    assert size_of(tied.to("meta")) is None
    assert EarlyExitDraft(2).of(tiny(num_hidden_layers=5)).size() == size_of(tiny(num_hidden_layers=2))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, **sizes)
    size = size_of(MixtralForCausalLM(config))
    assert (size.experts, size.share) == (4 * 2 * 8 * 3 * 16 * 16, 0.25)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_larger_forwards_are_assumed_to_cost_more(device: str):
    target, draft, where = ForwardSize(32, 14e9, weight=2.0), ForwardSize(4, 1e9, weight=2.0), torch.device(device)
    one, many = (assumed_times(target, draft, batch, where) for batch in (1, 64))
    for row in (one, many):
        assert list(row["target"].values()) == sorted(row["target"].values())
        assert 0 < row["draft"] < row["target"][1]
    assert many["target"][9] > one["target"][9]
    assert assumed_times(target, NOTHING, 1, where)["draft"] == 0
    small, deep = (ForwardSize(layers, 1e6) for layers in (2, 8))  # on an accelerator bound by their layers
    row = assumed_times(deep, small, 1, torch.device("cuda"))
    assert row["target"][1] == row["target"][9] > 8 * ACCELERATOR.layer


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
