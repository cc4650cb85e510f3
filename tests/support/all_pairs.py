"""Fewer cases than a full product has: every two values of different parameters still meet, by default or slowly."""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def all_pairs(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases, one value of each parameter in each, chosen one by one so that each brings the most new pairs."""
    values = [list(parameter) for parameter in parameters]
    return [_values(case, values) for case in _pairwise(values)]


def once(*parameters: Iterable[Any]) -> list[Any]:
    """The full product, of which the default run has one case for each value of the longest parameter."""
    values = [list(parameter) for parameter in parameters]
    kept = {tuple(n % len(parameter) for parameter in values) for n in range(max(map(len, values)))}
    return [_param(case, values, case in kept) for case in _product(values)]


def each_value(*parameters: Iterable[Any]) -> list[Any]:
    """The cases of `all_pairs`, of which the default run has so many that each value is in one.

    Values that are in one already take turns.
    """
    values = [list(parameter) for parameter in parameters]
    cases, kept, uses = _pairwise(values), list[tuple[int, ...]](), Counter[tuple[int, int]]()

    def gain(case: tuple[int, ...]) -> tuple[int, int]:
        return sum(not uses[value] for value in enumerate(case)), -sum(uses[value] for value in enumerate(case))

    while any(gain(case)[0] for case in cases):
        kept.append(max(cases, key=gain))
        uses.update(enumerate(kept[-1]))
    return [_param(case, values, case in kept) for case in cases]


def _product(values: list[list]) -> list[tuple[int, ...]]:
    """Cases, as the numbers of their values."""
    return list(product(*(range(len(parameter)) for parameter in values)))


def _pairs(case: tuple[int, ...]) -> set[tuple]:
    return set(combinations(enumerate(case), 2))


def _pairwise(values: list[list]) -> list[tuple[int, ...]]:
    cases, chosen = _product(values), []
    missing = set().union(*map(_pairs, cases))
    while missing:
        chosen.append(max(cases, key=lambda case: len(_pairs(case) & missing)))
        missing -= _pairs(chosen[-1])
    return chosen


def _values(case: tuple[int, ...], values: list[list]) -> tuple[Any, ...]:
    return tuple(values[i][n] for i, n in enumerate(case))


def _param(case: tuple[int, ...], values: list[list], is_default: bool) -> Any:
    return pytest.param(*_values(case, values), marks=() if is_default else pytest.mark.slow)
