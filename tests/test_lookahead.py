"""The theory of how many tokens to draft against published numbers, and the cost table against fake forwards."""

import json
from types import SimpleNamespace

import pytest

from hf_specx import lookahead
from hf_specx.lookahead import (
    GRID,
    MAX_DRAFT_TOKENS,
    MEMORY,
    PRIOR_ALPHA,
    QUERY_LENGTHS,
    Costs,
    expected_operations,
    expected_speedup,
    expected_tokens,
)


# Leviathan et al. 2022, Table 1, both coefficients 0: α, γ, operations, speed
LEVIATHAN = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
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


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), LEVIATHAN)
def test_table_of_leviathan(alpha: float, gamma: int, operations: float, speed: float):
    assert expected_operations(alpha, gamma, 0) == pytest.approx(operations, abs=0.005)
    assert expected_speedup(alpha, gamma, 0) == pytest.approx(speed, abs=0.005)
    assert expected_tokens(alpha, gamma) == pytest.approx(sum(alpha**i for i in range(gamma + 1)))


def test_coefficients_enter_the_formulas():
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_speedup(0.5, 2, 0.25) == pytest.approx(1.75 / 1.5)
    assert expected_operations(0.5, 2, 0.25) == pytest.approx(3.5 / 1.75)


@pytest.mark.parametrize("alpha", [0, 1 - 1e-9, 1, 1 + 1e-7])
def test_extreme_acceptance(alpha: float):
    """α is a mean of float sums, so it may come out a little over 1."""
    assert expected_tokens(alpha, 5) == pytest.approx(6 if alpha else 1)


@pytest.mark.parametrize(("c", "alpha", "gamma", "speedup"), CLOSED_FORM)
def test_best_number_is_that_of_the_closed_form(c: float, alpha: float, gamma: int, speedup: float):
    costs = flat(c, alpha)
    assert costs.best_num_draft_tokens(4, "block") == gamma
    assert costs.forward_limited_speedup(4, expected_tokens(alpha, gamma), gamma) == pytest.approx(speedup, abs=0.006)
    assert expected_speedup(alpha, gamma, costs.cost_coefficient(4)) == pytest.approx(speedup, abs=0.006)


def test_best_number_stays_in_its_range():
    assert flat(0.05, 0.99).best_num_draft_tokens(4, "block") == MAX_DRAFT_TOKENS
    assert flat(2.0, 0.1).best_num_draft_tokens(4, "block") == 1


def test_every_number_is_tried():
    """A forward of 5 costs as one of 9, so speed falls from γ = 1 to 4 and then rises to its best at 8."""
    costs = Costs({1: {"target": {1: 1.0, 2: 1.0, 3: 2.0, 5: 3.5, 9: 3.5}, "draft": 0.01}}, {"token": 0.95})
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
    """Advances a clock of its own by the seconds of a query length; the first call and two more are slow."""

    def __init__(self, clock: SimpleNamespace, seconds: dict[int, float]):
        self.clock, self.seconds = clock, seconds
        self.calls: list[int] = []

    def __call__(self, query_length: int) -> None:
        self.calls.append(query_length)
        slow = self.calls.count(query_length) in (1, 3, 4)
        self.clock.now += self.seconds[query_length] * (100 if slow else 1)


def measured(monkeypatch: pytest.MonkeyPatch, target: dict[int, float], draft: float) -> tuple[Costs, FakeForward]:
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(lookahead, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    costs, forward = Costs(), FakeForward(clock, target)
    costs.measure(8, forward, FakeForward(clock, {1: draft}))
    return costs, forward


def test_measure_takes_typical_times(monkeypatch: pytest.MonkeyPatch):
    seconds = {1: 0.010, 2: 0.011, 3: 0.013, 5: 0.018, 9: 0.030}
    costs, forward = measured(monkeypatch, seconds, 0.003)
    assert set(forward.calls) == set(QUERY_LENGTHS)
    assert set(costs.table) == {8}
    for query_length, expected in seconds.items():
        assert GRID**-0.5 <= costs.target(8, query_length) / expected <= GRID**0.5
    assert GRID**-0.5 <= costs.draft(8) / 0.003 <= GRID**0.5


def test_noise_within_a_grid_cell_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    """So that two processes that time the same machine mostly draft the same numbers."""
    tables = []
    for factor in (0.99, 1.01):
        seconds = {q: factor * GRID ** -(50 - q) for q in QUERY_LENGTHS}
        tables.append(measured(monkeypatch, seconds, factor * GRID**-60)[0].table)
    assert tables[0] == tables[1]


def test_round_trip_through_json(monkeypatch: pytest.MonkeyPatch):
    costs, _ = measured(monkeypatch, {q: 0.01 + 0.001 * q for q in QUERY_LENGTHS}, 0.003)
    costs.table[1] = {"target": {1: 1.0, 9: 2.0}, "draft": 0.5}
    costs.alpha["block"] = 0.8
    back = Costs.from_dict(json.loads(json.dumps(costs.to_dict())))
    assert back.table == costs.table
    assert back.alpha == costs.alpha == {"block": 0.8}


def test_an_empty_table_is_not_shared():
    first, second = Costs(), Costs()
    first.table[1] = {"target": {1: 1.0, 2: 1.0}, "draft": 0.1}
    first.remember("block", 0.9, judged=100)
    assert (second.table, second.alpha) == ({}, {})


def test_acceptance_is_remembered_by_verification():
    """100 judged candidates weigh as much as all that was known before."""
    costs = Costs()
    costs.remember("block", 0.9, judged=MEMORY)
    costs.remember("token", 0.5, judged=0)
    assert costs.alpha == {"block": pytest.approx((PRIOR_ALPHA + 0.9) / 2), "token": PRIOR_ALPHA}
