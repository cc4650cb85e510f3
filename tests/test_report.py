"""Counters and ratios, by hand."""

import json

import pytest
import torch

from hf_specx import Costs, SpeculationReport
from hf_specx.report import RoundRecord


def two_rows(costs: Costs | None = None) -> SpeculationReport:
    """The prompt's step, a round of both rows, and a round of row 1 that is cut at a stop."""
    report = SpeculationReport("block", "ragged", "why", 2, costs=costs)
    report.observe([0, 1], 0, [0, 0], [1, 1], torch.zeros(()))
    report.observe([0, 1], 3, [3, 1], [4, 2], torch.tensor(4.0))
    report.observe([1], 3, [2], [1], torch.tensor(1.5))
    report.finish(0.5, columns=5)
    return report


def test_counters():
    report = two_rows()
    assert report.rounds == 2
    assert report.rounds_per_row == [1, 2]
    assert (report.drafted, report.judged, report.accepted, report.emitted) == (9, 8, 6, 9)
    assert report.emitted_per_row == [5, 4]
    assert report.accepted_per_position == [3, 2, 1]
    assert report.judged_per_position == [3, 3, 2]
    assert report.drafted_per_position == [3, 3, 3]
    assert (report.drafted_per_row, report.accepted_per_row) == ([3, 6], [3, 3])
    assert report.history[1] == [RoundRecord(0, 0, 1), RoundRecord(3, 1, 2), RoundRecord(3, 2, 1)]


def test_ratios():
    report = two_rows()
    assert report.acceptance_rate == pytest.approx(6 / 9)
    assert report.alpha == pytest.approx(5.5 / 8)
    assert report.mean_acceptance_length == pytest.approx(1 + 6 / 3)
    assert report.expected_speedup is None
    assert report.forward_limited_speedup is None


def test_predictions_from_costs():
    report = two_rows(Costs({2: {"target": {1: 1.0, 9: 3.0}, "draft": 0.25}}))
    assert report.cost_coefficient == 0.25
    alpha = 5.5 / 8
    assert report.expected_speedup == pytest.approx((1 + alpha + alpha**2 + alpha**3) / 1.75)
    assert report.forward_limited_speedup == pytest.approx(3 / (1.75 + 0.75))


def test_rows_that_ran_ahead_count_what_is_in_the_text():
    report = SpeculationReport("greedy", "ragged", "why", 1)
    for _ in range(3):
        report.observe([0], 2, [1], [2], torch.zeros(()))
    report.finish(0.1, columns=3)
    assert [record.emitted for record in report.history[0]] == [2, 1, 0]


def test_plain_values_and_text():
    report = two_rows(Costs({2: {"target": {1: 1.0, 9: 3.0}, "draft": 0.25}}))
    values = json.loads(json.dumps(report.to_dict()))
    assert values["rounds_per_row"] == [1, 2]
    assert values["seconds"] == {"total": 0.5}
    assert "9 tokens in 2 rows, 2 rounds of at most 3 candidates, block verification" in str(report)
    assert "draft step / target step 0.25" in str(report)


def test_phases_are_timed_under_their_names():
    report = SpeculationReport("block", "ragged", "why", 1)

    def _draft(x):
        return x + 1

    assert report.timed(_draft)(1) == 2
    assert report.seconds["draft"] >= 0


def test_nothing_judged_divides_by_nothing():
    report = SpeculationReport("token", "ragged", "why", 3)
    report.finish(0.0, columns=0)
    assert report.alpha == report.acceptance_rate == 0
    assert report.mean_acceptance_length == 1
    assert "0 tokens in 3 rows" in str(report)
