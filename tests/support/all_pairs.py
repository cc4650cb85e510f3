"""Fewer cases than a full product has, in which every two values of different parameters still meet."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


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
