"""Rounds as long as transformers' own arguments ask for, in every way to call; the text stays stock's."""

from typing import Any

import pytest
import torch
from tiny import Forwards, near, prompts, tiny
from transformers import GenerationConfig, PreTrainedModel

from hf_specx import DraftTargetPair, SpeculationReport, SpeculativeDecoding, generate


GREEDY = {"do_sample": False, "max_new_tokens": 25}
ASKED = {"num_assistant_tokens": 3}


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny()
    return target, near(target, 0.05)


@pytest.mark.parametrize("where", ["argument", "config", "draft"])
@pytest.mark.parametrize("form", ["strategy", "function", "pair"])
def test_the_number_counts_wherever_it_is_set(models: Any, form: str, where: str):
    target, draft = models
    settings: dict[str, Any] = GREEDY | {"return_dict_in_generate": True}
    if where == "argument":
        settings |= ASKED
    elif where == "config":
        settings = {"generation_config": GenerationConfig(**settings, **ASKED)}
    else:
        draft.generation_config.num_assistant_tokens = 3
    if form == "strategy":
        output = target.generate(**prompts(3), **settings, custom_generate=SpeculativeDecoding(draft))
    elif form == "function":
        output = generate(**prompts(3), **settings, model=target, draft_model=draft)
    else:
        output = DraftTargetPair(target, draft).generate(**prompts(3), **settings)
    assert output.speculation_report.num_draft_tokens == 3
    assert torch.equal(output.sequences, target.generate(**prompts(3), **GREEDY))


def test_what_counts_more(models: Any):
    target, draft = models
    draft.generation_config.num_assistant_tokens = 3
    config = GenerationConfig(**GREEDY, num_assistant_tokens=4)

    def number(**settings: Any) -> int:
        pair = DraftTargetPair(target, draft)
        pair.generate(**prompts(2), **settings)
        return pair.report.num_draft_tokens

    assert number(**GREEDY) == 3
    assert number(generation_config=config) == 4
    assert number(generation_config=config, num_assistant_tokens=20) == 20  # stock's default, but asked for
    assert number(generation_config=config, num_assistant_tokens=5, num_draft_tokens=6) == 6
    target.generation_config.num_assistant_tokens = 2
    assert number(**GREEDY) == 2
    assert draft.generation_config.num_assistant_tokens == 3


def drafted(report: SpeculationReport) -> list[int]:
    """Candidates of each round of row 0."""
    return [record.drafted for record in report.history[0] if record.drafted]


@pytest.mark.parametrize("schedule", ["constant", "heuristic", "heuristic_transient"])
@pytest.mark.parametrize("likeness", ["same", "stranger"])
def test_schedules_draft_as_stock(schedule: str, likeness: str):
    """Stock reads the draft's own file; with a draft that is always or never right its rounds are as long as ours."""
    target = tiny()
    draft = near(target, 0)
    if likeness == "stranger":
        draft.lm_head.weight.data = -draft.lm_head.weight.data
    settings = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": schedule}
    draft.generation_config.update(**settings, assistant_confidence_threshold=0.0)
    strategy, expected = SpeculativeDecoding(draft), target.generate(**prompts(1), **GREEDY)
    assert torch.equal(target.generate(**prompts(1), **GREEDY, custom_generate=strategy), expected)
    numbers, wanted = drafted(strategy.report), strategy.schedule.wanted
    with Forwards(target) as stock:
        target.generate(**prompts(1), **GREEDY, assistant_model=draft)
    draft.generation_config.num_assistant_tokens = 3  # stock has written its last number there
    stocks = [stock.lengths[0] - 11, *(length - 1 for length in stock.lengths[1:])]
    known = min(len(numbers), len(stocks)) - 3  # the last rounds have less room
    assert numbers[0] == 3
    assert numbers[:known] == stocks[:known]
    step = {"same": 2, "stranger": -1}[likeness]
    assert numbers[1] == (3 if schedule == "constant" else 3 + step)
    target.generate(**prompts(1), **GREEDY, custom_generate=strategy)
    assert drafted(strategy.report)[0] == (wanted if schedule == "heuristic" else 3)
    tiny(seed=4).generate(**prompts(1), **GREEDY, custom_generate=strategy)
    assert drafted(strategy.report)[0] == 3  # nothing is known of another target


def test_the_function_goes_on_as_a_strategy_does():
    target = tiny()
    draft, firsts = near(target, 0), []
    for schedule in ("heuristic", "heuristic", "heuristic_transient"):
        asked = {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": schedule}
        both = {"model": target, "draft_model": draft, "return_dict_in_generate": True}
        output = generate(**prompts(2), **GREEDY, **asked, **both)
        firsts.append(drafted(output.speculation_report)[0])
    assert firsts[0] == firsts[2] == 2
    assert firsts[1] > 2


def test_a_schedule_looks_at_all_rows():
    """It grows only after a round in which each decoding row kept all."""
    target = tiny()
    draft = near(target, 0.02)
    strategy = SpeculativeDecoding(draft)
    settings = {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "heuristic"}
    target.generate(**prompts(4), **GREEDY | {"max_new_tokens": 60}, **settings, custom_generate=strategy)
    histories = [[r for r in rows if r.drafted] for rows in strategy.report.history]
    wanted, seen = 2, set()
    for number in range(max(map(len, histories))):
        rounds = [rows[number] for rows in histories if len(rows) > number]
        assert {r.drafted for r in rounds} <= set(range(1, wanted + 1))
        if len(rounds) == 4:
            assert {r.drafted for r in rounds} == {wanted}
        kept = all(r.accepted == r.drafted for r in rounds)
        seen.add(kept)
        wanted = wanted + 2 if kept else max(1, wanted - 1)
    assert seen == {True, False}


@pytest.mark.parametrize("mode", ["greedy", "coupled", "token", "block"])
@pytest.mark.parametrize("where", ["argument", "draft"])
def test_threshold(models: Any, mode: str, where: str):
    """At 1 a round ends with its first candidate, which is kept; at next to nothing it never ends early."""
    target, draft = models
    settings = {"do_sample": mode != "greedy", "max_new_tokens": 25}
    torch.manual_seed(0)
    expected = target.generate(**prompts(3), **settings)
    for threshold, most in ((1.0, 1), (1e-9, 4), (0.0, 4)):
        given = {"num_assistant_tokens": 4, "assistant_confidence_threshold": threshold}
        draft.generation_config.update(**given if where == "draft" else dict.fromkeys(given))
        verification = None if mode == "greedy" else mode
        strategy = SpeculativeDecoding(draft, verification=verification)
        torch.manual_seed(0)
        call = given if where == "argument" else {}
        output = target.generate(**prompts(3), **settings, **call, custom_generate=strategy)
        assert set(drafted(strategy.report)[:-4]) == {most}
        if mode in ("greedy", "coupled"):
            assert torch.equal(output, expected)


def test_a_threshold_waits_for_the_last_row():
    """A round goes on until every row has met it, so rounds are as long as the surest row's."""
    target = tiny()
    draft = near(target, 0.02)
    lengths = []
    for rows in (1, 4):
        strategy = SpeculativeDecoding(draft)
        settings = {"do_sample": False, "max_new_tokens": 60, "num_assistant_tokens": 4}
        settings |= {"assistant_confidence_threshold": 0.7}
        target.generate(**prompts(rows), **settings, custom_generate=strategy)
        lengths.append(drafted(strategy.report))
    assert 1 in lengths[0]
    assert sum(lengths[1]) / len(lengths[1]) > sum(lengths[0]) / len(lengths[0])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num_assistant_tokens": 0}, "num_assistant_tokens"),
        ({"num_assistant_tokens_schedule": "linear"}, "num_assistant_tokens_schedule"),
        ({"assistant_confidence_threshold": 1.5}, "assistant_confidence_threshold"),
    ],
)
def test_settings_that_mean_nothing(models: Any, settings: dict[str, Any], name: str):
    target, draft = models
    with pytest.raises(ValueError, match=name):
        target.generate(**prompts(2), **GREEDY, **settings, custom_generate=SpeculativeDecoding(draft))
    with pytest.raises(ValueError, match=name):
        generate(**prompts(2), **GREEDY, **settings, model=target, draft_model=draft)
