"""How many to draft: the theory against published numbers, and what is made of the rounds so far."""

import pytest

from hf_specx.drafting.draft_length import PRIOR_ALPHA, Survival, expected_tokens


# Leviathan et al. 2022, Table 1, c = 0: α, γ, speed
LEVIATHAN = [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 5, 3.69), (0.9, 10, 6.86)]


def test_table_of_leviathan_and_extreme_acceptance():
    """α is a mean of float sums, so it may come out a little over 1."""
    for alpha, gamma, speed in LEVIATHAN:
        assert expected_tokens(alpha, gamma) == pytest.approx(speed, abs=0.005)
    for alpha in (0, 1 - 1e-9, 1, 1 + 1e-7):
        assert expected_tokens(alpha, 5) == pytest.approx(6 if alpha else 1)


def taken(*rounds: list[list[float]], together: bool = False) -> list[float]:
    """S_i after many turns of these rounds."""
    survival = Survival(PRIOR_ALPHA, together)
    for _ in range(400):
        for made in rounds:
            survival.take(made)
    return survival.chances(5)


def test_survival_is_the_mean_over_rows_and_rounds_at_each_depth():
    """Beyond the deepest candidate the mean ratio of all depths goes on."""
    rounds = [[[1.0, 0.5, 0.5], [0.6, 0.3, 0.1]], [[0.8, 0.4, 0.3], [0.4, 0.0, 0.0]]]
    chances = taken(*rounds)
    assert chances[:3] == pytest.approx([0.7, 0.3, 0.225], rel=0.03)
    assert chances[4] == pytest.approx(0.225 * ((0.7 + 0.3 + 0.225) / (1 + 0.7 + 0.3)) ** 2, rel=0.05)


def test_depths_are_not_censored_by_short_rounds():
    """Most rounds draft one; the second candidate stays as likely as in those that had it."""
    assert taken([[0.9, 0.45]] * 8, *[[[0.9]] * 8] * 3)[1] == pytest.approx(0.45, rel=0.05)


def test_rows_that_advance_together_keep_what_all_keep():
    assert taken([[0.5, 0.2], [0.8, 0.5]], together=True)[:2] == pytest.approx([0.4, 0.1], rel=0.08)
