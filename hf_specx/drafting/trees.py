"""Which candidates a round has besides those of first choice: the ones that promise most, within a number of nodes.

The target's token at a node is taken to be the draft's r-th choice with a probability that depends on r alone and is
estimated from past rounds: 0.74, 0.14, 0.05 for the pair in the package at temperature 1. A node is worth the product
of these probabilities on the way to it: that many tokens more come of a round that has it.

- A comb is the chain of first choices with next best ones beside it, which nothing follows. These cost a draft that
  knows its distribution no step more.
- A full tree has whatever nodes are worth most; a draft that goes token by token runs a step for each level of it.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from hf_specx.common.round import Round
from hf_specx.common.tree import Parents


COMPILED_NODES = (7, 15, 31, 63)  # of which torch compiles few forwards
MOST_RANKS = 16  # choices at one place
PRIOR = (0.7, 0.14, 0.05, 0.025)  # chances of ranks before any were seen; those of later ones are halved each time
WEIGHT = 20.0  # nodes that this is worth
MARGIN = 1.02  # a tree is taken if it promises so many times the chain's tokens a second
ROUNDS_OF_A_SHAPE = 8  # after which ranks and times are looked at again
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

    @property
    def is_chain(self) -> bool:
        """Whether each follows the one before."""
        return not any(self.ranks)

    def with_ranks_below(self, numbers: Sequence[int]) -> "Shape":
        """Without nodes of ranks from `numbers` on, which are by depth, and what follows them; the chain stays."""
        kept: list[tuple[int, int, int]] = []
        places = {-1: -1}  # of the nodes that stay
        for number, (parent, depth, rank) in enumerate(zip(*self, strict=True)):
            if parent in places and (not rank or rank < numbers[depth]):
                places[number] = len(kept)
                kept.append((places[parent], depth, rank))
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
    """The shapes of the trees of one call: of a fixed number of nodes, or in each round of the one that pays best.

    A round with n nodes after γ steps of the draft is expected to give 1 + V_1 + ... + V_n tokens of a row, by what
    nodes are worth, best first, in the seconds of its forwards. All rows get the same number, since the largest tree
    decides what a forward costs. A tree is taken where it promises `MARGIN` more than the chain.

    Args:
        nodes: of a row at most; "auto" chooses.
        round_timer: a `RoundTimer`, for "auto".
        ranks: what earlier calls have seen; this call adds to it.
        numbers: that "auto" chooses from, beside those of chains.
        chooses_depth: whether "auto" may also have rows go less deep than they may.

    Attributes:
        num_nodes: of this round.
    """

    def __init__(
        self,
        nodes: int | str,
        round_timer: Any = None,
        ranks: Ranks | None = None,
        numbers: Sequence[int] = range(1, 65),
        chooses_depth: bool = False,
    ):
        self.nodes, self.round_timer, self.numbers = nodes, round_timer, numbers
        self.ranks = Ranks() if ranks is None else ranks
        self.chooses_depth = chooses_depth
        self.num_nodes = self.num_rounds = 0
        # until ranks are looked at again: these, so that most rounds have the tree of the one before
        self.chances = self.ranks.chances
        self.plans: dict[tuple[int, int, str], tuple[int, int]] = {}
        self.shapes: dict[tuple[str, int, int], Shape] = {}

    def plan(self, rows: int, lengths: Sequence[int], kind: str = "comb") -> list[int]:
        """Decide how many nodes rows have in this round; returns how deep each row goes, `lengths` [R] at most.

        `kind` is "comb" or "full".
        """
        depth = max(lengths)
        if not isinstance(self.nodes, str):
            self.num_nodes = self.nodes
        elif depth:
            key = rows, depth, kind
            if key not in self.plans:
                self.plans[key] = self._best(rows, depth, kind)
            depth, self.num_nodes = self.plans[key]
        return [min(length, depth, self.num_nodes) for length in lengths]

    def _best(self, rows: int, most_depth: int, kind: str) -> tuple[int, int]:
        """The depth and the number of nodes with the most tokens a second; those of the chain if no tree has more."""
        chances, most_nodes = self.chances, max(self.numbers, default=0)
        chain = [chances[0] ** (place + 1) for place in range(most_depth)]
        best = most_depth, most_depth
        best_rate = MARGIN * (1.0 + sum(chain)) / self.round_timer.times(rows, most_depth)[most_depth]
        for depth in range(1 if self.chooses_depth else most_depth, most_depth + 1):
            if kind == "comb":
                values = chain[:depth] + sorted(leaves_of_ranks(chances, depth), reverse=True)
            else:
                values = sorted(values_of_ranks(chances, depth, most_nodes), reverse=True)
            tokens = list(itertools.accumulate(values, initial=1.0))  # of a row, by its number of nodes
            seconds = self.round_timer.tree_times(rows, depth, most_nodes)
            for number in self.numbers:
                if depth < number < len(tokens) and tokens[number] / seconds[number] > best_rate:
                    best, best_rate = (depth, number), tokens[number] / seconds[number]
        return best

    def observe(self, done: Round) -> None:
        """Learn which ranks the target has chosen."""
        self.ranks.observe(done)
        self.num_rounds += 1
        if self.num_rounds % ROUNDS_OF_A_SHAPE == 0:
            self.chances = self.ranks.chances
            self.plans.clear()
            self.shapes.clear()

    def comb(self, length: int) -> Shape:
        """The chain of `length` first choices, with next best ones beside it."""
        key = "comb", length, self.num_nodes
        if key not in self.shapes:
            self.shapes[key] = comb_of_ranks(self.chances, length, self.num_nodes)
        return self.shapes[key]

    def full(self, depth: int) -> Shape:
        """The nodes up to a depth that are worth most."""
        key = "full", depth, self.num_nodes
        if key not in self.shapes:
            self.shapes[key] = tree_of_ranks(self.chances, depth, self.num_nodes)
        return self.shapes[key]

    def shape(self, kind: str, length: int) -> Shape:
        """That of a row whose chain of first choices may have so many; `kind` as in `plan`."""
        return self.full(length) if kind == "full" and self.num_nodes > length else self.comb(length)

    def choices_at(self, depth: int, lengths: Sequence[int], kind: str = "comb") -> int:
        """How many choices trees of these lengths have at a depth, the first among them."""
        ranks = [0]
        for length in set(lengths):
            shape = self.shape(kind, length)
            ranks += [rank for at, rank in zip(shape.depths, shape.ranks, strict=True) if at == depth]
        return 1 + max(ranks)


def leaves_of_ranks(chances: Sequence[float], length: int) -> list[float]:
    """What the leaves beside a chain of `length` are worth by the chances of ranks, in any order."""
    return [chances[0] ** depth * chance for depth in range(length) for chance in chances[1:]]


def values_of_ranks(chances: Sequence[float], depth: int, nodes: int) -> list[float]:
    """What the nodes of `tree_of_ranks` are worth, in any order."""
    values: dict[int, float] = {-1: 1.0}
    shape = tree_of_ranks(chances, depth, nodes)
    for number, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        values[number] = values[parent] * chances[rank]
    return list(values.values())[1:]


def comb_of_ranks(chances: Sequence[float], length: int, nodes: int) -> Shape:
    """A chain of `length` with leaves as far as there are `nodes`, those that are worth most."""
    places = [(depth, rank) for depth in range(length) for rank in range(1, len(chances))]
    values = leaves_of_ranks(chances, length)
    order = sorted(range(len(places)), key=values.__getitem__, reverse=True)  # stable
    leaves = sorted(places[number] for number in order[: max(0, nodes - length)])
    depths, ranks = zip(*((depth, 0) for depth in range(length)), *leaves, strict=True) if length else ((), ())
    return Shape(tuple(depth - 1 for depth in depths), depths, ranks)


def tree_of_ranks(chances: Sequence[float], depth: int, nodes: int) -> Shape:
    """The `nodes` nodes up to a depth that are worth most by the chances of ranks, those of first choice first."""
    taken: list[tuple[int, ...]] = []  # the ranks on the way to each node
    waiting: list[tuple[float, tuple[int, ...]]] = [(-chances[0], (0,))] if depth else []
    while waiting and len(taken) < nodes:
        value, path = heapq.heappop(waiting)
        taken.append(path)
        rank = path[-1]
        if rank + 1 < len(chances):
            ratio = chances[rank + 1] / chances[rank] if chances[rank] else 0.0
            heapq.heappush(waiting, (value * ratio, (*path[:-1], rank + 1)))
        if len(path) < depth:
            heapq.heappush(waiting, (value * chances[0], (*path, 0)))
    order = sorted(taken, key=any)  # stable: the chain first, and the others by what they are worth
    numbers = {path: number for number, path in enumerate(order)} | {(): -1}
    parents = tuple(numbers[path[:-1]] for path in order)
    return Shape(parents, tuple(len(path) - 1 for path in order), tuple(path[-1] for path in order))
