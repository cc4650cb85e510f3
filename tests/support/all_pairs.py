"""Fewer cases than a full product has: every two values of different parameters still meet, by default or slowly."""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def all_pairs(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases, one value of each parameter in each, chosen one by one so that each brings the most new pairs."""
    values = [list(parameter) for parameter in parameters]
    return [_values(case, values) for case in _pairwise(values, [])]


def once(*parameters: Iterable[Any]) -> list[Any]:
    """The full product, of which the default run has one case for each value of the longest parameter."""
    values = [list(parameter) for parameter in parameters]
    kept = {tuple(n % len(parameter) for parameter in values) for n in range(max(map(len, values)))}
    return [_param(case, values, case in kept) for case in _product(values)]


def each_value(*parameters: Iterable[Any]) -> list[Any]:
    """As `all_pairs`, of which the default run has one case for each value of the longest parameter.

    In these the values of the others take turns, and so do their pairs.
    """
    values = [list(parameter) for parameter in parameters]
    longest = max(range(len(values)), key=lambda parameter: len(values[parameter]))
    kept: list[tuple[int, ...]] = []
    pairs_met, values_met = Counter[tuple](), Counter[tuple[int, int]]()
    for n in range(len(values[longest])):
        cases = [case for case in _product(values) if case[longest] == n]
        uses = [
            (sum(map(pairs_met.__getitem__, _pairs(x))), sum(map(values_met.__getitem__, enumerate(x)))) for x in cases
        ]
        kept.append(cases[uses.index(min(uses))])
        pairs_met.update(_pairs(kept[-1]))
        values_met.update(enumerate(kept[-1]))
    return [_param(case, values, number < len(kept)) for number, case in enumerate(_pairwise(values, kept))]


def _product(values: list[list]) -> list[tuple[int, ...]]:
    """Cases, as the numbers of their values."""
    return list(product(*(range(len(parameter)) for parameter in values)))


def _pairs(case: tuple[int, ...]) -> set[tuple]:
    return set(combinations(enumerate(case), 2))


def _pairwise(values: list[list], chosen: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The cases that are chosen, and more of them until all pairs have met."""
    cases, chosen = _product(values), list(chosen)
    missing = set().union(*map(_pairs, cases)) - set().union(*map(_pairs, chosen))
    while missing:
        chosen.append(max(cases, key=lambda case: len(_pairs(case) & missing)))
        missing -= _pairs(chosen[-1])
    return chosen


def _values(case: tuple[int, ...], values: list[list]) -> tuple[Any, ...]:
    return tuple(values[i][n] for i, n in enumerate(case))


def _param(case: tuple[int, ...], values: list[list], is_default: bool) -> Any:
    return pytest.param(*_values(case, values), marks=() if is_default else pytest.mark.slow)
