"""Which candidates a round has besides those of first choice: the ones that promise most, within a number of nodes.

What the target chooses at a node is the draft's choice of rank r with a chance that depends on r alone, as far as
rounds have shown: 0.74, 0.14, 0.05 for the pair in the package at temperature 1. A node is worth the product of these
chances on the way to it: that many tokens more come of a round that has it.

- A comb is the chain of first choices with next best ones beside it, which nothing follows. These cost a draft that
  knows its distribution no step more.
- A full tree has whatever nodes are worth most; a draft that goes token by token runs a step for each level of it.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from hf_specx.common.round import Round
from hf_specx.common.tree import Parents


MOST_RANKS = 16  # choices at one place
PRIOR = (0.7, 0.14, 0.05, 0.025)  # chances of ranks before any were seen; those of later ones are halved each time
WEIGHT = 20.0  # nodes that this is worth
FORGET = 0.98  # factor on the weight of earlier rounds at each round


class Shape(NamedTuple):
    """The nodes of a row: the chain of first choices, and then others, each behind its parent.

    Attributes:
        parents: the number of the node that each follows, -1 for the last emitted token.
        depths: how many nodes there are on the way to each, without itself.
        ranks: of each among its siblings.
    """

    parents: Parents
    depths: tuple[int, ...]
    ranks: tuple[int, ...]

    def with_leaves_below(self, numbers: Sequence[int]) -> "Shape":
        """A comb with leaves of ranks below `numbers` alone, which are by depth; the chain stays as it is."""
        nodes = zip(*self, strict=True)
        kept = [node for node in nodes if not node[2] or node[2] < numbers[node[1]]]
        return Shape(*zip(*kept, strict=True)) if kept else self


class Ranks:
    """The chance that a target's own choice at a node has a rank among the draft's, by the rounds so far."""

    def __init__(self) -> None:
        prior = [*PRIOR, *(PRIOR[-1] / 2**n for n in range(1, 1 + MOST_RANKS - len(PRIOR)))]
        self.hits = [WEIGHT * chance for chance in prior]
        self.tried = [WEIGHT] * MOST_RANKS

    def observe(self, done: Round) -> None:
        """Count the nodes on the branches that were taken; of a chain these are those of first choice."""
        self.hits, self.tried = ([FORGET * count for count in counts] for counts in (self.hits, self.tried))
        for index, (branch, length) in enumerate(zip(done.branches, done.draft.lengths, strict=True)):
            for place, node in enumerate([0, *(number + 1 for number in done.paths[index])]):
                offered = int(place < length) if done.tree is None else done.tree.rows[index].children[node]
                for rank in range(min(offered, MOST_RANKS)):
                    self.tried[rank] += 1
                if place < len(branch) and branch[place] < MOST_RANKS:
                    self.hits[branch[place]] += 1

    @property
    def chances(self) -> list[float]:
        """Of ranks 0 to `MOST_RANKS` - 1; none is more than that of the rank before."""
        chances = [hits / tried for hits, tried in zip(self.hits, self.tried, strict=True)]
        return list(itertools.accumulate(chances, min))


class Trees:
    """The shapes of the trees of one call, each of up to `nodes` nodes a row."""

    def __init__(self, nodes: int):
        self.nodes, self.ranks = nodes, Ranks()
        self.shapes: dict[tuple[str, int], Shape] = {}  # of this round

    def observe(self, done: Round) -> None:
        """Learn which ranks the target has chosen."""
        self.ranks.observe(done)
        self.shapes.clear()

    def comb(self, length: int) -> Shape:
        """The chain of `length` first choices, with next best ones beside it."""
        if ("comb", length) not in self.shapes:
            self.shapes["comb", length] = comb_of(self.ranks.chances, length, self.nodes)
        return self.shapes["comb", length]

    def full(self, depth: int) -> Shape:
        """The nodes up to a depth that are worth most."""
        if ("full", depth) not in self.shapes:
            self.shapes["full", depth] = tree_of_ranks(self.ranks.chances, depth, self.nodes)
        return self.shapes["full", depth]

    def choices_at(self, depth: int, lengths: Sequence[int]) -> int:
        """How many choices combs of these lengths have at a depth, the first among them."""
        ranks = [0]
        for length in set(lengths):
            shape = self.comb(length)
            ranks += [rank for at, rank in zip(shape.depths, shape.ranks, strict=True) if at == depth]
        return 1 + max(ranks)


def comb_of(chances: Sequence[float], length: int, nodes: int) -> Shape:
    """A comb of a chain of `length`, with leaves as far as there are `nodes`, by the chances of ranks."""
    values = []
    for depth in range(length):
        for rank in range(1, len(chances)):
            values.append((-(chances[0] ** depth) * chances[rank], depth, rank))
    leaves = sorted((depth, rank) for _, depth, rank in sorted(values)[: max(0, nodes - length)])
    places = [*((depth, 0) for depth in range(length)), *leaves]
    depths, ranks = zip(*places, strict=True) if places else ((), ())
    return Shape(tuple(depth - 1 for depth in depths), depths, ranks)


def tree_of_ranks(chances: Sequence[float], depth: int, nodes: int) -> Shape:
    """The `nodes` nodes up to a depth that are worth most by the chances of ranks, those of first choice first."""
    taken: list[tuple[int, ...]] = []  # the ranks on the way to each node
    waiting = [(-chances[0], (0,))] if depth else []
    while waiting and len(taken) < nodes:
        value, path = heapq.heappop(waiting)
        taken.append(path)
        rank = path[-1]
        if rank + 1 < len(chances):
            heapq.heappush(waiting, (value / chances[rank] * chances[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < depth:
            heapq.heappush(waiting, (value * chances[0], (*path, 0)))
    order = sorted(taken, key=any)  # stable: the chain first, and the others by what they are worth
    numbers = {path: number for number, path in enumerate(order)} | {(): -1}
    parents = tuple(numbers[path[:-1]] for path in order)
    return Shape(parents, tuple(len(path) - 1 for path in order), tuple(path[-1] for path in order))
