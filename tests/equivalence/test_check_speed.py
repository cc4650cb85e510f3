"""Speed for a report: all numbers take turns on the same prompts; what is predicted follows from what was timed."""

from dataclasses import replace

import pytest
import torch
from check_cases import PROMPTS, QUICK, tiny_pair

from hf_specx import DraftTargetPair, SuffixDraft
from hf_specx.bench import timer
from hf_specx.equivalence import check as checking
from hf_specx.equivalence.settings import REPEATS, TIMED, TIMED_RUNS, Settings
from hf_specx.equivalence.speed import measure_speed, strategies_of
from hf_specx.scheduling.draft_length import expected_speedup


SMALL = QUICK | {"batch_sizes": (2, 4), "new_tokens": 12}


def subject(**changes):
    return checking.subject_of(tiny_pair(), PROMPTS, Settings(**SMALL | changes))


@pytest.mark.usefixtures("draft_pays")
def test_what_is_found():
    steps = []
    found = measure_speed(subject(), lambda: steps.append(1))
    assert len(steps) == TIMED_RUNS
    assert {name: found[name] for name in ("verification", "batch", "new_tokens", "repeats")} == {
        "verification": "block",
        "batch": 2,
        "new_tokens": 12,
        "repeats": REPEATS,
    }
    assert 0 < found["alpha"] < 1
    assert found["cost_coefficient"] == pytest.approx(0.1)  # by `draft_pays`
    assert [each["num_draft_tokens"] for each in found["numbers"]] == list(range(1, 9))
    for each in found["numbers"]:
        number, tokens = each["num_draft_tokens"], each["tokens_per_round"]
        assert 1 <= tokens <= number + 1
        assert each["expected"] == expected_speedup(found["alpha"], number, 0.1)
        forward = 1 + 0.4 * number / 8  # between those that are known
        assert each["forward_limited"] == pytest.approx(tokens / (forward + 0.1 * number))
        for name in ("speedup", "tokens_per_second"):
            assert 0 < each[name]["min"] <= each[name]["median"] <= each[name]["max"]


def test_a_draft_without_a_model_is_timed_too():
    """Its predictions have the target's forwards alone."""
    pair = DraftTargetPair(tiny_pair().target, SuffixDraft(), tiny_pair().tokenizer)
    found = measure_speed(checking.subject_of(pair, PROMPTS, Settings(**SMALL)), lambda: None)
    assert found["cost_coefficient"] < 0.05
    assert [each["num_draft_tokens"] for each in found["numbers"]] == list(range(1, 9))


@pytest.fixture
def noted(monkeypatch):
    """Runs as ever, but plain ones seem to take 8 s and those of γ candidates γ s, for 24 tokens each."""
    runs, real = [], timer.time_call

    def time_call(contender, inputs, options, seed):
        run = real(contender, inputs, options, seed)
        drafted = 0 if contender.strategy is None else contender.strategy.num_draft_tokens
        runs.append((drafted, seed, options["max_new_tokens"], inputs["input_ids"].tolist()))
        return replace(run, seconds=float(drafted or 8), texts=[[5] * 24])

    monkeypatch.setattr(timer, "time_call", time_call)
    return runs


def test_speedups_are_ratios_of_times(noted):
    found = measure_speed(subject(), lambda: None)
    assert found["plain"] == {"median": 3.0, "min": 3.0, "max": 3.0}
    assert [each["speedup"]["median"] for each in found["numbers"]] == pytest.approx(
        [8 / number for number in range(1, 9)]
    )
    assert found["numbers"][3]["tokens_per_second"] == {"median": 6.0, "min": 6.0, "max": 6.0}


def test_all_take_turns(noted):
    """In an order that rotates, with the same prompts and seed in a turn, then others; the first turn warms up."""
    measure_speed(subject(new_tokens=40), lambda: None)
    turns = [noted[first : first + len(TIMED)] for first in range(0, TIMED_RUNS, len(TIMED))]
    assert [[drafted for drafted, *_ in turn] for turn in turns] == [
        [*TIMED],
        [*TIMED],
        [*TIMED[1:], *TIMED[:1]],
        [*TIMED[2:], *TIMED[:2]],
    ]
    assert [{new for _, _, new, _ in turn} for turn in turns] == [{32}, {40}, {40}, {40}]
    seeds = [{seed for _, seed, _, _ in turn} for turn in turns]
    assert [len(seed) for seed in seeds] == [1] * 4
    assert len(set.union(*seeds)) == REPEATS
    prompts = [[ids for *_, ids in turn] for turn in turns]
    assert all(ids == turn[0] for turn in prompts for ids in turn)
    assert prompts[1][0] != prompts[2][0] != prompts[3][0]


@pytest.mark.parametrize(
    ("verifications", "timed"), [(("greedy",), "greedy"), (("greedy", "coupled"), "coupled"), (("token",), "token")]
)
def test_what_is_checked_is_timed(verifications, timed):
    found = measure_speed(subject(verifications=verifications), lambda: None)
    assert found["verification"] == timed


def test_strategies_are_as_the_pair_has_them():
    checked = subject()
    strategies = strategies_of(checked, "block", checked.encoded([0, 1]))
    assert list(strategies) == list(TIMED[1:])
    for number, strategy in strategies.items():
        assert (strategy.num_draft_tokens, strategy.verification) == (number, "block")
        assert strategy.draft_model is tiny_pair().draft
        assert strategy.costs.table == strategies[1].costs.table


def test_it_is_part_of_a_check_only_if_asked_for(monkeypatch, tmp_path):
    """It is kept with the rest, and nothing else changes."""
    measured = []
    monkeypatch.setattr(checking, "measure_speed", lambda subject, advance: measured.append(1) or {"alpha": 0.5})
    settings = {"verifications": ("greedy",), "batch_sizes": (2,)}
    path, before = tmp_path / "known.json", torch.get_rng_state()
    without = checking.run_check(subject(**settings), lambda: None, path)
    assert (without.speed, measured) == ({}, [])
    timed = checking.run_check(subject(**settings), lambda: None, path, timed=True)
    assert timed.to_dict() == without.to_dict() | {"speed": {"alpha": 0.5}}
    again = checking.run_check(subject(**settings), lambda: None, path, timed=True)
    assert again.speed == {"alpha": 0.5}
    assert measured == [1]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generator_is_left_as_it_was():
    before = torch.get_rng_state()
    checking.run_check(subject(verifications=("greedy",), batch_sizes=(1,)), lambda: None, timed=True)
    assert torch.equal(torch.get_rng_state(), before)
