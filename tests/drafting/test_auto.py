"""What "auto" drafts, through `generate`, where a fake clock says how long forwards take."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from runs import COUPLED, GREEDY, KNOWN, NEW_TOKENS, drafted, run
from tiny import near, prompts, tiny
from transformers import PreTrainedModel

from hf_specx import Costs, SpeculativeDecoding
from hf_specx.drafting import schedule
from hf_specx.drafting.draft_length import MAX_DRAFT_TOKENS
from hf_specx.drafting.schedule import Auto


class Clock:
    """Time passes in forwards alone: by seconds for each, and for each token and row of it."""

    def __init__(self, *models: tuple[PreTrainedModel, float, float]):
        self.now, self.models = 0.0, models
        for model, each, token in models:
            model.register_forward_pre_hook(self.hook(each, token), with_kwargs=True)

    def hook(self, each: float, token: float) -> Callable:
        def passes(module: object, args: object, kwargs: dict) -> None:
            self.now += each + token * kwargs["input_ids"].numel()

        return passes

    def __call__(self) -> float:
        return self.now


def clocked(noise: float, draft_step: float, **options: Any) -> tuple[PreTrainedModel, SpeculativeDecoding, Clock]:
    target = tiny(max_position_embeddings=1024)
    draft = near(target, noise) if noise < 1 else tiny(seed=8, max_position_embeddings=1024)
    clock = Clock((target, 1.0, 0.01), (draft, draft_step, 0.001))
    return target, SpeculativeDecoding(draft, costs=Costs(clock=clock), **options), clock


@pytest.mark.parametrize("mode", ["greedy", "coupled", "token", "block"])
@pytest.mark.parametrize(("noise", "draft_step"), [(0.02, 0.05), (0.2, 0.2)])
def test_a_fake_clock_makes_it_deterministic(mode: str, noise: float, draft_step: float):
    runs = []
    for _ in range(2):
        target, strategy, clock = clocked(noise, draft_step, verification=None if mode == "greedy" else mode)
        texts = [run(target, prompts(4), strategy, **(GREEDY if mode == "greedy" else COUPLED)) for _ in range(2)]
        runs.append((torch.stack(texts), strategy.report.history, strategy.costs.to_dict(), clock.now))
    first, second = runs
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]
    assert len({record.drafted for row in first[1] for record in row}) > 1


@pytest.mark.parametrize(("mode", "rows"), [("greedy", 1), ("block", 1), ("coupled", 8)])
def test_an_unrelated_draft_is_let_rest(mode: str, rows: int):
    """Of 512 tokens from the first call on, whose calibration does not count: at most 3 % slower than plain."""
    target, strategy, clock = clocked(1.0, 0.3, verification=None if mode == "greedy" else mode)
    settings = (GREEDY if mode == "greedy" else COUPLED) | {"max_new_tokens": 512}
    strategy.calibrate(target, prompts(rows)["input_ids"])
    seconds, texts = [], []
    for chosen in (None, strategy, strategy):
        started = clock.now
        texts.append(run(target, prompts(rows), chosen, **settings))
        seconds.append(clock.now - started)
        assert mode == "block" or torch.equal(texts[0], texts[-1])
    assert seconds[1] < seconds[0] / 0.97
    assert seconds[2] < seconds[0] / 0.98
    assert 0 < strategy.report.rounds < 20
    assert strategy.report.plain_steps > 480


def test_a_good_cheap_draft_is_asked_for_much():
    target, strategy, _ = clocked(0.0, 0.02)
    strategy.calibrate(target, prompts(4)["input_ids"])
    run(target, prompts(4), strategy, **COUPLED)
    assert drafted(strategy).count(MAX_DRAFT_TOKENS) >= 2
    assert 0 not in drafted(strategy)[:-1]


class Wild:
    """A clock that makes no sense, otherwise each time."""

    def __init__(self, seed: int):
        self.generator, self.now = torch.Generator().manual_seed(seed), 0.0

    def __call__(self) -> float:
        self.now += float(torch.rand((), generator=self.generator)) ** 8 * 100
        return self.now


@pytest.mark.parametrize("mode", ["token", "block"])
def test_the_clock_of_a_call_does_not_change_what_it_draws(mode: str):
    """What it saw is kept for later calls; there it does. Rounds that take otherwise than plain steps would count."""
    target = tiny()
    draft, texts, numbers = near(target, 0.05), [], []
    for seed in range(3):
        costs = Costs({4: KNOWN}, rounds={4: {0: 1.0}}, clock=Wild(seed))
        strategy = SpeculativeDecoding(draft, verification=mode, costs=costs)
        texts.append(run(target, prompts(4), strategy, **COUPLED))
        numbers.append(drafted(strategy))
        assert costs.rounds
        assert 4 in costs.table
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(set(numbers[0])) > 2


@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_the_clock_counts_at_once_where_the_text_is_the_same_anyway(mode: str):
    target = tiny()
    draft, texts, numbers = near(target, 0.05), [], []
    for seed in range(3):
        costs = Costs({4: KNOWN}, rounds={4: {0: 1.0}}, clock=Wild(seed))
        strategy = SpeculativeDecoding(draft, verification="coupled", costs=costs)
        texts.append(run(target, prompts(4), strategy, **(GREEDY if mode == "greedy" else COUPLED)))
        numbers.append(tuple(drafted(strategy)))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert len(set(numbers)) > 1


@pytest.mark.filterwarnings("ignore:in this batch all rows advance")
@pytest.mark.parametrize(("layout", "expected"), [("ragged", 0.8), ("lockstep", 0.8**4)])
def test_what_a_call_begins_with(monkeypatch: pytest.MonkeyPatch, layout: str, expected: float):
    """The acceptance of earlier calls, of all rows at once where they advance together; the rows and the room."""
    made: list[Auto] = []

    def note(*args: Any) -> Auto:
        assert args[1:4] == ("block", [NEW_TOKENS] * 4, 11)
        made.append(Auto(*args))
        assert made[0].survival.chances(1) == [pytest.approx(expected)]
        return made[0]

    monkeypatch.setattr(schedule, "Auto", note)
    target = tiny()
    costs = Costs({4: KNOWN}, {"block": 0.8})
    run(target, prompts(4), SpeculativeDecoding(near(target, 0.05), layout=layout, costs=costs), **COUPLED)
    assert len(made) == 1


@pytest.mark.parametrize("mode", ["token", "block"])
def test_two_strategies_with_the_same_costs_emit_the_same(mode: str):
    """Costs that calls have filled, one of them after a way through text."""
    target = tiny()
    draft, costs = near(target, 0.2), Costs({4: KNOWN})
    teacher = SpeculativeDecoding(draft, verification=mode, costs=costs)
    for _ in range(3):
        run(target, prompts(4), teacher, **COUPLED)
    saved, texts, numbers = costs.to_dict(), [], []
    assert saved["rounds"]
    for _ in range(2):
        strategy = SpeculativeDecoding(draft, verification=mode, costs=Costs.from_dict(saved))
        texts.append([run(target, prompts(4), strategy, **COUPLED)])
        numbers.append(drafted(strategy))
    assert torch.equal(texts[0][0], texts[1][0])
    assert numbers[0] == numbers[1]
