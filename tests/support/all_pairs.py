"""Fewer cases than a full product has, in which every two values of different parameters still meet."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def all_pairs(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases, one value of each parameter in each, chosen one by one so that each brings the most new pairs."""
    values = [list(parameter) for parameter in parameters]
    cases = list(product(*(range(len(parameter)) for parameter in values)))

    def pairs(case: tuple[int, ...]) -> set[tuple]:
        return set(combinations(enumerate(case), 2))

    missing, chosen = set().union(*map(pairs, cases)), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return [tuple(values[i][n] for i, n in enumerate(case)) for case in chosen]


def once(*parameters: Iterable[Any]) -> list[Any]:
    """The full product, of which the default run has one case for each value of the longest parameter."""
    values = [list(parameter) for parameter in parameters]
    kept = {tuple(n % len(parameter) for parameter in values) for n in range(max(map(len, values)))}
    cases = product(*(range(len(parameter)) for parameter in values))
    marked = ((case, () if case in kept else pytest.mark.slow) for case in cases)
    return [pytest.param(*(values[i][n] for i, n in enumerate(case)), marks=marks) for case, marks in marked]
