"""What the measurements must show: claims with thresholds, judged by measured cells alone."""

import operator
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .cells import AUTO_NUMBERS, COMPILED_NAMES, EXIT_NAMES, FIXED, GAMMA, VERIFIED, Measured, median_of


ROUND_OVER_BARE = 1.08
OVER_STOCK = {"30M": (1.2, 1.7), "163M": (1.0, 1.08)}  # eager and compiled, at equal γ
OVER_STOCK_BY_DEFAULT = 1.5
OF_LIMIT = 0.9
WORTH_IT = 1.05  # a predicted speed-up over plain compiled from which ours has to be faster
USELESS = 0.97
OF_BEST = 0.95
CONTEXT_RATIO = 1.2
VERIFIER_RATIO = 1.1
COPYING = {1: 2.5, 8: 1.7}  # a suffix draft over plain, by batch size, where text repeats
NO_LOSS = 0.98
OVER_STOCK_EXIT = 1.2
SENSES = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


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
    judges = (
        _rounds,
        _over_stock,
        _by_default,
        _limits,
        _compiled,
        _unrelated,
        _auto,
        _context,
        _memory,
        _verifiers,
        _suffix,
        _mixture,
        _early_exit,
    )
    return sorted((each for judge in judges for each in judge(known)), key=lambda each: each.point)


def _of(cells: Iterable[Measured], experiment: str, **settings: Any) -> Iterator[tuple[Measured, str]]:
    """The cells of an experiment, each with its name."""
    for cell in cells:
        own = cell["cell"]
        if own["experiment"] == experiment and settings.items() <= own.items():
            yield cell, f"{own['pair'].removeprefix('grafted-')} {own['dtype']}, batch {own['batch']}"


def _why(cell: Measured, *contenders: str) -> str:
    """Why a figure is missing."""
    for name in contenders:
        noted = cell["contenders"].get(name)
        if noted is None:
            return f"{name} was not run"
        if "unavailable" in noted:
            return f"{name} is not available: {noted['unavailable']}"
    return "not measured"


def _rates(cell: Measured, contender: str, tokens: str = "tokens") -> list[float]:
    """Tokens per second, run by run; [] where there is none."""
    return [run[tokens] / run["seconds"] for run in cell["contenders"].get(contender, {}).get("runs", [])]


def _ratio(cell: Measured, over: str, under: str) -> float | None:
    """How many times as fast one contender was as another: the median over turns, None where one was not run."""
    turns = list(zip(_rates(cell, over), _rates(cell, under), strict=False))
    return statistics.median(first / second for first, second in turns) if turns else None


def _claim(point: int, what: str, wanted: str, found: float | None, cell: Measured, *of: str, note: str = "") -> Claim:
    """A claim on a figure `of` these contenders, whose absence is explained by theirs; wanted is like ">= 1.08"."""
    if found is None:
        return Claim(point, what, wanted, None, None, _why(cell, *of))
    sense, threshold = wanted.split()
    return Claim(point, what, wanted, found, SENSES[sense](found, float(threshold)), note)


def _rounds(cells: list[Measured]) -> Iterator[Claim]:
    for cell, name in _of(cells, "speed"):
        if cell["cell"]["batch"] <= 8:
            found = median_of(cell, FIXED, "round_over_bare")
            yield _claim(
                1, f"median round over bare forwards: {name}", f"<= {ROUND_OVER_BARE:.2f}", found, cell, FIXED
            )


def _over_stock(cells: list[Measured]) -> Iterator[Claim]:
    stock = f"stock-{GAMMA}"
    for experiment, ours, index in (("speed", FIXED, 0), ("compiled", COMPILED_NAMES[1], 1)):
        for cell, name in _of(cells, experiment, batch=1):
            least = OVER_STOCK.get(cell["cell"]["pair"].removeprefix("grafted-"), OVER_STOCK["163M"])[index]
            found = _ratio(cell, ours, stock)
            yield _claim(2, f"{ours} over {stock}: {name}", f">= {least:.2f}", found, cell, stock, ours)


def _by_default(cells: list[Measured]) -> Iterator[Claim]:
    least, ours = f">= {OVER_STOCK_BY_DEFAULT:.2f}", ("plain", "block-auto")
    for cell, name in _of(cells, "defaults", batch=1):
        found = _ratio(cell, "block-auto", "stock")
        yield _claim(2, f"over stock, defaults: {name}", least, found, cell, "stock", "block-auto")
        found = median_of(cell, "block-auto", "speedup")
        yield _claim(2, f"over plain, defaults: {name}", "> 1.00", found, cell, *ours)
    at_eight = [
        (median_of(cell, "block-auto", "speedup") or 0.0, cell, name) for cell, name in _of(cells, "defaults", batch=8)
    ]
    if at_eight:
        best, cell, name = max(at_eight, key=lambda each: each[0])
        yield _claim(2, f"over plain, defaults, better dtype: {name}", "> 1.00", best or None, cell, *ours)


def _limits(cells: list[Measured]) -> Iterator[Claim]:
    for cell, name in _of(cells, "speed"):
        limit = median_of(cell, FIXED, "forward_limited_speedup")
        for what, figure in (("whole calls", "speedup"), ("while all rows run", "steady_speedup")):
            found = median_of(cell, FIXED, figure)
            ratio = None if limit is None or found is None else found / limit
            note = "" if ratio is None else gap(cell, FIXED)
            what = f"of forward-limited speed-up, {what}: {name}"
            yield _claim(3, what, f">= {OF_LIMIT:.2f}", ratio, cell, "plain", FIXED, note=note)


def gap(cell: Measured, contender: str) -> str:
    """Theorem 3.8, the limit by the forwards and what was measured, and what lies between each two."""
    names = ("expected_speedup", "forward_limited_speedup", "bare_speedup", "speedup")
    theorem, limit, whole, found = (median_of(cell, contender, name) or 0.0 for name in names)
    both = [cell["contenders"][name].get("bare", {}).get("target_step") for name in ("plain", contender)]
    larger = both[1] / both[0] if all(both) else 1.0
    return (
        f"Theorem 3.8 says {theorem:.2f}, where a target step of all candidates would cost no more than of one token; "
        f"it costs {larger:.2f} times as much, so {limit:.2f}; prompts, and rows that others wait for, make it "
        f"{whole:.2f}; measured {found:.2f}, with all that is no forward"
    )


def _compiled(cells: list[Measured]) -> Iterator[Claim]:
    plain, ours = COMPILED_NAMES
    for cell, name in _of(cells, "compiled"):
        found, said = _ratio(cell, ours, plain), median_of(cell, ours, "predicted_speedup")
        what, note = f"{ours} over {plain}: {name}", f"its forwards say {said or 0.0:.2f}"
        if found is None or said is None:
            yield Claim(3, what, "> 1.00", found, None, _why(cell, plain, ours))
        elif said > WORTH_IT:
            yield Claim(3, what, "> 1.00", found, found > 1, note)
        else:
            yield Claim(3, what, "-", found, True, f"{note}, so nothing is claimed")


def _unrelated(cells: list[Measured]) -> Iterator[Claim]:
    for cell, name in _of(cells, "unrelated"):
        found = median_of(cell, "block-auto", "speedup")
        yield _claim(4, f"unrelated draft over plain: {name}", f">= {USELESS:.2f}", found, cell, "plain", "block-auto")


def _auto(cells: list[Measured]) -> Iterator[Claim]:
    fixed = [f"block-{number}" for number in AUTO_NUMBERS]
    for cell, name in _of(cells, "auto"):
        rates = {own: _rates(cell, own, "expected_tokens") for own in ("block-auto", *fixed)}
        what = f"expected tokens a second, auto over the best of {fixed[0]} to {fixed[-1]}: {name}"
        ratio, note = None, ""
        if all(rates.values()):
            # the best of many noisy figures is too high: it is found by every second turn, and judged by the others
            best = max(fixed, key=lambda own: statistics.median(rates[own][::2]))
            pairs = list(zip(rates["block-auto"], rates[best], strict=True))
            ratio = statistics.median(own / other for own, other in pairs[1::2] or pairs)
            note = f"best {best}, α {median_of(cell, best, 'alpha') or 0.0:.2f}"
        yield _claim(4, what, f">= {OF_BEST:.2f}", ratio, cell, "block-auto", *fixed, note=note)


def _context(cells: list[Measured]) -> Iterator[Claim]:
    for cell, name in _of(cells, "context"):
        what = f"outside of forwards, after {cell['cell']['prompt_tokens']} tokens: {name}"
        yield _claim(5, what, f"<= {CONTEXT_RATIO:.2f}", median_of(cell, FIXED, "ratio"), cell, FIXED)


def _memory(cells: list[Measured]) -> Iterator[Claim]:
    for cell, name in _of(cells, "memory"):
        for own, noted in cell["contenders"].items():
            note = f"{noted['beyond'] / 1e6:.2f} of {noted['limit'] / 1e6:.2f} million floats"
            what = f"memory beyond models and KV, of 16 B γ V floats, {own}: {name}"
            yield _claim(5, what, "< 1.00", noted["beyond"] / noted["limit"], cell, note=note)


def _verifiers(cells: list[Measured]) -> Iterator[Claim]:
    for cell, name in _of(cells, "verifiers"):
        rounds = [[run["full_round"] for run in cell["contenders"].get(own, {}).get("runs", [])] for own in VERIFIED]
        ratio, note = None, ""
        if all(rounds):
            turns = [[own / statistics.mean(turn) for own in turn] for turn in zip(*rounds, strict=True)]
            shares = [statistics.median(own) for own in zip(*turns, strict=True)]
            ratio = max(shares) / min(shares)
            note = ", ".join(f"{own} {share:.2f}" for own, share in zip(VERIFIED, shares, strict=True))
        what = f"slowest over fastest verifier, time a round: {name}"
        yield _claim(6, what, f"<= {VERIFIER_RATIO:.2f}", ratio, cell, *VERIFIED, note=note)


def _suffix(cells: list[Measured]) -> Iterator[Claim]:
    ours = "suffix-auto"
    for cell, name in _of(cells, "suffix"):
        kind, batch = cell["cell"].get("texts", ""), cell["cell"]["batch"]
        found, limit = (median_of(cell, ours, figure) for figure in ("speedup", "bare_speedup"))
        if not kind:
            what = f"{ours} over plain, where little repeats: {name}"
            yield _claim(7, what, f">= {NO_LOSS:.2f}", found, cell, "plain", ours)
            continue
        if batch in COPYING:
            what = f"{ours} over plain, {kind}: {name}"
            yield _claim(7, what, f">= {COPYING[batch]:.2f}", found, cell, "plain", ours)
        if batch == 1:
            what = f"{ours} over lookup-10, {kind}: {name}"
            yield _claim(7, what, ">= 1.00", _ratio(cell, ours, "lookup-10"), cell, "lookup-10", ours)
        ratio = None if found is None or limit is None else found / limit
        note = "" if limit is None else f"its forwards alone, with the prompts', are {limit:.2f} times as fast"
        what = f"{ours}, of what its forwards allow, {kind}: {name}"
        yield _claim(7, what, f">= {OF_LIMIT:.2f}", ratio, cell, "plain", ours, note=note)


def _mixture(cells: list[Measured]) -> Iterator[Claim]:
    parts = ("suffix-auto", "block-auto")
    for cell, name in _of(cells, "suffix"):
        rates = {part: _rates(cell, part) for part in parts}
        found, note = None, ""
        if all(rates.values()):
            best = max(parts, key=lambda part: statistics.median(rates[part]))
            found, note = _ratio(cell, "several-auto", best), f"the better one is {best}"
        what = f"several-auto over the better of its parts, {cell['cell'].get('texts') or 'free text'}: {name}"
        yield _claim(7, what, f">= {NO_LOSS:.2f}", found, cell, "several-auto", *parts, note=note)


def _early_exit(cells: list[Measured]) -> Iterator[Claim]:
    stock, ours = EXIT_NAMES
    for cell, name in _of(cells, "exit"):
        if cell["cell"]["batch"] == 1:
            found, least = _ratio(cell, ours, stock), f">= {OVER_STOCK_EXIT:.2f}"
            yield _claim(8, f"{ours} over {stock}: {name}", least, found, cell, stock, ours)
            continue
        found = median_of(cell, ours, "speedup")
        told = "transformers refuses this batch" if found is not None else _why(cell, "plain", ours)
        yield Claim(8, f"{ours} over plain: {name}", "-", found, None if found is None else True, told)
