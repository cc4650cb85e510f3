"""How long forwards and rounds take: assumed, timed, remembered, and read by a call; by fake forwards and clocks."""

import json
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from counting import reads_only
from plain import coupled
from tiny import near, prompts, tiny
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.logits_process import LogitsProcessor

from hf_specx import EarlyExitDraft, SpeculativeDecoding, SuffixDraft
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.drafting.costs import (
    ALPHA_MEMORY,
    MAX_DRAFT_TOKENS,
    MIN_SAMPLES,
    PRIOR_ALPHA,
    PRIOR_WEIGHT,
    ROUNDS_PER_TIMING,
    Costs,
    expected_tokens,
)
from hf_specx.drafting.forward_times import GRID, QUERY_LENGTHS, TREE_QUERY_LENGTHS, ForwardSize, size_of
from hf_specx.drafting.round_timer import RoundTimer


SAMPLED = {"do_sample": True, "max_new_tokens": 24}
RESTING = Costs(
    {2: {"target": {1: 1.0, 9: 2.0}, "draft": 1.0}},
    {"coupled": 0.02},
    {2: {0: 1.0, 2: 4.0}},
    trial_budget=9.0,  # of some 10 plain steps that a trial is expected to lose
    clock=count().__next__,
)
PRIOR = {"target": {1: 1.0, 9: 2.0}, "draft": 0.1}
ROW = {"target": {1: 1.0, 2: 1.2, 9: 4.0}, "draft": 0.2}

# where a target forward of any length takes 1 and a draft step c: c, α, the best γ, its speed-up
CLOSED_FORM = [
    (0.05, 1 + 1e-7, 20, 10.5),  # a mean of float sums may come out a little over 1
    (0.05, 0.8, 8, 3.09),
    (0.1, 0.6, 3, 1.67),
    (0.2, 0.5, 1, 1.25),
    (0.6, 0.9, 2, 1.23),
]


def flat(draft: float, alpha: float) -> Costs:
    """Target forwards take 1 at any length."""
    return Costs({4: {"target": dict.fromkeys(QUERY_LENGTHS, 1.0), "draft": draft}}, {"block": alpha})


def test_best_number_is_that_of_the_closed_form_and_every_number_is_tried():
    """In the last case a forward of 5 costs as one of 9, so speed falls from γ = 1 to 4 and is best at 8."""
    for c, alpha, gamma, speedup in CLOSED_FORM:
        costs = flat(c, alpha)
        assert costs.best_fixed_num_draft_tokens(4, "block") == gamma
        limited = costs.forward_limited_speedup(4, expected_tokens(alpha, gamma), gamma)
        of_theorem = expected_tokens(alpha, gamma) / (gamma * costs.cost_coefficient(4) + 1)
        assert (limited, of_theorem) == pytest.approx((speedup, speedup), abs=0.006)
    assert flat(0.01, 0.999).best_fixed_num_draft_tokens(4, "block") == MAX_DRAFT_TOKENS
    assert flat(0.01, 0.999).best_fixed_num_draft_tokens(4, "block", limit=5) == 5
    assert flat(2.0, 0.1).best_fixed_num_draft_tokens(4, "block") == 1
    costs = Costs({1: {"target": {1: 1.0, 2: 1.0, 3: 2.0, 5: 3.5, 9: 3.5, 10: 9.0}, "draft": 0.01}}, {"token": 0.95})
    assert costs.best_fixed_num_draft_tokens(1, "token") == 8


FORWARDS = [  # what was measured, by batch size and query length; the forward that is asked for, and its seconds
    ({1: {1: 1.0, 2: 1.5, 4: 3.5}}, (1, 3), 2.5),
    ({1: {1: 1.0, 2: 1.5, 4: 3.5}}, (1, 9), 8.5),
    ({1: {1: 1.0, 5: 1.2, 9: 1.1}}, (1, 20), 1.1),  # noise, which is not prolonged below
    ({4: ROW["target"]}, (2, 4), 1.2),  # one of as many tokens
    ({4: ROW["target"]}, (8, 1), 1.2),
    ({4: ROW["target"]}, (2, 1), 0.9),
    ({4: {1: 1.0, 2: 4.0}}, (1, 1), 0.25),  # fewer tokens take no less than in proportion
    ({4: {1: 1.0, 2: 0.9}}, (2, 1), 1.0),
    ({2: {1: 1.0, 9: 9.0}, 6: {1: 5.0, 9: 5.0}}, (3, 4), 6.0),  # of the nearest size
    ({2: {1: 1.0, 9: 9.0}, 6: {1: 5.0, 9: 5.0}}, (5, 6), 5.0),
]


@pytest.mark.parametrize(("measured_times", "asked", "seconds"), FORWARDS)
def test_forwards_between_and_beyond_the_measured_are_on_a_line(
    measured_times: dict, asked: tuple[int, int], seconds: float
):
    costs = Costs({batch: {"target": times, "draft": 0.2} for batch, times in measured_times.items()})
    assert costs.target_seconds(*asked) == pytest.approx(seconds)


def measured(target: dict[int, float], draft: float) -> Costs:
    """By forwards that take these seconds; the first one of a length and one more are slow."""
    now, calls = [5.0], list[float]()
    costs = Costs(clock=lambda: now[0])

    def takes(seconds: float) -> None:
        calls.append(seconds)
        now[0] += seconds * (100 if calls.count(seconds) in (1, 3) else 1)

    costs.measure(8, lambda query: takes(target[query]), lambda query: takes(draft))
    return costs


def test_measure_takes_typical_times():
    """On a grid, so that two processes that time the same machine mostly draft the same numbers."""
    seconds = {1: 0.010, 3: 0.013, 9: 0.030}
    costs = measured(seconds, 0.003)
    for query_length, expected in seconds.items():
        assert GRID**-0.5 <= costs.target_seconds(8, query_length) / expected <= GRID**0.5
    assert GRID**-0.5 <= costs.draft_seconds(8) / 0.003 <= GRID**0.5
    tables = []
    for factor in (0.99, 1.01):
        near_it = {q: factor * GRID ** -(50 - q) for q in QUERY_LENGTHS}
        tables.append(measured(near_it, factor * GRID**-60).forward_times)
    assert tables[0] == tables[1]


def test_forwards_are_timed_once_earlier_rounds_pay_for_it():
    calls, ticks = list[int](), count()
    costs = Costs(clock=lambda: float(next(ticks)))
    for rounds in (0, ROUNDS_PER_TIMING - 1):
        costs.remember("block", 0.5, 0, rounds)
        costs.prepare(2, calls.append, calls.append, PRIOR)
        assert costs.forward_times == {2: PRIOR}
        assert not calls
    costs.remember("block", 0.5, 0, rounds=1)
    costs.prepare(2, calls.append, calls.append, PRIOR)
    assert len(calls) == 45
    assert costs.knows(2)
    assert costs.forward_times[2]["target"].keys() == set(QUERY_LENGTHS)
    costs.prepare(3, calls.append, calls.append, PRIOR)  # that was spent
    assert not costs.knows(3)


def test_calls_with_trees_time_longer_forwards_as_well():
    calls, ticks = list[int](), count()
    costs = Costs(clock=lambda: float(next(ticks)))
    costs.prepare(2, calls.append, calls.append)
    assert costs.knows(2)
    short = costs.forward_times[2]
    costs.prepare(2, calls.append, calls.append, short, TREE_QUERY_LENGTHS)  # it waits for rounds that pay for it
    assert costs.forward_times[2] is short
    costs.remember("coupled", 0.5, 0, rounds=ROUNDS_PER_TIMING)
    costs.prepare(2, calls.append, calls.append, short, TREE_QUERY_LENGTHS)
    assert costs.forward_times[2]["target"].keys() == set(TREE_QUERY_LENGTHS)
    number = len(calls)
    costs.prepare(2, calls.append, calls.append)
    assert len(calls) == number


def test_round_trip_through_json():
    costs = measured({q: 0.01 + 0.001 * q for q in QUERY_LENGTHS}, 0.003)
    costs.alpha["block"], costs.rounds[3] = 0.8, {0: 1.0, 4: 2.0}
    back = Costs.from_dict(json.loads(json.dumps(costs.to_dict())))
    assert back.forward_times == costs.forward_times
    assert (back.alpha, back.rounds) == ({"block": 0.8}, {3: {0: 1.0, 4: 2.0}})


def test_acceptance_is_remembered_by_verification():
    """What is assumed gives way to what was seen; then 100 judged candidates weigh as much as all before."""
    costs = Costs()
    costs.remember("block", 0.1, judged=PRIOR_WEIGHT)
    costs.remember("token", 0.5, judged=0)
    assert costs.alpha == {"block": pytest.approx((PRIOR_ALPHA + 0.1) / 2)}  # nothing was seen of the other
    costs.remember("block", 0.8, judged=ALPHA_MEMORY)
    assert costs.alpha["block"] == pytest.approx((0.4 + 0.8) / 2)


def test_rounds_are_remembered():
    """Those seen often enough, halfway, so that no call decides alone; numbers left for others are dropped."""
    costs = Costs({4: ROW})
    calls = [
        ({1: 2.0}, {1: 2.0}),
        ({1: 8.0}, {1: 4.0}),
        ({0: 1.0}, {0: 1.0, 1: 4.0}),  # of plain steps alone
        ({2: 3.0}, {0: 1.0, 2: 3.0}),
    ]
    for seen, remembered in calls:
        costs.remember_rounds({(4, number): [seconds] * MIN_SAMPLES for number, seconds in seen.items()})
        costs.remember_rounds({(4, 5): [9.0] * (MIN_SAMPLES - 1)})
        assert costs.rounds == {4: pytest.approx(remembered, rel=0.03)}


def lasting(costs: Costs, seconds: list[tuple[int, float]], online: bool) -> RoundTimer:
    """A call of four rows after rounds of so many candidates that took so long."""
    now = [0.0]
    round_timer = RoundTimer(Costs(costs.forward_times, costs.alpha, costs.rounds, clock=lambda: now[0]), online)
    for drafted, took in seconds:
        now[0] += took
        round_timer.observe(4, drafted)
    return round_timer


def test_rounds_take_what_they_were_seen_to_take():
    """Plain steps, and rounds with any number of candidates, each in relation to their forwards."""
    costs = Costs({4: ROW})
    bare = [costs.forward_seconds(4, number) for number in range(6)]
    seen = [(0, 9.0)] + [(0, 3 * bare[0])] * MIN_SAMPLES
    seen += [(3, 5.0)] + [(1, 2 * bare[1])] * MIN_SAMPLES + [(3, 8 * bare[3])] * MIN_SAMPLES
    for rows in (4, 2):  # another batch size goes by the nearest
        forwards = [costs.forward_seconds(rows, number) for number in range(6)]
        ratios = [t / b for t, b in zip(lasting(costs, seen, online=True).times(rows, 5), forwards, strict=True)]
        assert ratios == pytest.approx([3, 4, 4, 4, 4, 4], rel=0.02)
    assert lasting(costs, seen, online=False).times(4, 5) == bare
    short = lasting(costs, seen[:MIN_SAMPLES], online=True)  # of which the first one does not count
    assert short.times(4, 5) == bare
    assert not short.has_seen_plain(4)
    assert RoundTimer(costs).times(4, 5, steps=False) == [costs.target_seconds(4, number) for number in range(1, 7)]
    costs.rounds = {4: {2: 2 * costs.forward_seconds(4, 2)}}  # of plain steps nothing is known
    assert RoundTimer(costs).times(4, 3)[0] == pytest.approx(2 * costs.forward_seconds(4, 0))
    costs.rounds = {4: {0: 1.0}}
    assert [RoundTimer(costs).has_seen_plain(rows) for rows in (1, 2, 4, 8, 9)] == [False, True, True, True, False]


def test_a_call_is_not_moved_by_what_others_learn_meanwhile():
    costs = Costs({4: ROW})
    round_timer = RoundTimer(costs)
    before = round_timer.times(4, 3), round_timer.prefill_seconds(2, 5)
    costs.forward_times[2], costs.rounds[4] = {"target": {1: 9.0, 9: 9.0}, "draft": 9.0}, {0: 8.0}
    assert (round_timer.times(4, 3), round_timer.prefill_seconds(2, 5)) == before
    assert round_timer.prefill_seconds(4, 16) == pytest.approx(0.2 * (4 + 7 * 0.4))  # grows as the target's forward
    round_timer.start()
    assert round_timer.times(4, 3) == RoundTimer(costs).times(4, 3) != before[0]


def test_a_first_call_times_nothing_and_reports_nothing_as_measured():
    """The target runs for the prompts and the rounds alone."""
    target, seen = tiny(), []
    strategy = SpeculativeDecoding(near(target, 0.02))
    hook = target.register_forward_pre_hook(reads_only(lambda *_: seen.append(1)), with_kwargs=True)
    target.generate(**prompts(2), **SAMPLED, custom_generate=strategy)
    hook.remove()
    report, costs = strategy.report, strategy.costs
    assert len(seen) == report.rounds + report.plain_steps
    assert costs.timing_budget == report.rounds > 0
    assert (report.cost_coefficient, report.expected_speedup, report.forward_limited_speedup) == (None, None, None)
    assert (set(costs.forward_times), costs.to_dict()["table"], costs.knows(2)) == ({2}, {}, False)
    strategy.calibrate(target, prompts(2)["input_ids"])
    assert report.cost_coefficient > 0


class Stateful(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.filterwarnings("error:transformers' own sampler decodes.*would not pay", "ignore:.*Stateful may keep")
def test_a_call_in_which_a_draft_would_rest_is_left_to_transformers():
    """Until enough steps have been plain to try the draft again, which has become a good one."""
    target, costs = tiny(), RESTING.copy()
    strategy, plainly = coupled(target, 0.005, num_draft_tokens="auto", costs=costs), []
    for seed in range(14):
        texts = []
        for custom in (None, strategy):
            torch.manual_seed(seed)
            texts.append(target.generate(**prompts(2), **SAMPLED, custom_generate=custom))
        assert torch.equal(*texts)
        plainly.append(strategy.report.layout == "plain")
        if seed == 0:
            assert "would not pay" in strategy.report.layout_reason
            saved = RESTING.trial_budget + 0.01 * strategy.report.plain_steps
            target.generate(**prompts(2), **SAMPLED, logits_processor=[Stateful()], custom_generate=strategy)
            assert costs.trial_budget == pytest.approx(saved)  # what is plain in any case saves nothing up
    assert plainly[:3] == [True] * 3
    assert not plainly[-1]
    assert strategy.report.accepted > 0


ROUNDS = {
    "long": {"max_new_tokens": 140},
    "mask": {"prefix_allowed_tokens_fn": lambda row, text: range(30)},
    "number": {"num_assistant_tokens": 2},
    "seeds": {"seeds": [1, 2]},
}


@pytest.mark.parametrize("way", [*ROUNDS, "listener", "suffix", "suffix alone", "lookup", "two at most", "compiled"])
@pytest.mark.filterwarnings("ignore:compile=True compiles")
def test_a_call_that_needs_rounds_is_not_left_to_transformers(
    way: str, untraced: None, monkeypatch: pytest.MonkeyPatch
):
    """Also a long one, in which a try comes due."""
    target, lookup = tiny(), PromptLookupCandidateGenerator(num_output_tokens=3, max_length=150)
    monkeypatch.setattr(SampledCandidateGenerator, "max_candidates", 2 if way == "two at most" else None)
    draft = near(target, 0.1)
    drafts = {"suffix": [SuffixDraft(), draft], "suffix alone": SuffixDraft(), "lookup": lookup}.get(way, draft)
    strategy = SpeculativeDecoding(drafts, verification="coupled", compile=way == "compiled", costs=RESTING.copy())
    strategy.listeners = (SimpleNamespace(observe=lambda done: None),) if way == "listener" else ()
    target.generate(**prompts(2), **SAMPLED | ROUNDS.get(way, {}), custom_generate=strategy)
    assert strategy.report.layout == "ragged"


@pytest.mark.parametrize(
    "draft", [SuffixDraft(), PromptLookupCandidateGenerator(num_output_tokens=3, max_length=50)], ids=["ours", "stock"]
)
def test_a_draft_without_forwards_takes_next_to_no_time(draft: Any):
    strategy = SpeculativeDecoding(draft)
    strategy.calibrate(tiny(), prompts(2)["input_ids"])
    assert strategy.costs.cost_coefficient(2) < 0.05


def test_sizes_of_models():
    """Weights that every token needs: a head, but no looked-up table; of the decoder alone; experts by their share."""
    for model in (tiny(), tiny(tie_word_embeddings=True)):
        weights = sum(weight.numel() for name, weight in model.model.named_parameters() if "embed" not in name)
        assert size_of(model) == ForwardSize(2, 4 * (weights + model.lm_head.weight.numel()))
    assert size_of(model.to("meta")) is None
    assert size_of(zoo.build("seq2seq", "t5")).num_layers == 2
    assert EarlyExitDraft(2).bind(tiny(num_hidden_layers=5)).size() == size_of(tiny(num_hidden_layers=2))
    size = size_of(zoo.build("causal", "mixtral"))
    assert size.expert_bytes > size.dense_bytes
    assert size.expert_share == 0.5
