"""How many to draft: the theory against published numbers, and what is made of the rounds so far."""

import pytest

from hf_specx.drafting.acceptance import AcceptanceEstimate
from hf_specx.drafting.auto import best_num_candidates
from hf_specx.drafting.costs import PRIOR_ALPHA, expected_tokens


# Leviathan et al. 2022, Table 1, c = 0: α, γ, speed
LEVIATHAN = [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 5, 3.69), (0.9, 10, 6.86)]


def test_table_of_leviathan_and_extreme_acceptance():
    """α is a mean of float sums, so it may come out a little over 1."""
    for alpha, gamma, speed in LEVIATHAN:
        assert expected_tokens(alpha, gamma) == pytest.approx(speed, abs=0.005)
    for alpha in (0, 1 - 1e-9, 1, 1 + 1e-7):
        assert expected_tokens(alpha, 5) == pytest.approx(6 if alpha else 1)


def estimated(*rounds: list[list[float]], together: bool = False) -> list[float]:
    """S_i after many turns of these rounds."""
    estimate = AcceptanceEstimate(PRIOR_ALPHA, together)
    for _ in range(400):
        for of_rows in rounds:
            estimate.update(of_rows)
    return estimate.acceptance(5)


def test_a_first_round_is_weighed_against_what_is_assumed():
    """(5 + 1) / (10 + 1) in all, and 4 of these at a depth; what is assumed is forgotten a little."""
    estimate = AcceptanceEstimate(0.5)
    estimate.update([[1.0]])
    assert estimate.acceptance(2) == pytest.approx([0.637, 0.637 * 0.546], rel=0.01)


def test_acceptance_is_the_mean_over_rows_and_rounds_at_each_depth():
    """Beyond the deepest candidate the mean ratio of all depths goes on."""
    rounds = [[[1.0, 0.5, 0.5], [0.6, 0.3, 0.1]], [[0.8, 0.4, 0.3], [0.4, 0.0, 0.0]]]
    chances = estimated(*rounds)
    assert chances[:3] == pytest.approx([0.7, 0.3, 0.225], rel=0.03)
    assert chances[4] == pytest.approx(0.225 * ((0.7 + 0.3 + 0.225) / (1 + 0.7 + 0.3)) ** 2, rel=0.05)


def test_depths_are_not_censored_by_short_rounds():
    """Most rounds draft one; the second candidate stays as likely as in those that had it."""
    assert estimated([[0.9, 0.45]] * 8, *[[[0.9]] * 8] * 3)[1] == pytest.approx(0.45, rel=0.05)


def test_rows_that_advance_together_keep_what_all_keep():
    assert estimated([[0.5, 0.2], [0.8, 0.5]], together=True)[:2] == pytest.approx([0.4, 0.1], rel=0.08)


def test_the_best_number_is_that_with_the_most_tokens_a_second():
    """A step between: 4 to 8 candidates cost little more than 3; none is as good as any if nothing is kept."""
    stairs = [1.0, 1.3, 1.6, 2.4, 2.5, 2.6, 2.7, 2.8, 2.9]
    assert best_num_candidates([0.9**i for i in range(1, 9)], stairs)[0] == 8
    line = [1 + 0.2 * number for number in range(9)]
    number, gain = best_num_candidates([0.7**i for i in range(1, 9)], line)
    assert (number, gain) == (3, pytest.approx(expected_tokens(0.7, 3) / (3 * 0.2 + 1)))
    assert best_num_candidates([0.0] * 8, line) == (0, 1.0)
    assert best_num_candidates([0.0] * 8, line, range(1, 9)) == (1, pytest.approx(1 / 1.2))
