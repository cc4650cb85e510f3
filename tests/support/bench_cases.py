"""What tests of the bench share: a tiny pair, small cells, and measured cells as a file has them."""

from tiny import near, tiny

from hf_specx.bench.cells import COMPILED_NAMES, FIXED, VERIFIED, Cell
from hf_specx.bench.inputs import BenchPair


def tiny_pair(name: str = "tiny", dtype: str = "float32", **changes) -> BenchPair:
    """Given random tokens, as grafted pairs are."""
    target = tiny(**changes)
    return BenchPair(name, target, near(target, 0.05), {"synthetic": True})


def small(*contenders: str, **settings) -> Cell:
    given = {"experiment": "speed", "pair": "tiny", "prompt_tokens": 5, "new_tokens": 8, "repeats": 1}
    return Cell(contenders=contenders, **given | settings)


def median(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value}


def runs(rate: float, **more) -> list[dict]:
    return [{"tokens": rate, "expected_tokens": rate, "seconds": 1.0, "full_round": 0.35} | more] * 4


def ours(rate: float, speedup: float, **more) -> dict:
    """A contender's figures."""
    phases = {"draft": 0.1, "target": 0.2, "verify": 0.05}
    return {
        "runs": runs(rate),
        "tokens_per_second": median(rate),
        "speedup": median(speedup),
        "alpha": 0.8,
        "seconds_per_round": median(0.35),
        "phases_per_round": phases,
        "round_over_bare": median(1.05),
        "bare": {"target_step": 0.25},
        "forward_limited_speedup": 2.0,
        "expected_speedup": 2.5,
        "bare_speedup": 1.9,
        "steady_speedup": 1.95,
    } | more


def plain(rate: float = 10.0) -> dict:
    return {
        "runs": runs(rate),
        "tokens_per_second": median(rate),
        "speedup": median(1.0),
        "bare": {"target_step": 0.2},
    }


def measured(cell: Cell, **contenders) -> dict:
    """A cell of a file of results; names of contenders with _ for -."""
    named = {name.replace("_", "-"): noted for name, noted in contenders.items()}
    return {"cell": cell.to_dict(), "pair": {"synthetic": True}, "provenance": {}, "contenders": named}


def speed(experiment: str = "speed", **settings) -> dict:
    """One in which every claim holds."""
    known = {name: ours(20.0, 2.0) for name in (FIXED, *VERIFIED)}
    known |= {"plain": plain(), "stock-5": plain(10.0), "plain-compiled": plain(15.0)}
    known["block-5-compiled"] = ours(30.0, 3.0, predicted_speedup=2.0)
    names = {
        "speed": ("plain", "stock-5", FIXED),
        "compiled": ("plain", "stock-5", *COMPILED_NAMES),
        "verifiers": VERIFIED,
    }
    cell = small(*names[experiment], experiment=experiment, **{"pair": "grafted-30M"} | settings)
    return measured(cell, **{name: known[name] for name in names[experiment]})


def speeds(**settings) -> list[dict]:
    return [speed(experiment, **settings) for experiment in ("speed", "compiled", "verifiers")]
