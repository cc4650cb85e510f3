"""How many to draft: the theory against published numbers, and choices in simulated calls of known acceptance."""

import itertools
import random
from collections.abc import Sequence

import pytest

from hf_specx.scheduling.draft_length import (
    FIRST_WAIT,
    MAX_DRAFT_TOKENS,
    PATIENCE,
    PRIOR_ALPHA,
    PRIOR_WEIGHT,
    Chooser,
    Outcome,
    Survival,
    expected_speedup,
    expected_tokens,
)


# Leviathan et al. 2022, Table 1, c = 0: α, γ, speed
LEVIATHAN = [
    (0.6, 2, 1.96),
    (0.7, 3, 2.53),
    (0.8, 2, 2.44),
    (0.8, 5, 3.69),
    (0.9, 2, 2.71),
    (0.9, 10, 6.86),
]


@pytest.mark.parametrize(("alpha", "gamma", "speed"), LEVIATHAN)
def test_table_of_leviathan(alpha: float, gamma: int, speed: float):
    assert expected_speedup(alpha, gamma, 0) == pytest.approx(speed, abs=0.005)
    assert expected_tokens(alpha, gamma) == pytest.approx(sum(alpha**i for i in range(gamma + 1)))


def test_coefficients_enter_the_formulas():
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_speedup(0.5, 2, 0.25) == pytest.approx(1.75 / 1.5)


@pytest.mark.parametrize("alpha", [0, 1 - 1e-9, 1, 1 + 1e-7])
def test_extreme_acceptance(alpha: float):
    """α is a mean of float sums, so it may come out a little over 1."""
    assert expected_tokens(alpha, 5) == pytest.approx(6 if alpha else 1)


def outcome(*survival: list[float], left: Sequence[int] = ()) -> Outcome:
    return Outcome(len(survival[0]), list(survival), list(left) or [9] * len(survival))


def taken(*rounds: Outcome, together: bool = False) -> list[float]:
    """E(γ) after many turns of these rounds."""
    survival = Survival(PRIOR_ALPHA, PRIOR_WEIGHT, together)
    for _ in range(400):
        for made in rounds:
            survival.take(made)
    return survival.expected_tokens()


def test_what_is_assumed_at_first():
    expected = [expected_tokens(0.6, number) for number in range(MAX_DRAFT_TOKENS + 1)]
    assert Survival(0.6, 3.0).expected_tokens() == pytest.approx(expected)


def test_a_first_round_is_weighed_against_what_is_assumed():
    """Nothing of that is forgotten while so little was seen: (2 + 1) / (4 + 1) in all, and 4 of these at a depth."""
    survival = Survival(0.5, 4.0)
    survival.take(outcome([1.0]))
    assert survival.expected_tokens()[1:3] == pytest.approx([1 + 0.68, 1 + 0.68 + 0.68 * 0.6])


def test_survival_is_the_mean_over_rows_and_rounds_at_each_depth():
    """Beyond the deepest candidate the mean ratio of all depths goes on."""
    rounds = [outcome([1.0, 0.5, 0.5], [0.6, 0.3, 0.1]), outcome([0.8, 0.4, 0.3], [0.4, 0.0, 0.0])]
    tokens = taken(*rounds)
    assert tokens[:4] == pytest.approx([1, 1.7, 2.0, 2.225], rel=0.02)
    alpha = (0.7 + 0.3 + 0.225) / (1 + 0.7 + 0.3)
    assert tokens[5] - tokens[4] == pytest.approx(0.225 * alpha**2, rel=0.05)


def test_depths_are_not_censored_by_short_rounds():
    """Most rounds draft one; the second candidate stays as likely as in those that had it."""
    tokens = taken(outcome(*[[0.9, 0.45]] * 8), *[outcome(*[[0.9]] * 8)] * 3)
    assert tokens[2] == pytest.approx(1 + 0.9 + 0.45, rel=0.03)


def test_rows_that_advance_together_keep_what_all_keep():
    assert taken(outcome([0.5, 0.2], [0.8, 0.5]), together=True)[:3] == pytest.approx([1, 1.4, 1.5], rel=0.02)


def test_rows_that_have_fallen_behind_count_more():
    tokens = taken(outcome([0.9], [0.1], left=[50, 100]))
    assert tokens[1] == pytest.approx(1 + (0.9 / 256 + 0.1) / (1 + 1 / 256), rel=0.02)


def test_what_a_round_was_worth_by_the_rows_that_count():
    """1 + S_1 + S_2 of the mean row, in which one that has half as much left counts 1/256."""
    made = outcome([0.9, 0.5], [0.1, 0.0], left=[50, 100])
    assert Survival(0.5, 4.0).take(made) == pytest.approx(1 + (1.4 / 256 + 0.1) / (1 + 1 / 256))
    assert Survival(0.5, 4.0, together=True).take(made) == pytest.approx(1.09)
    assert Survival(0.5, 4.0).take(outcome([], [])) == 1


def test_rounds_without_candidates_tell_nothing():
    survival = Survival(0.3, 6.0)
    for _ in range(1000):
        survival.take(outcome([], []))
    assert survival.expected_tokens()[1] == pytest.approx(1.3)
    survival.take(outcome([1.0]))  # and what is known gives way quickly by then
    assert survival.expected_tokens()[1] > 1.35


STAIRS = [1.0, 1.3, 1.6, 2.4, 2.5, 2.6, 2.7, 2.8, 2.9]  # 4 to 8 candidates cost little more than 3
LINE = [1 + 0.2 * number for number in range(9)]
DEAR = [1 + 0.6 * number for number in range(9)]
SIMULATED = {  # T(γ), α, the best γ
    "stairs": (STAIRS, 0.9, 8),
    "line": (LINE, 0.7, 3),
    "not worth it": (DEAR, 0.45, 0),
}


class Simulated:
    """A call in which each candidate of a row is kept with probability α, and rounds take known times."""

    def __init__(self, times: list[float], alphas: list[float], seed: int, soft: bool, memory: float | None = None):
        self.times, self.alphas, self.soft, self.random = times, alphas, soft, random.Random(seed)
        known = memory is not None
        self.chooser = Chooser(Survival(memory if known else PRIOR_ALPHA, PRIOR_WEIGHT), known)

    def run(self, tokens: int, fixed: int | None = None) -> float:
        """Seconds until each row has so many tokens; `drafted` has the number of each round."""
        left, seconds, self.drafted = [tokens] * len(self.alphas), 0.0, []
        number = self.chooser.first(self.times, tokens) if fixed is None else fixed
        missing = 0
        while max(left) > 0:
            rows = [row for row, open_tokens in enumerate(left) if open_tokens > 0]
            drawn = [self.draw(self.alphas[row], number) for row in rows]
            made = Outcome(number, [survival for survival, _ in drawn], [left[row] for row in rows])
            seconds += self.times[number] + (self.catch_up(missing) if number else 0)
            missing = 0 if number else missing + 1
            for row, (_, kept) in zip(rows, drawn, strict=True):
                left[row] -= kept + 1
            self.drafted.append(number)
            number = self.chooser.next(made, self.times, self.catch_up) if fixed is None else fixed
        return seconds

    def draw(self, alpha: float, number: int) -> tuple[list[float], int]:
        """The survival of a row, as indicators or by probabilities as of token verification, and what it keeps."""
        survival, chance, kept, alive = [], 1.0, 0, True
        for _ in range(number):
            passes = min(1.0, self.random.uniform(0, 2) * alpha) if self.soft else alpha
            alive = alive and self.random.random() < passes
            kept += alive
            chance = chance * passes if self.soft else float(alive)
            survival.append(chance)
        return survival, kept

    def catch_up(self, tokens: int) -> float:
        return 0.02 * tokens


@pytest.mark.parametrize("soft", [False, True], ids=["indicators", "probabilities"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("case", SIMULATED)
def test_choices_come_close_to_the_best_number(case: str, rows: int, soft: bool):
    """Within 5 % of the largest G; the mean of 10 simulated calls from nothing known, whose seeds are fixed."""
    times, alpha, best = SIMULATED[case]
    tokens = 1000
    if not soft:
        rates = [expected_tokens(alpha, number) / seconds for number, seconds in enumerate(times)]
        assert rates.index(max(rates)) == best
    calls = [Simulated(times, [alpha] * rows, seed, soft) for seed in range(10)]
    fixed = [sum(call.run(tokens, number) for call in calls) for number in range(9)]
    assert sum(call.run(tokens) for call in calls) < 1.05 * min(fixed)
    assert soft or min(fixed) < 1.03 * fixed[best]


@pytest.mark.parametrize("cost", [0.02, 0.2, 0.9])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_useless_draft_costs_next_to_nothing(rows: int, cost: float):
    """Against plain steps, over 512 tokens, nothing being known at first; later calls are cheaper still."""
    times = [1 + (cost + 0.02) * number for number in range(9)]
    calls = [Simulated(times, [0.02] * rows, seed, soft=False) for seed in range(10)]
    assert sum(call.run(512) for call in calls) < 1.02 * 10 * 512
    assert any(number > 0 for call in calls for number in call.drafted)
    later = [Simulated(times, [0.02] * rows, seed, soft=False, memory=0.02) for seed in range(10)]
    assert sum(call.run(512) for call in later) < 1.015 * 10 * 512


@pytest.mark.parametrize("known", [False, True])
def test_a_dear_draft_is_tried_before_it_is_judged(known: bool):
    """With what is assumed at first it would be slower than plain, with what it is one and a half times as fast."""
    times = [1.0, *(1.5 + 0.4 * number for number in range(1, 9))]
    calls = [Simulated(times, [0.95], seed, False, PRIOR_ALPHA if known else None) for seed in range(10)]
    seconds, plain = sum(call.run(48) for call in calls), 10 * 48
    assert (seconds < plain / 1.3) is not known  # where so little had been seen, most of a call goes by plainly


def test_drafting_that_is_a_little_slower_ends_after_a_while():
    """At 0.97 of plain it goes on for a number of rounds, in which it may become the faster one again."""
    half, numbers = outcome([0.5]), []
    worth, not_worth = ([1.0, time, *[9.0] * 7] for time in (1.2, 1.5 / 0.97))
    chooser = Chooser(Survival(0.5, 1e6), known=True)
    assert chooser.first(worth, room=100) == 1
    for times in [*[not_worth] * (PATIENCE - 1), worth, *[not_worth] * PATIENCE]:
        numbers.append(chooser.next(half, times, lambda tokens: 0.0))
    assert numbers == [1] * (2 * PATIENCE - 1) + [0]


@pytest.mark.parametrize(("rows", "together", "rounds"), [(1, False, 4), (2, False, 2), (8, False, 1), (2, True, 4)])
def test_a_draft_that_was_never_seen_is_judged_by_some_candidates(rows: int, together: bool, rounds: int):
    """However dear it is, by four in all; rows that advance together count as one."""
    chooser = Chooser(Survival(PRIOR_ALPHA, PRIOR_WEIGHT, together), known=False)
    numbers = [chooser.first(DEAR, room=100)]
    while numbers[-1]:
        numbers.append(chooser.next(outcome(*[[0.0]] * rows), [1.0, *[99.0] * 8], lambda tokens: 0.0))
    assert list(map(bool, numbers)) == [True] * rounds + [False]


def test_probes_are_rare_and_find_what_has_become_better():
    """They wait twice as long each time; once the draft is good, drafting is taken up for good."""
    call = Simulated(LINE, [0.02], seed=0, soft=False)
    call.catch_up = lambda tokens: 0.0
    call.run(700)
    drafted = [place for place, number in enumerate(call.drafted) if number]
    gaps = [b - a - 1 for a, b in itertools.pairwise(drafted) if b > a + 1]
    assert gaps[0] == FIRST_WAIT
    assert all(later >= 2 * sooner for sooner, later in itertools.pairwise(gaps))
    assert len(gaps) >= 4
    call.alphas = [0.9]
    call.run(2000)
    assert 0 not in call.drafted[-200:]
    assert call.chooser.wait == FIRST_WAIT  # should it become worse again


def test_a_probe_that_would_take_long_to_catch_up_is_made_once_only():
    call = Simulated(LINE, [0.02], seed=0, soft=False)
    call.catch_up = lambda tokens: 0.1 * tokens
    call.run(3000)
    first = call.drafted.index(0)
    assert sum(map(bool, call.drafted[first:])) == 1


def test_a_row_that_draft_does_not_help_holds_the_others_up_little():
    """Seven rows would go fast; the call ends with the eighth, which loses by each candidate."""
    times = [1 + 0.34 * number for number in range(9)]
    calls = [Simulated(times, [0.9] * 7 + [0.2], seed, soft=False) for seed in range(5)]
    assert sum(call.run(512) for call in calls) < 1.15 * 5 * 512


def test_choices_are_the_same_again():
    first, second = (Simulated(LINE, [0.6, 0.8], seed=3, soft=True) for _ in range(2))
    assert first.run(400) == second.run(400)
    assert first.drafted == second.drafted
    assert len(set(first.drafted)) > 1
