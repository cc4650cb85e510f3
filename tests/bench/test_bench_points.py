"""Verdicts: each claim is told from figures alone; it holds and fails where it should, and is open where it must."""

import pytest
from bench_cases import measured, median, ours, plain, runs, small, speed, speeds

from hf_specx.bench.cells import AUTO_NUMBERS, FIXED
from hf_specx.bench.points import claims


def told(cells, point, part):
    """The only verdict on a point whose claim has this part."""
    (found,) = [each for each in claims(cells) if each.point == point and part in each.what]
    return found


def changed(contender, **figures):
    cells = speeds()
    for cell in cells:
        if contender in cell["contenders"]:
            cell["contenders"][contender] |= figures
    return cells


def test_all_hold():
    found = claims(speeds())
    assert [each.point for each in found] == [1, 2, 2, 3, 3, 3, 6]
    assert all(each.holds for each in found)


@pytest.mark.parametrize(
    ("point", "part", "contender", "figures"),
    [
        (1, "round over bare", FIXED, {"round_over_bare": median(1.09)}),
        (2, "block-5 over stock-5", "stock-5", {"runs": runs(17.0)}),
        (2, "block-5-compiled over stock-5", "block-5-compiled", {"runs": runs(16.9)}),
        (3, "whole calls", FIXED, {"speedup": median(1.79)}),
        (3, "while all rows run", FIXED, {"steady_speedup": 1.79}),
        (3, "block-5-compiled over plain-compiled", "plain-compiled", {"runs": runs(30.1)}),
        (6, "slowest over fastest", "token-5", {"runs": runs(20.0, full_round=0.39)}),
    ],
)
def test_what_fails(point, part, contender, figures):
    cells = changed(contender, **figures)
    assert told(cells, point, part).holds is False
    others = [each for each in claims(cells) if not (each.point == point and part in each.what)]
    assert all(each.holds for each in others)


@pytest.mark.parametrize("contender", ["block-5-compiled", "plain-compiled"])
def test_what_was_not_available_is_open(contender):
    cell = speed("compiled")
    cell["contenders"][contender] = {"runs": [], "unavailable": "ValueError: no compiler"}
    found = told([cell], 3, "over plain-compiled")
    assert found.holds is None
    assert found.note == f"{contender} is not available: ValueError: no compiler"
    del cell["contenders"][contender]
    assert told([cell], 3, "over plain-compiled").note == f"{contender} was not run"


def test_verifiers_are_compared_if_all_were_run():
    cell = speed("verifiers")
    cell["contenders"]["coupled-5"] = {"runs": [], "unavailable": "RuntimeError: out of memory"}
    found = told([cell], 6, "slowest over fastest")
    assert (found.holds, found.note) == (None, "coupled-5 is not available: RuntimeError: out of memory")


def test_nothing_is_claimed_where_forwards_promise_nothing():
    cells = changed("block-5-compiled", predicted_speedup=1.04, runs=runs(14.0))
    found = told(cells, 3, "over plain-compiled")
    assert (found.holds, found.wanted) == (True, "-")


def test_thresholds_are_those_of_the_pair():
    cells = speeds(pair="grafted-163M", dtype="bfloat16")
    cells[0]["contenders"]["stock-5"]["runs"] = runs(19.0)
    assert told(cells, 2, "block-5 over stock-5").holds
    assert told(cells, 2, "block-5-compiled over stock-5").wanted == ">= 1.08"


def test_rounds_of_large_batches_and_stock_beside_several_rows_are_not_judged():
    points = [each.point for each in claims(speeds(batch=16))]
    assert points == [3, 3, 3, 6]


def test_the_gap_to_the_theorem_is_explained():
    note = told([speed()], 3, "whole calls").note
    assert "2.50" in note
    assert "1.25 times as much, so 2.00" in note
    assert "1.90; measured 2.00" in note


def of_defaults(dtype, batch, speedup, stock=10.0):
    cell = small("plain", "stock", "block-auto", experiment="defaults", pair="embedded", dtype=dtype, batch=batch)
    return measured(cell, plain=plain(), stock=plain(stock), block_auto=ours(16.0, speedup))


def test_defaults():
    cells = [of_defaults("float32", 1, 1.2), of_defaults("bfloat16", 1, 1.3, stock=11.0)]
    cells += [of_defaults("float32", 8, 0.9), of_defaults("bfloat16", 8, 1.01)]
    assert told(cells, 2, "over stock, defaults: embedded float32").holds is True
    assert told(cells, 2, "over stock, defaults: embedded bfloat16").holds is False
    assert told(cells, 2, "over plain, defaults: embedded float32, batch 1").holds is True
    best = told(cells, 2, "better dtype")
    assert best.holds is True
    assert "bfloat16" in best.what
    assert told([*cells[:3], of_defaults("bfloat16", 8, 0.99)], 2, "better dtype").holds is False


@pytest.mark.parametrize(("speedup", "holds"), [(0.97, True), (0.96, False)])
def test_unrelated(speedup, holds):
    cell = small("plain", "block-auto", experiment="unrelated", pair="grafted-30M-unrelated")
    found = measured(cell, plain=plain(), block_auto=ours(9.7, speedup))
    assert told([found], 4, "unrelated draft").holds is holds


@pytest.mark.parametrize(("rate", "holds"), [(19.0, True), (18.9, False)])
def test_auto_is_beside_the_best(rate, holds):
    fixed = {f"block_{number}": ours(20.0 - abs(number - 3), 1.5) for number in AUTO_NUMBERS}
    cell = small("plain", "block-auto", experiment="auto", pair="embedded")
    found = measured(cell, plain=plain(), block_auto=ours(rate, 1.5), **fixed)
    verdict = told([found], 4, "auto over the best")
    assert verdict.holds is holds
    assert verdict.note == "best block-3, α 0.80"
    del found["contenders"]["block-7"]
    assert told([found], 4, "auto over the best").holds is None


def test_a_number_that_was_lucky_is_judged_by_its_other_turns():
    """One that was the fastest by chance in the turns that chose it."""
    fixed = {f"block_{number}": ours(20.0, 1.5) for number in AUTO_NUMBERS}
    fixed["block_7"]["runs"] = [run for rate in (24.0, 20.0, 24.0, 20.0) for run in runs(rate)[:1]]
    cell = small("plain", "block-auto", experiment="auto", pair="embedded")
    verdict = told([measured(cell, plain=plain(), block_auto=ours(19.5, 1.5), **fixed)], 4, "auto over the best")
    assert (verdict.found, verdict.note) == (19.5 / 20.0, "best block-7, α 0.80")


@pytest.mark.parametrize(("ratio", "beyond", "holds"), [(1.2, 99.0, True), (1.21, 100.0, False)])
def test_context_and_memory(ratio, beyond, holds):
    context = measured(small(FIXED, experiment="context", prompt_tokens=4000), block_5={"ratio": ratio})
    memory = measured(small(FIXED, experiment="memory"), block_5={"beyond": beyond, "limit": 100})
    assert told([context, memory], 5, "after 4000 tokens").holds is holds
    assert told([context, memory], 5, "memory").holds is holds


def test_cells_that_failed_are_left_out():
    assert claims([speed() | {"failed": "RuntimeError: memory", "contenders": {}}]) == []


def copying(batch: int, texts: str, **rates: float) -> dict:
    """Where a suffix draft is 3 times as fast as plain, its forwards alone 3.2 times, and a model's 1.5."""
    rates = {"suffix_auto": 30.0, "block_auto": 15.0, "several_auto": 30.0, "lookup_10": 28.0} | rates
    contenders = {name: ours(rate, rate / 10, bare_speedup=3.2) for name, rate in rates.items()}
    cell = small(*rates, experiment="suffix", batch=batch, texts=texts)
    return measured(cell, plain=plain(), **contenders)


def test_suffix_drafts_that_do_what_they_must():
    cells = [copying(batch, texts) for batch in (1, 8) for texts in ("rewrite", "answer")]
    cells += [copying(1, "", suffix_auto=9.9, several_auto=14.9)]
    found = claims(cells)
    assert len(found) == 2 * (4 + 3) + 2
    assert {each.point for each in found} == {7}
    assert all(each.holds for each in found)


@pytest.mark.parametrize(
    ("batch", "texts", "rates", "part"),
    [
        (1, "rewrite", {"suffix_auto": 24.0, "several_auto": 24.0, "lookup_10": 20.0}, "over plain, rewrite"),
        (1, "rewrite", {"lookup_10": 31.0}, "over lookup-10"),
        (8, "rewrite", {"suffix_auto": 16.0, "several_auto": 16.0}, "over plain, rewrite"),
        (8, "rewrite", {"suffix_auto": 28.0}, "of what its forwards allow"),
        (8, "", {"suffix_auto": 9.7, "several_auto": 15.0}, "where little repeats"),
        (8, "", {"suffix_auto": 9.9, "several_auto": 14.0}, "over the better of its parts, free text"),
    ],
)
def test_suffix_drafts_that_fall_short(batch, texts, rates, part):
    assert told([copying(batch, texts, **rates)], 7, part).holds is False


def exits(batch: int, ratio: float) -> dict:
    known = {"exit:2-auto": ours(20.0, 2.0), "stock:2": plain(20.0 / ratio)}
    cell = small(*known, experiment="exit", batch=batch)
    return measured(cell, plain=plain()) | {"contenders": known}


def test_early_exits_are_compared_with_those_of_transformers():
    assert told([exits(1, 1.21)], 8, "exit:2-auto over stock:2").holds is True
    assert told([exits(1, 1.19)], 8, "exit:2-auto over stock:2").holds is False
    found = told([exits(8, 1.0)], 8, "exit:2-auto over plain")
    assert (found.found, found.wanted) == (2.0, "-")
