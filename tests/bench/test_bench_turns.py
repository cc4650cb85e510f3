"""A cell in turns: order, seeds, failures, and the figures that follow from times."""

import pytest
import torch
from bench_cases import small, tiny_pair

from hf_specx.bench import grid, timer
from hf_specx.bench.bare import Bare, BareRound
from hf_specx.bench.contenders import Contender
from hf_specx.bench.grid import above_limit, counts, summarise, take_turns
from hf_specx.engine.history import RoundRecord
from hf_specx.engine.report import SpeculationReport


def test_contenders_take_turns_in_an_order_that_rotates(monkeypatch):
    calls, seeds, steps = [], [], []
    generate = Contender.__call__
    monkeypatch.setattr(Contender, "__call__", lambda own, *args: (calls.append(own.name), generate(own, *args))[1])
    monkeypatch.setattr(timer.torch, "manual_seed", seeds.append)
    cell = small("plain", "block-2", "token-2", repeats=3, seed=7)
    take_turns(cell, tiny_pair(), lambda: steps.append(1))
    one, two, three = cell.contenders
    assert calls == [one, two, three, one, two, three, two, three, one, three, one, two]
    assert [seed for seed in seeds if seed >= 7] == [7] * 6 + [8] * 3 + [9] * 3
    assert len(steps) == cell.turns == 12


def test_a_run_that_compiled_something_is_made_again(monkeypatch):
    compiled, calls = iter([2, 0, 1, 1, 0]), []

    class Compiling(Contender):
        def __call__(self, inputs, options):
            calls.append(torch.initial_seed())
            output = super().__call__(inputs, options)
            self.strategy.report.compilations = next(compiled)
            return output

    monkeypatch.setattr(grid, "Contender", Compiling)
    noted = take_turns(small("block-2", seed=7), tiny_pair(), lambda: None)["contenders"]["block-2"]
    assert calls == [7] * 5
    assert len(noted["runs"]) == 1


@pytest.mark.parametrize(("experiment", "times"), [("compiled", 1), ("quick", 0), ("speed", 0)])
def test_forwards_are_timed_where_their_prediction_is_judged(monkeypatch, experiment: str, times: int):
    """Elsewhere each of their lengths would be compiled for nothing."""
    calls = []
    monkeypatch.setattr(Contender, "prepare", lambda own, inputs: calls.append(own.name))
    take_turns(small("block-2", experiment=experiment), tiny_pair(), lambda: None)
    assert len(calls) == times


def test_one_that_fails_is_reported_and_the_others_go_on(monkeypatch):
    calls = []
    generate = Contender.__call__

    def call(own, *args):
        calls.append(own.name)
        if own.name == "token-2" and len(calls) > 3:
            raise RuntimeError("out of memory\nand more")
        return generate(own, *args)

    monkeypatch.setattr(Contender, "__call__", call)
    pair = tiny_pair()
    found = take_turns(small("plain", "stock", "token-2", "block-2", batch=2, repeats=2), pair, lambda: None)
    contenders = found["contenders"]
    assert contenders["stock"]["runs"] == []
    assert contenders["stock"]["unavailable"].startswith("ValueError: assisted generate is only supported for batch")
    assert contenders["token-2"] == {"runs": [], "unavailable": "RuntimeError: out of memory"}
    assert calls.count("stock") == 1
    assert len(contenders["plain"]["runs"]) == len(contenders["block-2"]["runs"]) == 2


def test_an_option_that_is_not_there_is_reported(monkeypatch):
    def refuse(*args, compile, **options):
        raise ValueError("no compiler")

    monkeypatch.setattr("hf_specx.bench.contenders.SpeculativeDecoding", refuse)
    found = take_turns(small("plain", "block-2-compiled"), tiny_pair(), lambda: None)
    assert found["contenders"]["block-2-compiled"]["unavailable"] == "ValueError: no compiler"


@pytest.mark.usefixtures("draft_pays")
def test_what_a_cell_says():
    torch.set_num_threads(1)
    names = ("plain", "stock-2", "coupled-2", "block-auto")
    found = take_turns(small(*names, bare=(names[0], *names[2:])), tiny_pair(), lambda: None)
    assert found["bandwidth"] > 0
    contenders = found["contenders"]
    for noted in contenders.values():
        assert noted["first_seconds"] > 0
        assert [run["tokens"] for run in noted["runs"]] == [8]
        assert noted["speedup"]["median"] > 0
    assert contenders["plain"]["speedup"]["median"] == pytest.approx(1)
    assert "bare" not in contenders["stock-2"]
    for name in ("coupled-2", "block-auto"):
        noted = contenders[name]
        assert 0 < noted["alpha"] <= 1
        assert noted["tokens_per_round"] >= 1
        for figure in ("round_over_bare", "call_over_bare", "seconds_per_round"):
            assert noted[figure]["min"] <= noted[figure]["median"] <= noted[figure]["max"]
        assert noted["cost_coefficient"] >= 0
        for figure in ("forward_limited_speedup", "expected_speedup", "bare_speedup", "steady_speedup"):
            assert noted[figure] > 0
        assert {"draft", "target", "verify", "rest"} <= noted["phases_per_round"].keys()
    assert contenders["coupled-2"]["bandwidth_seconds_per_round"] > 0


def a_run(**changes):
    bare = {
        "prompt": 1.0,
        "decoding": 16.0,
        "drafted": 3,
        "round": 2.0,
        "target_step": 1.25,
        "draft_step": 0.25,
        "round_bytes": 100.0,
        "round_ratio": 1.125,
    }
    counted = {"alpha": 0.5, "tokens_per_round": 3.0, "num_draft_tokens": 3, "rounds": 8, "layout": "ragged"}
    times = {"seconds": 20.0, "tokens": 40, "steps": 8, "decoding": 18.0, "round": 2.25, "full_round": 2.5}
    counted |= {"predicted": 1.4, "expected_tokens": 36.0}
    return counted | times | {"phases": {"draft": 1.0, "target": 1.0, "verify": 0.25}, "bare": bare} | changes


def test_rounds_are_timed_also_where_all_rows_took_part():
    report = SpeculationReport("block", "ragged", "chosen", rows=2)
    report.history = [[RoundRecord(0, 0, 1, 0, 1)] * 4, [RoundRecord(0, 0, 1, 0, 1)] * 3]
    report.laps = {"draft": [9.0, 1.0, 1.0, 7.0], "target": [9.0, 1.0, 2.0, 7.0], "verify": [9.0, 1.0, 1.0, 7.0]}
    report.seconds = {phase: sum(laps) for phase, laps in report.laps.items()}
    report.survival = (2.5, 4.0)
    found = counts(report)
    assert (found["round"], found["full_round"]) == (4.0, 3.5)
    assert found["phases"] == {"draft": 1.0, "target": 2.0, "verify": 1.0}
    assert found["expected_tokens"] == 7 + 2.5


def test_figures():
    bare = {"prompt": 1.0, "decoding": 33.0, "target_step": 1.0}
    plain = {"runs": [{"seconds": 40.0, "tokens": 40, "longest": 40, "bare": bare}]}
    found = summarise({"runs": [a_run()]}, plain, speed=50.0)
    assert found["tokens_per_second"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert found["speedup"]["median"] == 2.0
    assert found["seconds_per_round"]["median"] == 2.25
    assert found["phases_per_round"] == {"draft": 1.0, "target": 1.0, "verify": 0.25, "rest": 1 / 8}
    assert found["round_over_bare"]["median"] == 1.125
    assert found["call_over_bare"]["median"] == 20 / 17
    assert found["bandwidth_seconds_per_round"] == 2.0
    assert found["forward_limited_speedup"] == 3.0 * 1.0 / (1.25 + 3 * 0.25)
    assert found["expected_speedup"] == pytest.approx((1 + 0.5 + 0.25 + 0.125) / (3 * 0.25 + 1))
    assert found["bare_speedup"] == 34 / 17
    assert found["steady_speedup"] == pytest.approx(3.0 * 1.0 / 2.5)
    assert found["expected_tokens_per_second"]["median"] == 36 / 20
    assert found["cost_coefficient"] == 0.25
    assert found["predicted_speedup"] == 1.4


def test_times_plain_agree_in_order_with_tokens_per_second():
    """One definition, the ratio of the medians that are shown; ratios within turns may order contenders otherwise."""
    seconds = {"plain": (2, 4, 12), "fast": (1, 3, 12), "slow": (2, 3.5, 3)}
    known = {name: {"runs": [{"seconds": each, "tokens": 12} for each in own]} for name, own in seconds.items()}
    found = {name: summarise(noted, known["plain"], None) for name, noted in known.items()}
    rates = {name: noted["tokens_per_second"]["median"] for name, noted in found.items()}
    assert rates == {"plain": 3.0, "fast": 4.0, "slow": 4.0}
    assert {name: noted["times_plain"] for name, noted in found.items()} == {
        "plain": 1.0,
        "fast": 4 / 3,
        "slow": 4 / 3,
    }
    assert found["fast"]["speedup"]["median"] != found["slow"]["speedup"]["median"]


def test_what_is_above_its_limit_says_why():
    """Plain generate takes two times as long as its forwards, which the limit does not count."""
    bare = {"prompt": 1.0, "decoding": 19.5, "target_step": 0.5}
    plain = {"runs": [{"seconds": 40.0, "tokens": 40, "longest": 40, "bare": bare}]}
    found = summarise({"runs": [a_run()]}, plain, None)
    assert found["forward_limited_speedup"] == 0.75 < found["times_plain"] == 2.0
    assert (
        "a step of plain generate took 2.00 times its bare forward, a round of this 1.12 times" in found["above_limit"]
    )
    assert "noise" not in found["above_limit"]
    assert above_limit(found | {"plain_step_over_bare": 1.0})["above_limit"].endswith("timed after the runs")
    assert above_limit(found | {"times_plain": 0.75}) == above_limit({"times_plain": 2.0}) == {}


def test_rows_that_end_at_their_first_token(monkeypatch):
    """One of two, so that no round has all rows; then both, so that there is no round."""
    pair = tiny_pair()
    contenders = "plain", "coupled-2"
    ids = pair.inputs(2, 5, 8, seed=0)["input_ids"]
    first = pair.target(ids).logits[:, -1].argmax(-1).tolist()
    assert first[0] != first[1]
    for ends, limited in ((first[:1], True), (first, False)):
        monkeypatch.setattr(pair.target.generation_config, "eos_token_id", ends)
        found = take_turns(small(*contenders, batch=2, temperature=0, bare=contenders), pair, lambda: None)
        assert [noted.get("unavailable") for noted in found["contenders"].values()] == [None, None]
        assert ("forward_limited_speedup" in found["contenders"]["coupled-2"]) == limited


def test_a_round_of_varying_numbers_counts_all_of_them():
    """A plain step of 1 s in each second round, and one slow round that is none of the machine's usual ones."""
    drafted = [BareRound(2, 3, 1.0, 2.0, 9)] * 3 + [BareRound(2, 3, 1.0, 90.0, 9)]
    bare = Bare(1.0, [*drafted, *[BareRound(2, 0, 0.0, 1.0, 9)] * 4, BareRound(1, 3, 5.0, 5.0, 9)])
    assert bare.mean_round(2) == 2.0
    assert Bare(1.0, [BareRound(1, 0, 0.0, 1.0, 9)]).mean_round(2) == 1.0  # a row ended at its first token


def test_ratios_are_of_the_same_turn():
    """A machine that was slow during the second turn was slow for both."""
    plain = {"runs": [{"seconds": 2.0, "tokens": 10}, {"seconds": 20.0, "tokens": 10}, {"seconds": 2.0, "tokens": 10}]}
    noted = {"runs": [{"seconds": 1.0, "tokens": 10}, {"seconds": 10.0, "tokens": 10}, {"seconds": 1.0, "tokens": 10}]}
    assert summarise(noted, plain, None)["speedup"] == {"median": 2.0, "min": 2.0, "max": 2.0}


def test_plain_steps_of_ours_have_a_limit_of_one(monkeypatch):
    """As where nothing is worth drafting."""

    def replay(target, draft, ids, history):
        return Bare(1.0, [BareRound(1, 0, 0.0, 2.0, 9)] * (len(history[0]) - 1), (4.0, 0.0))

    monkeypatch.setattr(grid, "replay", replay)
    found = take_turns(small("plain", "block-2", bare=("plain", "block-2")), tiny_pair(), lambda: None)
    noted = found["contenders"]["block-2"]
    assert noted["forward_limited_speedup"] == noted["tokens_per_round"]
    assert noted["cost_coefficient"] == 0
    assert "bandwidth_seconds_per_round" not in noted
