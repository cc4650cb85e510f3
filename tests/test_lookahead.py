"""The formulas of the paper, and the choice of the number of candidates."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specx.lookahead import (
    QUERY_LENGTHS,
    Costs,
    expected_operations,
    expected_speedup,
    expected_tokens,
)


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_table_1_of_leviathan(alpha: float, gamma: int, operations: float, speed: float):
    assert round(expected_operations(alpha, gamma, 0), 2) == operations
    assert round(expected_speedup(alpha, gamma, 0), 2) == speed


@settings(derandomize=True)
@given(st.floats(0, 1), st.integers(0, 30))
def test_expected_tokens_is_the_geometric_sum(alpha: float, gamma: int):
    assert expected_tokens(alpha, gamma) == pytest.approx(sum(alpha**i for i in range(gamma + 1)))


def constant(cost_coefficient: float) -> Costs:
    """A target whose forward takes as long for many tokens as for one."""
    return Costs({1: {"target": {1: 1.0, 9: 1.0}, "draft": cost_coefficient}})


@pytest.mark.parametrize(
    ("alpha", "cost_coefficient", "gamma", "speed"),
    [(0.5, 0.05, 3, 1.63), (0.6, 0.1, 3, 1.67), (0.7, 0.2, 3, 1.58), (0.8, 0.4, 2, 1.36), (0.9, 0.2, 7, 2.37)],
)
def test_best_number_of_candidates(alpha: float, cost_coefficient: float, gamma: int, speed: float):
    """Against the closed form of the optimum, -W₋₁ of Lambert, worked out beforehand."""
    costs = constant(cost_coefficient)
    costs.alpha["block"] = alpha
    assert costs.best_num_draft_tokens(1, "block") == gamma
    assert round(costs.forward_limited_speedup(1, expected_tokens(alpha, gamma), gamma), 2) == speed
    assert costs.cost_coefficient(1) == cost_coefficient


def test_a_forward_that_grows_steeply_makes_drafts_short():
    steep = Costs({8: {"target": {1: 1.0, 3: 1.1, 5: 4.0, 9: 9.0}, "draft": 0.1}}, {"token": 0.9})
    assert steep.best_num_draft_tokens(8, "token") == 2


def test_times_between_and_beyond_the_measured_lengths():
    costs = Costs({2: {"target": {1: 1.0, 3: 2.0, 5: 2.0, 9: 4.0}, "draft": 0.5}})
    assert [costs.target(2, q) for q in (1, 2, 3, 4, 7, 11)] == [1.0, 1.5, 2.0, 2.0, 3.0, 5.0]


def test_measuring_takes_medians_on_a_grid(monkeypatch: pytest.MonkeyPatch):
    """One slow run in five does not count; times that differ by less than the grid give the same table."""
    now, calls = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def forward(scale: float):
        def step(query_length: int) -> None:
            calls.append(query_length)
            now[0] += scale * query_length * (50 if len(calls) % 5 == 0 else 1)

        return step

    tables = []
    for scale in (0.0100, 0.01001):
        costs = Costs()
        costs.measure(4, forward(scale), forward(scale / 10))
        tables.append(costs.to_dict())
    assert tables[0] == tables[1]
    assert set(calls) == {*QUERY_LENGTHS, 1}
    for length in QUERY_LENGTHS:
        assert costs.target(4, length) == pytest.approx(0.01 * length, rel=0.05)
    assert costs.draft(4) == pytest.approx(0.001, rel=0.05)


def test_a_table_survives_json():
    costs = constant(0.3)
    costs.remember("block", 0.9, judged=100)
    assert costs.alpha["block"] == pytest.approx(0.8)
    again = Costs.from_dict(json.loads(json.dumps(costs.to_dict())))
    assert (again.table, again.alpha) == (costs.table, costs.alpha)
