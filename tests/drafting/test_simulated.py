"""The choices of "auto" in simulated calls: known chances that candidates are kept, and known times of rounds."""

import random

import pytest
import torch
from all_pairs import each_value, once
from rounds import made_round

from hf_specx.common.batch import Batch, RowState
from hf_specx.drafting.auto import COMPILED_NUMBERS, AutoDraftLength
from hf_specx.drafting.costs import PRIOR_ALPHA, Costs, expected_tokens
from hf_specx.drafting.round_timer import RoundTimer


class Line(RoundTimer):
    """Plain steps take 1 second, and rounds with candidates so much, and more for each candidate."""

    def __init__(self, first: float, each: float, costs: Costs, read: float = 0.0):
        super().__init__(costs)
        self.line, self.read, self.timed = (first, each), read, True

    def times(self, rows: int, most: int, steps: bool = True) -> list[float]:
        first, each = self.line
        return [1.0, *(first + each * number for number in range(1, most + 1))]

    def prefill_seconds(self, rows: int, tokens: int) -> float:
        return self.read * tokens

    def has_seen_plain(self, rows: int) -> bool:
        return self.timed

    def observe(self, rows: int, drafted: int) -> None:
        pass


def prompted(rows: int, room: int) -> Batch:
    """Prompts of ten tokens, each with room for so many more."""
    return Batch(
        torch.ones(rows, 10, dtype=torch.int64), None, 0, row_states=[RowState(limit=room) for _ in range(rows)]
    )


class Call:
    """A call in which each candidate of a row is kept with probability α."""

    def __init__(self, round_timer: Line, alphas: list[float], seed: int = 0, compiled: bool = False):
        self.round_timer, self.alphas, self.random, self.compiled = round_timer, alphas, random.Random(seed), compiled

    def run(self, tokens: int, fixed: int | None = None) -> float:
        """Seconds until each row has so many tokens; `drafted` has the number of each round."""
        auto = AutoDraftLength(self.round_timer, "greedy", prompted(len(self.alphas), tokens + 1), self.compiled)
        left, seconds, self.drafted, unread = [tokens] * len(self.alphas), 0.0, [], 10
        while max(left) > 0:
            rows = [row for row, open_tokens in enumerate(left) if open_tokens > 0]
            number = auto.num_draft_tokens if fixed is None else fixed
            accepted = [self.kept(self.alphas[row], number) for row in rows]
            seconds += self.round_timer.times(len(rows), number)[number] + (
                self.round_timer.prefill_seconds(1, unread) if number else 0
            )
            unread = 0 if number else unread + 1
            for row, kept in zip(rows, accepted, strict=True):
                left[row] -= kept + 1
            self.drafted.append(number)
            done = made_round([number] * len(rows), accepted, rows=rows)
            done.keep_indices = torch.tensor([n for n, row in enumerate(rows) if left[row] > 0])
            auto.observe(done)
        auto.end()
        return seconds

    def kept(self, alpha: float, number: int) -> int:
        """Candidates before the first that is rejected."""
        return next((n for n in range(number) if self.random.random() >= alpha), number)


SIMULATED = {  # seconds of a round with candidates, and of each; α, the best γ
    "line": (1.0, 0.2, 0.7, 3),
    "nearly always right": (1.0, 0.03, 0.99, 20),
    "not worth it": (1.0, 0.6, 0.45, 0),
    "overhead": (1.4, 0.1, 0.8, 7),
}


@pytest.mark.parametrize(("case", "rows"), once(SIMULATED, [1, 8]))
def test_choices_come_close_to_the_best_number(case: str, rows: int):
    """Within 5 % of the time of the best number; the mean of 10 simulated calls with fixed seeds."""
    first, each, alpha, best = SIMULATED[case]
    times = Line(first, each, Costs()).times(1, 20)
    rates = [expected_tokens(alpha, number) / seconds for number, seconds in enumerate(times)]
    fastest = rates.index(max(rates))
    assert abs(fastest - best) <= (best > 8)
    calls = [Call(Line(first, each, Costs()), [alpha] * rows, seed) for seed in range(10)]
    fixed = sum(call.run(600, fastest) for call in calls)
    for call in calls:
        call.round_timer.costs.trial_budget = 0.0
    assert sum(call.run(600) for call in calls) < 1.05 * fixed


@pytest.mark.parametrize(("first", "each"), [(1.3, 0.15), (1.15, 0.2)])
def test_a_text_that_begins_badly_is_not_given_up(first: float, each: float):
    """Texts differ in their α: 100 short calls, which learn from each other, are as fast as with any fixed number."""
    costs, drawn, seconds, fixed = Costs(), random.Random(7), 0.0, [0.0] * 6
    for seed in range(100):
        alpha = drawn.betavariate(10.0, 3.8)  # 0.72 on average, 0.12 up or down
        call = Call(Line(first, each, costs, read=0.02), [alpha], seed)
        seconds += call.run(60)
        costs.remember("greedy", alpha, sum(call.drafted))
        others = Line(first, each, Costs(), read=0.02)
        fixed = [before + Call(others, [alpha], seed).run(60, number) for number, before in enumerate(fixed)]
    assert seconds < 1.01 * min(fixed)


@pytest.mark.parametrize(("rows", "each"), each_value([1, 8], [0.02, 0.2, 0.9]))
def test_a_useless_draft_costs_next_to_nothing(rows: int, each: float):
    """Over 512 tokens; from the second call on no more than it may be tried for, and prompts are not read for it."""
    for seed in range(5):
        costs = Costs()
        seconds, numbers = [], []
        for _ in range(4):
            call = Call(Line(1.0, each, costs, read=0.05), [0.02] * rows, seed)
            seconds.append(call.run(512))
            numbers.append(sum(map(bool, call.drafted)))
            costs.alpha["greedy"] = 0.02
        assert seconds[0] < 1.03 * 512
        assert max(seconds[1:]) < 1.025 * 512
        assert numbers[0] > 0


def test_a_draft_that_has_become_better_is_found():
    """In a later call; short calls save up for trying it."""
    costs, rounds = Costs(alpha={"greedy": 0.02}), []
    for _ in range(20):
        call = Call(Line(1.0, 0.2, costs, read=0.005), [0.02])
        call.run(60)
        rounds.append(sum(map(bool, call.drafted)))
    assert 0 < 0.2 * sum(rounds) < 0.01 * 20 * 60
    costs.trial_budget = 0.0
    call = Call(Line(1.0, 0.2, costs, read=0.005), [0.95])
    call.run(2000)
    assert 0 not in call.drafted[-200:]
    assert call.drafted[:10] == [0] * 10


@pytest.mark.parametrize("has_prior", [False, True])
def test_a_dear_draft_is_tried_before_it_is_judged(has_prior: bool):
    """With what is assumed at first it would be slower than plain, with what it is one and a half times as fast."""
    alpha = {"greedy": PRIOR_ALPHA} if has_prior else {}
    calls = [Call(Line(1.5, 0.4, Costs(alpha=dict(alpha))), [0.95], seed) for seed in range(10)]
    seconds = sum(call.run(48) for call in calls)
    assert (seconds < 10 * 48 / 1.3) is not has_prior  # where so little had been seen, most of a call goes by plainly


@pytest.mark.parametrize("alpha", [{"greedy": 0.6}, {}])
def test_a_short_call_does_not_read_a_long_prompt_for_little(alpha: dict[str, float]):
    for tokens, drafts in ((8, False), (200, True)):
        call = Call(Line(1.0, 0.2, Costs(alpha=dict(alpha)), read=0.5), [0.6])
        call.run(tokens)
        assert (call.drafted[0] > 0) is drafts


def test_few_numbers_are_drafted_where_each_is_compiled():
    round_timer, drafted = Line(1.0, 0.2, Costs()), set()
    for alpha in (0.5, 0.7, 0.9):
        call = Call(round_timer, [alpha], compiled=True)
        call.run(200)
        drafted |= set(call.drafted)
    assert drafted <= {0, *COMPILED_NUMBERS}


def test_plain_steps_are_timed_before_a_draft_is_preferred_to_them():
    round_timer = Line(1.0, 0.2, Costs(alpha={"greedy": 0.95}))
    round_timer.timed = False
    auto = AutoDraftLength(round_timer, "greedy", prompted(1, 100))
    assert auto.num_draft_tokens == 0
    round_timer.timed = True
    auto.observe(made_round([0], [0]))
    assert auto.num_draft_tokens > 0


def test_a_draft_that_was_slow_by_chance_is_timed_again():
    """What was seen of it is weighed against rounds that try it, as many as are needed to count."""
    now = [0.0]
    costs = Costs({1: {"target": {1: 1.0, 9: 1.4}, "draft": 0.1}}, {"greedy": 0.9}, {1: {0: 1.0, 5: 9.0}})
    costs.clock, costs.trial_budget = lambda: now[0], 100.0
    for _ in range(8):
        auto = AutoDraftLength(RoundTimer(costs, online=True), "greedy", prompted(1, 60))
        for _ in range(20):
            now[0] += costs.forward_seconds(1, auto.num_draft_tokens)
            auto.observe(made_round([auto.num_draft_tokens], [auto.num_draft_tokens]))
        auto.end()
    assert auto.num_draft_tokens > 0
    assert costs.rounds[1][auto.num_draft_tokens] < 1.5 * costs.forward_seconds(1, auto.num_draft_tokens)
