"""The counters and ratios of a report, from rounds written by hand."""

import json
from types import SimpleNamespace

import pytest
from rounds import made_round

from hf_specx import Costs, SpeculationReport
from hf_specx.common.tree import row_tree_of


COLUMNS = 8  # row 0 emits 1 + 4 + 1 + 2 tokens and row 1, which ends sooner, 1 + 2 + 2


def report(*rounds, rows: int = 2, costs: Costs | None = None, layout: str = "ragged") -> SpeculationReport:
    """The prompt's step, and the given rounds."""
    total = SpeculationReport("token", layout, "chosen", rows=rows, costs=costs)
    for one in (made_round([0] * rows, [0] * rows), *rounds):
        total.observe(one)
    return total


def three_rounds(costs: Costs | None = None) -> SpeculationReport:
    """Two rounds of 3 candidates and one of 1; row 1 ends in the second, at 2 of its 3 tokens."""
    total = report(
        made_round([3, 3], [3, 1], overlap=[[1.0, 0.5, 1.0], [0.75, 0.25, 9.0]]),  # judged 3 + 2
        made_round([3, 3], [0, 2], [1, 2], overlap=[[0.5, 9.0, 9.0], [0.25, 0.5, 0.25]]),  # judged 1 + 3
        made_round([1], [1], overlap=[[0.5]]),  # judged 1
        costs=costs,
    )
    total.finish(2.0, COLUMNS)
    return total


def test_counters():
    total = three_rounds()
    assert (total.rounds, total.rounds_per_row, total.num_draft_tokens) == (3, [3, 2], 3)
    assert (total.drafted, total.judged, total.accepted) == (6 + 6 + 1, 5 + 4 + 1, 4 + 2 + 1)
    assert total.drafted_per_position == [5, 4, 4]
    assert total.judged_per_position == [5, 3, 2]
    assert total.accepted_per_position == [4, 2, 1]
    assert (total.drafted_per_row, total.accepted_per_row) == ([7, 6], [4, 3])
    assert (total.emitted_per_row, total.emitted) == ([8, 5], 13)


def test_lockstep_gains_what_the_least_row_accepted():
    costs = Costs({2: {"target": {1: 1.0, 9: 1.0}, "draft": 0.0}})
    total = report(made_round([3, 3], [3, 1], [2, 2], num_new_tokens=[2, 2]), costs=costs, layout="lockstep")
    assert (total.mean_acceptance_length, total.tokens_per_round) == (3, 2)
    assert total.forward_limited_speedup == pytest.approx(2)


def test_tokens_behind_the_last_column_are_not_emitted():
    """A row that ran ahead of the others keeps its accepted tokens, but what was cut off is not in the text."""
    total = report(made_round([4, 4], [4, 0]), made_round([4, 4], [4, 1]))
    total.finish(1.0, columns=4)
    assert total.emitted_per_row == [4, 4]
    assert [record.emitted for record in total.history[0]] == [1, 3, 0]
    assert (total.accepted, total.acceptance_rate) == (9, 9 / 16)


def test_ratios_with_costs():
    """c = 0.25; a round of 3 takes T_t(4) + 3 T_d = 1.75 + 0.75, and one of 1 T_t(2) + T_d = 1.25 + 0.25."""
    total = three_rounds(Costs({2: {"target": {1: 1.0, 5: 2.0}, "draft": 0.25}}))
    assert total.cost_coefficient == pytest.approx(0.25)
    expected = 4 * (1 - 0.55**4) / (1 - 0.55) + 1.55
    assert total.expected_speedup == pytest.approx(expected / (4 * 1.75 + 1.25))
    assert total.forward_limited_speedup == pytest.approx((4 + 2 + 1 + 3 + 2) / (4 * 2.5 + 1.5))
    assert "1.04, by Theorem 3.8" in str(total)


def test_plain_steps_count_in_predictions_and_nowhere_else():
    """Where "auto" draws no candidates; the prompt's own forward is no step."""
    costs = Costs({2: {"target": {1: 1.0, 5: 2.0}, "draft": 0.25}})
    total, plain = three_rounds(costs), three_rounds(costs)
    for _ in range(2):
        plain.observe(made_round([0, 0], [0, 0]))
    for name in ("alpha", "acceptance_rate", "mean_acceptance_length", "tokens_per_round", "drafted_per_position"):
        assert getattr(plain, name) == getattr(total, name)
    assert (plain.rounds_per_row, plain.mean_draft_tokens) == (total.rounds_per_row, 13 / 5)
    assert plain.forward_limited_speedup == pytest.approx((12 + 4) / (11.5 + 4))
    assert plain.expected_speedup == pytest.approx((total.expected_speedup * 8.25 + 4) / (8.25 + 4))


def test_rows_of_a_round_may_draft_unlike_numbers():
    """One that drafts nothing takes a plain step."""
    total = report(made_round([3, 1, 0], [1, 1, 0]), made_round([2, 0], [2, 0], rows=[0, 2]), rows=3)
    assert (total.rounds, total.plain_steps, total.num_draft_tokens) == (2, 1, 3)
    assert (total.drafted, total.judged, total.accepted) == (6, 2 + 1 + 2, 4)
    assert total.rounds_per_row == [2, 1, 0]
    assert total.drafted_per_row == [5, 1, 0]
    assert total.drafted_per_position == [3, 2, 1]
    assert total.judged_per_position == [3, 2, 0]
    assert total.accepted_per_position == [3, 1, 0]
    assert list(map(len, total.history)) == [3, 2, 3]
    assert total.mean_draft_tokens == 6 / 3


def test_by_position_are_first_choices_and_no_more_are_accepted_than_judged():
    """Of trees with a second choice at each of two positions: row 0 leaves the chain at once, row 1 at its end."""
    of_row = row_tree_of((-1, 0, -1, 0, 2))  # the chain 0, 1; 2 beside 0, with 4 behind it; 3 beside 1
    tree, accepted_candidates = SimpleNamespace(rows=[of_row] * 2), [[2, 4], [0, 3]]
    one = made_round([2, 2], [2, 2], tree=tree, accepted_candidates=accepted_candidates)
    total = report(one, made_round([1], [1]))
    assert (total.drafted, total.judged, total.accepted, total.nodes) == (2 + 2 + 1, 1 + 2 + 1, 2 + 2 + 1, 11)
    assert total.drafted_per_position == [3, 2]
    assert total.judged_per_position == [3, 1]
    assert total.accepted_per_position == [2, 0]
    assert total.accepted_per_rank == [3, 2]


def test_conditional_acceptance_goes_by_all_drafted_positions():
    total = report(made_round([2, 2], [2, 0], prefix_acceptance=[[1.0, 0.5], [0.4, 0.1]]))
    assert total.conditional_acceptance == pytest.approx((1.5 + 0.5) / (2 + 1.4))
    total.observe(made_round([0], [0], rows=[1]))
    assert total.conditional_acceptance == pytest.approx(2 / 3.4)
    assert (total + total).acceptance_sums == pytest.approx((4, 6.8))
    assert SpeculationReport("block", "ragged", "chosen", rows=2).conditional_acceptance == 0


OTHER_BATCH = Costs({7: {"target": {1: 1.0, 5: 2.0}, "draft": 0.25}})


@pytest.mark.parametrize("costs", [None, Costs(), OTHER_BATCH], ids=["none", "empty", "another batch"])
def test_no_speedup_is_claimed_without_costs_of_this_batch(costs: Costs | None):
    total = three_rounds(costs)
    assert (total.cost_coefficient, total.expected_speedup, total.forward_limited_speedup) == (None, None, None)
    assert "speed-up" not in str(total)


@pytest.mark.parametrize("finished", [False, True])
def test_empty(finished: bool):
    """Before any round, and where nothing was drafted."""
    total = SpeculationReport("block", "ragged", "chosen", rows=3)
    if finished:
        total.observe(made_round([0, 0, 0], [0, 0, 0]))
        total.finish(0.1, columns=1)
    assert (total.rounds, total.drafted, total.judged, total.accepted) == (0, 0, 0, 0)
    assert total.rounds_per_row == [0, 0, 0]
    assert total.emitted_per_row == [int(finished)] * 3
    assert total.accepted_per_position == []
    assert (total.acceptance_rate, total.alpha, total.mean_acceptance_length) == (0.0, 0.0, 1.0)
    assert f"3 rows; target forwards: {int(finished)}, none over candidates" in str(total)
    json.dumps(total.to_dict())


def test_several_calls_add_up():
    """Later calls may have fewer rows, as for the windows of a long sound, or more, as in a queue."""
    overlap = [[0.5, 0.5, 0.5], [0.25], []]
    first, second = three_rounds(), report(made_round([3, 1, 0], [1, 1, 0], overlap=overlap), rows=3)
    second.seconds["draft"] = 1.5
    for one, other in ((first, second), (second, first)):
        total = one + other
        for name in ("rounds", "plain_steps", "drafted", "judged", "accepted", "emitted", "overlap"):
            assert getattr(total, name) == getattr(first, name) + getattr(second, name)
        assert (total.rows, total.rounds_per_row, total.drafted_per_position) == (3, [4, 3, 0], [7, 5, 5])
        assert total.round_sizes == first.round_sizes + second.round_sizes
        assert (total.seconds["draft"], total.seconds["total"]) == (1.5, 2.0)
        assert list(map(len, total.history)) == [6, 5, 2]
    assert (first.rounds, len(first.history[0]), first.sources["none"]["drafted"]) == (3, 4, 13)  # as they were
