"""What the measurements must show: claims with thresholds, judged by measured cells alone."""

import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .cells import AUTO_NUMBERS, COMPILED_NAMES, FIXED, GAMMA, VERIFIED, Measured


ROUND_OVER_BARE = 1.08
OVER_STOCK = {"30M": (1.2, 1.7), "163M": (1.0, 1.08)}  # eager and compiled, at equal γ
OVER_STOCK_BY_DEFAULT = 1.5
OF_LIMIT = 0.9
WORTH_IT = 1.05  # a predicted speed-up over plain compiled from which ours has to be faster
USELESS = 0.97
OF_BEST = 0.95
CONTEXT_RATIO = 1.2
VERIFIER_RATIO = 1.1


class Claim(NamedTuple):
    """A claim, and whether it holds.

    Attributes:
        point: the number of the point that it belongs to.
        what: what is claimed, and of what.
        wanted: the threshold, with its sense.
        found: the measured value, or None.
        holds: None where too little was measured.
        note: what helps to read it, or what was not measured.
    """

    point: int
    what: str
    wanted: str
    found: float | None
    holds: bool | None
    note: str = ""


def claims(cells: Iterable[Measured]) -> list[Claim]:
    """All claims that these measured cells let us judge, in order."""
    known = [cell for cell in cells if "failed" not in cell]
    judges = (_rounds, _over_stock, _by_default, _limits, _compiled, _unrelated, _auto, _context, _memory, _verifiers)
    return sorted((each for judge in judges for each in judge(known)), key=lambda each: each.point)


def _of(cells: Iterable[Measured], experiment: str, **settings: Any) -> Iterator[Measured]:
    for cell in cells:
        if cell["cell"]["experiment"] == experiment and settings.items() <= cell["cell"].items():
            yield cell


def _name(cell: Measured) -> str:
    own = cell["cell"]
    return f"{own['pair'].removeprefix('grafted-')} {own['dtype']}, batch {own['batch']}"


def _value(cell: Measured, contender: str, key: str) -> float | None:
    """A median, or None where it was not measured."""
    value = cell["contenders"].get(contender, {}).get(key)
    return value["median"] if isinstance(value, dict) else value


def _why(cell: Measured, *contenders: str) -> str:
    """Why a figure is missing."""
    for name in contenders:
        noted = cell["contenders"].get(name)
        if noted is None:
            return f"{name} was not run"
        if "unavailable" in noted:
            return f"{name} is not available: {noted['unavailable']}"
    return "not measured"


def _ratio(cell: Measured, over: str, under: str) -> float | None:
    """By how much one contender was faster than another one: the median over turns, None where one was not run."""
    turns = list(zip(_rates(cell, over), _rates(cell, under), strict=False))
    return statistics.median(first / second for first, second in turns) if turns else None


def _at_least(point: int, what: str, least: float, found: float | None, note: str) -> Claim:
    return Claim(point, what, f">= {least:.2f}", found, None if found is None else found >= least, note)


def _at_most(point: int, what: str, most: float, found: float | None, note: str) -> Claim:
    return Claim(point, what, f"<= {most:.2f}", found, None if found is None else found <= most, note)


def _rounds(cells: list[Measured]) -> Iterator[Claim]:
    for cell in _of(cells, "speed"):
        if cell["cell"]["batch"] > 8:
            continue
        found = _value(cell, FIXED, "round_over_bare")
        note = _why(cell, FIXED) if found is None else ""
        yield _at_most(1, f"median round over bare forwards: {_name(cell)}", ROUND_OVER_BARE, found, note)


def _over_stock(cells: list[Measured]) -> Iterator[Claim]:
    stock = f"stock-{GAMMA}"
    for experiment, ours, index in (("speed", FIXED, 0), ("compiled", COMPILED_NAMES[1], 1)):
        for cell in _of(cells, experiment, batch=1):
            least = OVER_STOCK.get(cell["cell"]["pair"].removeprefix("grafted-"), OVER_STOCK["163M"])[index]
            found = _ratio(cell, ours, stock)
            note = _why(cell, stock, ours) if found is None else ""
            yield _at_least(2, f"{ours} over {stock}: {_name(cell)}", least, found, note)


def _by_default(cells: list[Measured]) -> Iterator[Claim]:
    at_eight = []
    for cell in _of(cells, "defaults"):
        batch = cell["cell"]["batch"]
        if batch == 1:
            found = _ratio(cell, "block-auto", "stock")
            note = _why(cell, "stock", "block-auto") if found is None else ""
            yield _at_least(2, f"over stock, defaults: {_name(cell)}", OVER_STOCK_BY_DEFAULT, found, note)
            yield _faster(cell, 2, f"over plain, defaults: {_name(cell)}", _value(cell, "block-auto", "speedup"))
        elif batch == 8:
            at_eight.append((_value(cell, "block-auto", "speedup") or 0.0, cell))
    if at_eight:
        found, best = max(at_eight, key=lambda each: each[0])
        yield _faster(best, 2, f"over plain, defaults, better dtype: {_name(best)}", found or None)


def _faster(cell: Measured, point: int, what: str, found: float | None) -> Claim:
    note = _why(cell, "plain", "block-auto") if found is None else ""
    return Claim(point, what, "> 1.00", found, None if found is None else found > 1, note)


def _limits(cells: list[Measured]) -> Iterator[Claim]:
    for cell in _of(cells, "speed"):
        limit = _value(cell, FIXED, "forward_limited_speedup")
        for what, name in (("whole calls", "speedup"), ("while all rows run", "steady_speedup")):
            found = _value(cell, FIXED, name)
            ratio = None if limit is None or found is None else found / limit
            note = _why(cell, "plain", FIXED) if ratio is None else gap(cell, FIXED)
            yield _at_least(3, f"of forward-limited speed-up, {what}: {_name(cell)}", OF_LIMIT, ratio, note)


def gap(cell: Measured, contender: str) -> str:
    """Theorem 3.8, the limit by the forwards and what was measured, and what lies between each two."""
    names = ("expected_speedup", "forward_limited_speedup", "bare_speedup", "speedup")
    theorem, limit, whole, found = (_value(cell, contender, name) or 0.0 for name in names)
    both = [cell["contenders"][name].get("bare", {}).get("target_step") for name in ("plain", contender)]
    larger = both[1] / both[0] if all(both) else 1.0
    return (
        f"Theorem 3.8 says {theorem:.2f}, where a target step of all candidates would cost no more than of one token; "
        f"it costs {larger:.2f} times as much, so {limit:.2f}; prompts, and rows that others wait for, make it "
        f"{whole:.2f}; measured {found:.2f}, with all that is no forward"
    )


def _compiled(cells: list[Measured]) -> Iterator[Claim]:
    plain, ours = COMPILED_NAMES
    for cell in _of(cells, "compiled"):
        found, said = _ratio(cell, ours, plain), _value(cell, ours, "predicted_speedup")
        what = f"{ours} over {plain}: {_name(cell)}"
        if found is None or said is None:
            yield Claim(3, what, "> 1.00", found, None, _why(cell, plain, ours))
        elif said > WORTH_IT:
            yield Claim(3, what, "> 1.00", found, found > 1, f"its forwards say {said:.2f}")
        else:
            yield Claim(3, what, "-", found, True, f"its forwards say {said:.2f}, so nothing is claimed")


def _unrelated(cells: list[Measured]) -> Iterator[Claim]:
    for cell in _of(cells, "unrelated"):
        found = _value(cell, "block-auto", "speedup")
        note = _why(cell, "plain", "block-auto") if found is None else ""
        yield _at_least(4, f"unrelated draft over plain: {_name(cell)}", USELESS, found, note)


def _auto(cells: list[Measured]) -> Iterator[Claim]:
    fixed = [f"block-{number}" for number in AUTO_NUMBERS]
    for cell in _of(cells, "auto"):
        rates = {name: _rates(cell, name, "expected_tokens") for name in ("block-auto", *fixed)}
        what = f"expected tokens a second, auto over the best of {fixed[0]} to {fixed[-1]}: {_name(cell)}"
        if not all(rates.values()):
            yield _at_least(4, what, OF_BEST, None, _why(cell, "block-auto", *fixed))
            continue
        # the best of many noisy figures is too high: it is found by every second turn, and judged by the others
        best = max(fixed, key=lambda name: statistics.median(rates[name][::2]))
        pairs = list(zip(rates["block-auto"], rates[best], strict=True))
        ratio = statistics.median(own / other for own, other in pairs[1::2] or pairs)
        yield _at_least(4, what, OF_BEST, ratio, f"best {best}, α {_value(cell, best, 'alpha') or 0.0:.2f}")


def _rates(cell: Measured, contender: str, tokens: str = "tokens") -> list[float]:
    """Tokens a second, run by run; [] where there is none."""
    return [run[tokens] / run["seconds"] for run in cell["contenders"].get(contender, {}).get("runs", [])]


def _context(cells: list[Measured]) -> Iterator[Claim]:
    for cell in _of(cells, "context"):
        found = _value(cell, FIXED, "ratio")
        what = f"outside of forwards, after {cell['cell']['prompt_tokens']} tokens: {_name(cell)}"
        yield _at_most(5, what, CONTEXT_RATIO, found, "" if found is not None else _why(cell, FIXED))


def _memory(cells: list[Measured]) -> Iterator[Claim]:
    for cell in _of(cells, "memory"):
        for name, noted in cell["contenders"].items():
            found = noted["beyond"] / noted["limit"]
            note = f"{noted['beyond'] / 1e6:.2f} of {noted['limit'] / 1e6:.2f} million floats"
            what = f"memory beyond models and KV, of 16 B γ V floats, {name}: {_name(cell)}"
            yield Claim(5, what, "< 1.00", found, found < 1, note)


def _verifiers(cells: list[Measured]) -> Iterator[Claim]:
    for cell in _of(cells, "verifiers"):
        rounds = [[run["full_round"] for run in cell["contenders"].get(name, {}).get("runs", [])] for name in VERIFIED]
        what = f"slowest over fastest verifier, time a round: {_name(cell)}"
        if not all(rounds):
            yield _at_most(6, what, VERIFIER_RATIO, None, _why(cell, *VERIFIED))
            continue
        turns = [[own / statistics.mean(turn) for own in turn] for turn in zip(*rounds, strict=True)]
        shares = [statistics.median(own) for own in zip(*turns, strict=True)]
        note = ", ".join(f"{name} {share:.2f}" for name, share in zip(VERIFIED, shares, strict=True))
        yield _at_most(6, what, VERIFIER_RATIO, max(shares) / min(shares), note)
