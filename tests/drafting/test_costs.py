"""The table of costs against fake forwards and a fake clock, and what is remembered of rounds."""

import json
import math
from types import SimpleNamespace

import pytest

from hf_specx.drafting.costs import ENOUGH, MEMORY, Costs
from hf_specx.drafting.draft_length import (
    MAX_DRAFT_TOKENS,
    PRIOR_ALPHA,
    PRIOR_WEIGHT,
    expected_speedup,
    expected_tokens,
)
from hf_specx.drafting.measuring import GRID
from hf_specx.drafting.prior import QUERY_LENGTHS


# where a target forward of any length takes 1 and a draft step c: c, α, the best γ, its speed-up
CLOSED_FORM = [
    (0.05, 0.5, 3, 1.63),
    (0.05, 0.6, 4, 1.92),
    (0.05, 0.7, 6, 2.35),
    (0.05, 0.8, 8, 3.09),
    (0.1, 0.5, 2, 1.46),
    (0.1, 0.6, 3, 1.67),
    (0.1, 0.7, 4, 1.98),
    (0.1, 0.8, 6, 2.47),
    (0.2, 0.5, 1, 1.25),
    (0.2, 0.6, 2, 1.40),
    (0.2, 0.7, 3, 1.58),
    (0.2, 0.8, 4, 1.87),
    (0.2, 0.9, 7, 2.37),
    (0.4, 0.5, 1, 1.07),
    (0.4, 0.6, 1, 1.14),
    (0.4, 0.7, 2, 1.22),
    (0.4, 0.8, 2, 1.36),
    (0.4, 0.9, 4, 1.58),
    (0.6, 0.7, 1, 1.06),
    (0.6, 0.8, 1, 1.12),
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
    assert expected_speedup(alpha, gamma, costs.cost_coefficient(4)) == pytest.approx(speedup, abs=0.006)


def test_best_number_stays_in_its_range():
    assert flat(0.01, 0.999).best_num_draft_tokens(4, "block") == MAX_DRAFT_TOKENS
    assert flat(2.0, 0.1).best_num_draft_tokens(4, "block") == 1


def test_every_number_is_tried():
    """A forward of 5 costs as one of 9, so speed falls from γ = 1 to 4 and then rises to its best at 8."""
    costs = Costs({1: {"target": {1: 1.0, 2: 1.0, 3: 2.0, 5: 3.5, 9: 3.5, 10: 9.0}, "draft": 0.01}}, {"token": 0.95})
    speeds = [costs.forward_limited_speedup(1, expected_tokens(0.95, g), g) for g in range(1, 9)]
    assert speeds[0] > speeds[1] > speeds[3] < speeds[4] < speeds[7]
    assert costs.best_num_draft_tokens(1, "token") == 8
    assert speeds[7] == max(speeds)


def test_forward_limited_speedup_by_hand():
    costs = Costs({2: {"target": {1: 1.0, 2: 1.5, 4: 2.0}, "draft": 0.2}})
    assert costs.cost_coefficient(2) == pytest.approx(0.2)
    assert costs.forward_limited_speedup(2, tokens_per_round=2.6, num_draft_tokens=3) == pytest.approx(2.6 / 2.6)
    assert costs.forward_limited_speedup(2, tokens_per_round=1.9, num_draft_tokens=2) == pytest.approx(1.9 / 2.15)


@pytest.mark.parametrize(
    ("query_length", "seconds"),
    [(1, 1.0), (2, 1.5), (3, 2.5), (4, 3.5), (5, 4.5), (9, 8.5)],
)
def test_lengths_between_and_beyond_the_measured_are_on_a_line(query_length: int, seconds: float):
    costs = Costs({1: {"target": {1: 1.0, 2: 1.5, 4: 3.5}, "draft": 0.2}})
    assert costs.target(1, query_length) == pytest.approx(seconds)


def test_times_that_fall_are_not_prolonged_below():
    """Noise may make the longest measured forward the faster one."""
    costs = Costs({1: {"target": {1: 1.0, 5: 1.2, 9: 1.1}, "draft": 0.2}})
    assert costs.target(1, 20) == pytest.approx(1.1)


class FakeForward:
    """Advances a clock by the seconds of a query length; the first call and one more are slow."""

    def __init__(self, clock: SimpleNamespace, seconds: dict[int, float]):
        self.clock, self.seconds = clock, seconds
        self.calls: list[int] = []

    def __call__(self, query_length: int) -> None:
        self.calls.append(query_length)
        slow = self.calls.count(query_length) in (1, 3)
        self.clock.now += self.seconds[query_length] * (100 if slow else 1)


def measured(target: dict[int, float], draft: float) -> tuple[Costs, FakeForward]:
    clock = SimpleNamespace(now=5.0)
    costs, forward = Costs(clock=lambda: clock.now), FakeForward(clock, target)
    costs.measure(8, forward, FakeForward(clock, {1: draft}))
    return costs, forward


def test_measure_takes_typical_times():
    seconds = {1: 0.010, 3: 0.013, 9: 0.030}
    costs, forward = measured(seconds, 0.003)
    assert set(forward.calls) == set(QUERY_LENGTHS)
    assert set(costs.table) == {8}
    for query_length, expected in seconds.items():
        assert GRID**-0.5 <= costs.target(8, query_length) / expected <= GRID**0.5
    assert GRID**-0.5 <= costs.draft(8) / 0.003 <= GRID**0.5


def test_what_was_measured_elsewhere_is_taken_over():
    """By batch size, and only where it is asked for; what is measured here is found there."""
    elsewhere = {8: {"target": {1: 1.0, 9: 2.0}, "draft": 0.1}, 2: {"target": {1: 3.0, 9: 4.0}, "draft": 0.2}}
    clock = SimpleNamespace(now=0.0)
    costs, forward = (
        Costs(clock=lambda: clock.now, measured=elsewhere),
        FakeForward(clock, dict.fromkeys(QUERY_LENGTHS, 1)),
    )
    costs.prepare(8, forward, forward)
    assert not forward.calls
    assert costs.table == {8: elsewhere[8]}
    costs.prepare(4, forward, forward)
    assert forward.calls
    assert elsewhere[4] is costs.table[4]


def test_noise_within_a_grid_cell_changes_nothing():
    """So that two processes that time the same machine mostly draft the same numbers."""
    tables = []
    for factor in (0.99, 1.01):
        seconds = {q: factor * GRID ** -(50 - q) for q in QUERY_LENGTHS}
        tables.append(measured(seconds, factor * GRID**-60)[0].table)
    assert tables[0] == tables[1]


def test_round_trip_through_json():
    costs, _ = measured({q: 0.01 + 0.001 * q for q in QUERY_LENGTHS}, 0.003)
    costs.table[1] = {"target": {1: 1.0, 9: 2.0}, "draft": 0.5}
    costs.alpha["block"], costs.rounds[3] = 0.8, {0: 1.0, 4: 2.0}
    back = Costs.from_dict(json.loads(json.dumps(costs.to_dict())))
    assert back.table == costs.table
    assert back.alpha == costs.alpha == {"block": 0.8}
    assert back.rounds == costs.rounds == {3: {0: 1.0, 4: 2.0}}


def test_an_empty_table_is_not_shared():
    first, second = Costs(), Costs()
    first.table[1] = {"target": {1: 1.0, 2: 1.0}, "draft": 0.1}
    first.remember("block", 0.9, judged=100)
    first.rounds[1] = {1: 1.0}
    assert (second.table, second.alpha, second.rounds) == ({}, {}, {})


def test_what_a_copy_measures_and_assumes_is_its_own():
    costs, prior = Costs(alpha={"block": 0.5}, rounds={1: {1: 1.0}}, clock=lambda: 7.0), {"target": {}, "draft": 0.1}
    costs.prepare(2, lambda _: None, lambda _: None, prior)
    other = costs.apart()
    assert other.table == {2: prior}
    assert not other.knows(2)
    other.measure(2, lambda _: None, lambda _: None)
    other.alpha["block"], other.rounds[1][1] = 0.9, 2.0
    assert costs.table == {2: prior}
    assert not costs.knows(2)
    assert (costs.alpha, costs.rounds, other.clock()) == ({"block": 0.5}, {1: {1: 1.0}}, 7.0)


def test_a_call_begins_while_another_one_ends():
    """Strategies are shared by threads: the other call adds its rounds at the moment when ours copies them."""
    costs = Costs()

    class Busy(dict):
        def keys(self):
            costs.rounds[9] = {1: 2.0}
            return super().keys()

        def __iter__(self):  # so that a copy asks for the keys
            return super().__iter__()

    costs.rounds[1] = Busy({1: 1.0})
    assert costs.apart().rounds == {1: {1: 1.0}}


def test_another_thread_completes_what_both_measure():
    """While this one takes its last step."""
    clock = SimpleNamespace(now=5.0)
    costs = Costs(clock=lambda: clock.now)
    costs.allowance = math.inf
    prior = {"target": {1: 1.0, 2: 1.0}, "draft": 0.1}

    def other(query_length: int) -> None:
        clock.now += 0.01
        costs._begun.pop(8, None)

    costs.prepare(8, other, other, prior)
    assert 8 in costs.measured


def test_acceptance_is_remembered_by_verification():
    """What is assumed gives way to what was seen; then 100 judged candidates weigh as much as all before."""
    costs = Costs()
    costs.remember("block", 0.1, judged=PRIOR_WEIGHT)
    costs.remember("token", 0.5, judged=0)
    assert costs.alpha == {"block": pytest.approx((PRIOR_ALPHA + 0.1) / 2)}  # nothing was seen of the other
    costs.remember("block", 0.8, judged=MEMORY)
    assert costs.alpha["block"] == pytest.approx((0.4 + 0.8) / 2)


ROW = {"target": {1: 1.0, 2: 1.2, 9: 4.0}, "draft": 0.2}


def test_batch_sizes_between_two_go_by_the_nearest():
    costs = Costs({2: ROW, 6: {"target": {1: 3.0, 9: 11.0}, "draft": 0.6}})
    assert costs.target(3, 4) == pytest.approx(costs.target(2, 6))
    assert costs.target(5, 6) == pytest.approx(costs.target(6, 5))
    assert costs.draft(3) == pytest.approx(0.2 * 1.1)


def test_smaller_batches_take_as_long_as_forwards_of_as_many_tokens():
    """Of 4 rows, 8 tokens are 2 each, and fewer than 4 go on along the line, not faster than tokens grow fewer."""
    costs = Costs({4: ROW})
    assert costs.target(2, 4) == pytest.approx(1.2)
    assert costs.target(2, 1) == pytest.approx(1 - 0.2 / 2)
    assert costs.target(1, 9) == pytest.approx(1.2 + 2.8 * 0.25 / 7)
    assert costs.draft(1) == pytest.approx(0.2 * 0.85)
    steep = Costs({4: {"target": {1: 1.0, 2: 4.0}, "draft": 0.2}})
    assert steep.target(1, 1) == pytest.approx(0.25)
    assert Costs({4: ROW}).target(8, 1) == pytest.approx(1.2)
    assert Costs({4: {"target": {1: 1.0, 2: 0.9}, "draft": 0.2}}).target(2, 1) == 1


def remembered(costs: Costs, *rounds: tuple[int, float]) -> dict[int, float]:
    """What is kept of a call of four rows that had each of these rounds as often as is needed."""
    costs.remember_rounds({(4, number): [seconds] * ENOUGH for number, seconds in rounds})
    return costs.rounds.get(4, {})


def test_later_calls_know_what_was_seen_often_enough():
    costs = Costs({4: ROW})
    costs.remember_rounds({(4, 1): [2.0] * ENOUGH, (4, 2): [3.0] * (ENOUGH - 1)})
    assert costs.rounds.keys() == {4}
    assert costs.rounds[4] == {1: pytest.approx(2.0, rel=0.02)}
    assert remembered(costs, (1, 8.0)) == {1: pytest.approx(4.0, rel=0.02)}  # halfway, so that no call decides alone


def test_numbers_that_were_slow_by_chance_are_forgiven():
    """At once by a call that drafts other numbers, little by little by plain steps, which stay known themselves."""
    costs = Costs({4: ROW})
    slow = 4 * costs.forwards(4, 5)
    costs.rounds[4] = {0: 1.0, 5: slow}
    seen = [remembered(costs, (0, 1.0))[5] for _ in range(64)]
    assert seen[0] > 0.85 * slow
    assert costs.forwards(4, 5) < seen[-1] < 1.25 * costs.forwards(4, 5)
    assert remembered(costs, (1, 2.0)).keys() == {0, 1}
