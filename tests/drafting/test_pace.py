"""How a call sees the times of its rounds, by what is known before it and by a fake clock."""

import pytest

from hf_specx.drafting.costs import ENOUGH, Costs
from hf_specx.drafting.pace import ASSUMED, Pace


ROW = {"target": {1: 1.0, 2: 1.2, 9: 4.0}, "draft": 0.2}


def lasting(costs: Costs, seconds: list[tuple[int, float]], online: bool, batch: int = 4) -> Pace:
    """A call after rounds of so many candidates that took so long."""
    now, pace = [0.0], Pace(Costs(costs.table, costs.alpha, costs.rounds, clock=lambda: now[0]), online)
    for drafted, took in seconds:
        now[0] += took
        pace.observe(batch, drafted)
    return pace


def test_before_any_round_was_seen_times_are_those_of_the_forwards():
    costs = Costs({4: ROW})
    assert Pace(costs).times(4, 6) == [costs.forwards(4, number) for number in range(7)]
    assert Pace(costs).times(4, 6, steps=False) == [costs.target(4, number) for number in range(1, 8)]


def test_rounds_take_what_they_were_seen_to_take():
    """Plain steps, and rounds with any number of candidates, each in relation to their forwards."""
    costs = Costs({4: ROW})
    bare = [costs.forwards(4, number) for number in range(6)]
    seen = [(0, 9.0)] + [(0, 3 * bare[0])] * ENOUGH
    seen += [(3, 5.0)] + [(1, 2 * bare[1])] * ENOUGH + [(3, 8 * bare[3])] * ENOUGH
    for rows in (4, 2):  # another batch size goes by the nearest
        forwards = [costs.forwards(rows, number) for number in range(6)]
        ratios = [t / b for t, b in zip(lasting(costs, seen, online=True).times(rows, 5), forwards, strict=True)]
        assert ratios == pytest.approx([3, 4, 4, 4, 4, 4])
    assert lasting(costs, seen, online=False).times(4, 5) == bare
    assert lasting(costs, seen[:ENOUGH], online=True).times(4, 5) == bare


def test_what_is_not_known_of_one_kind_is_taken_from_the_other():
    costs = Costs({4: ROW}, rounds={4: {2: 2 * Costs({4: ROW}).forwards(4, 2)}})
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
    assert not Pace(costs).has_seen_plain(4)
    assert lasting(costs, [(0, 1.0)] * (1 + ENOUGH), online=False).has_seen_plain(4)
    assert not lasting(costs, [(0, 1.0)] * ENOUGH, online=False).has_seen_plain(4)
    earlier = Pace(Costs({4: ROW}, rounds={4: {0: 1.0}}))
    assert [earlier.has_seen_plain(rows) for rows in (1, 2, 4, 8, 9)] == [False, True, True, True, False]


def test_a_call_is_not_moved_by_what_others_learn_meanwhile():
    costs = Costs({4: ROW})
    pace = Pace(costs)
    before = pace.times(4, 3), pace.reading(2, 5)
    costs.table[2] = {"target": {1: 9.0, 9: 9.0}, "draft": 9.0}
    costs.rounds[4] = {0: 8.0}
    assert (pace.times(4, 3), pace.reading(2, 5)) == before


def test_reading_is_slower_for_more_tokens_as_in_the_target():
    pace = Pace(Costs({4: ROW}))
    assert pace.reading(4, 1) == pytest.approx(0.2)
    assert pace.reading(4, 16) == pytest.approx(0.2 * (4 + 7 * 0.4))


def test_without_times_a_candidate_adds_a_fifth():
    for pace in (Pace(None), Pace(Costs())):
        assert pace.times(8, 2) == pytest.approx([1, 1 + 2 * ASSUMED, 1 + 4 * ASSUMED])
        assert pace.times(8, 2, steps=False) == pytest.approx([1, 1 + ASSUMED, 1 + 2 * ASSUMED])
        assert pace.prices(8) == pytest.approx((ASSUMED, ASSUMED))


def test_candidates_that_promise_too_little_are_not_worth_a_longer_round():
    """By the mean of the rows; where a row stands apart by what is assumed alone."""
    pace = Pace(Costs({2: {"target": {1: 1.0, 2: 1.2}, "draft": 0.0}, 1: {"target": {1: 1.0, 2: 1.0}, "draft": 0.0}}))
    assert pace.best([[0.5], []]) == 1
    assert pace.best([[0.3], []]) == 0
    assert pace.best([[0.1]]) == 1
    assert pace.best([[0.1]], apart=True) == 0
