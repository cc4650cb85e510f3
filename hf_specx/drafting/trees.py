"""Which candidates a round has besides those of first choice: the ones that promise most, within a number of nodes.

The target's token at a node is taken to be the draft's choice of rank r with a chance that depends on r alone, and is
estimated from past rounds: 0.74, 0.14, 0.05 for the pair in the package at temperature 1. A candidate is worth the
product of these chances on the way to it: that many tokens more come of a round that has it.

There are two kinds of shapes, `TreeKind`:

- "comb": the chain of first choices, plus choices of lower rank beside it, which nothing follows. A draft that knows
  its distribution needs no extra step for these.
- "full": whatever nodes are worth most. A draft that goes token by token runs a step for each level of it; one whose
  candidates do not depend on each other needs no extra step.
"""

import heapq
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from hf_specx.common.round import Round
from hf_specx.common.tree import Parents


TreeKind = Literal["comb", "full"]
COMPILED_NODES = (7, 15, 31, 63)  # of which torch compiles few forwards
MAX_RANKS = 16  # choices at one place
PRIOR = (0.7, 0.14, 0.05, 0.025)  # chances of ranks before any were seen; those of later ones are halved each time
PRIOR_NODES = 8.0  # nodes that count for the prior, always
MIN_GAIN = 1.05  # a tree is taken if it promises so many times the tokens a second of the chain
ROUNDS_OF_A_SHAPE = 8  # before ranks and times are looked at again
FORGET = 0.98  # factor on the weight of what was seen before, where more is tried


class Shape(NamedTuple):
    """The candidates of a row: the chain of first choices, and then others, each behind its parent.

    Attributes:
        parents: the candidate that each follows, -1 for the last emitted token.
        positions: of each in the round, 0 for those that follow the last emitted token.
        ranks: of each among its siblings.
    """

    parents: Parents
    positions: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def is_chain(self) -> bool:
        """Whether each follows the one before."""
        return not any(self.ranks)


@lru_cache(1024)
def shape_below(shape: Shape, limits: tuple[int, ...]) -> Shape:
    """A shape without ranks from `limits` on, which are by position, and what follows them; the chain stays."""
    remaining: list[tuple[int, int, int]] = []
    new_numbers = {-1: -1}  # of the candidates that stay
    for candidate, (parent, position, rank) in enumerate(zip(*shape, strict=True)):
        if parent in new_numbers and (not rank or rank < limits[position]):
            new_numbers[candidate] = len(remaining)
            remaining.append((new_numbers[parent], position, rank))
    return Shape(*zip(*remaining, strict=True)) if remaining else shape


class RankEstimate:
    """The chance that a target's own choice at a node has a rank among the draft's, by the rounds so far.

    Of ranks from 1 on it is counted only where the first choice was wrong, since chains tell of that as well.

    Attributes:
        hits, tries: by rank, at how many nodes a choice was the target's own, of those where it was tried.
    """

    def __init__(self) -> None:
        self.hits, self.tries = [0.0] * MAX_RANKS, [0.0] * MAX_RANKS

    def observe(self, round_: Round) -> None:
        """Count the nodes on the branches that were taken; of a chain these are those of first choice."""
        hits, tries = [0] * MAX_RANKS, [0] * MAX_RANKS
        for index, (ranks, length) in enumerate(zip(round_.accepted_ranks, round_.draft.lengths, strict=True)):
            path_nodes = [0, *(candidate + 1 for candidate in round_.accepted_candidates[index])]
            for depth, node in enumerate(path_nodes):
                children = int(depth < length) if round_.tree is None else round_.tree.rows[index].node_children[node]
                rank = ranks[depth] if depth < len(ranks) else MAX_RANKS  # that of none of them
                num_tried = min(children, 1 if rank == 0 else MAX_RANKS)
                for tried in range(num_tried):
                    tries[tried] += 1
                if rank < MAX_RANKS:
                    hits[rank] += 1
        for rank in range(MAX_RANKS):
            if tries[rank]:  # what is not tried is not forgotten
                self.hits[rank] = FORGET * self.hits[rank] + hits[rank]
                self.tries[rank] = FORGET * self.tries[rank] + tries[rank]

    @property
    def chances(self) -> tuple[float, ...]:
        """Of ranks 0 to `MAX_RANKS` - 1; none is more than that of the rank before."""
        priors = [*PRIOR, *(PRIOR[-1] / 2**n for n in range(1, 1 + MAX_RANKS - len(PRIOR)))]
        priors[1:] = [prior / (1 - PRIOR[0]) for prior in priors[1:]]  # where the first choice is wrong
        counts = zip(priors, self.hits, self.tries, strict=True)
        first, *others = ((hits + PRIOR_NODES * prior) / (tries + PRIOR_NODES) for prior, hits, tries in counts)
        return tuple(itertools.accumulate([first, *((1 - first) * other for other in others)], min))


class TreeShapes:
    """The shapes of the trees of one call: of a fixed number of nodes, or in each round of the one that pays best.

    A round with n nodes after γ steps of the draft is expected to give 1 + V_1 + ... + V_n tokens of a row, by what
    nodes are worth, best first, in the seconds of its forwards. All rows get the same number, since the largest tree
    decides what a forward costs. A tree is taken where it promises `MIN_GAIN` times what the chain does.

    Args:
        nodes: of a row at most; "auto" chooses.
        round_timer: a `RoundTimer`, for "auto".
        ranks: what earlier calls have seen; this call adds to it.
        numbers: that "auto" chooses from, beside those of chains.
        chooses_depth: whether "auto" may also have rows go less deep than they may.

    Attributes:
        num_nodes: of a row in this round.
    """

    def __init__(
        self,
        nodes: int | str,
        round_timer: Any = None,
        ranks: RankEstimate | None = None,
        numbers: Sequence[int] = range(1, 65),
        chooses_depth: bool = False,
    ):
        self.nodes, self.round_timer, self.numbers = nodes, round_timer, numbers
        self.ranks = RankEstimate() if ranks is None else ranks
        self.chooses_depth = chooses_depth
        self.num_nodes = self.num_rounds = 0
        # until ranks are looked at again: these, so that most rounds have the tree of the one before
        self.chances = self.ranks.chances
        self.sizes: dict[tuple[int, int, TreeKind], tuple[int, int]] = {}
        self.shapes: dict[tuple[TreeKind, int, int], Shape] = {}

    def begin_round(self, lengths: Sequence[int], kind: TreeKind = "comb") -> list[int]:
        """Decide how many nodes rows have in this round, and return how deep each goes: `lengths` [R] at most."""
        depth = max(lengths)
        if not isinstance(self.nodes, str):
            self.num_nodes = self.nodes
        elif depth:
            key = len(lengths), depth, kind
            if key not in self.sizes:
                self.sizes[key] = self._best_size(*key)
            depth, self.num_nodes = self.sizes[key]
        return [min(length, depth, self.num_nodes) for length in lengths]

    def _best_size(self, rows: int, max_depth: int, kind: TreeKind) -> tuple[int, int]:
        """The depth and the number of nodes with the most tokens a second; those of the chain if no tree has more."""
        chances, max_nodes = self.chances, max(self.numbers, default=0)
        best = max_depth, max_depth
        chain_tokens = 1.0 + sum(chain_values(chances, max_depth))
        self.round_timer.considers_trees = True
        best_rate = MIN_GAIN * chain_tokens / self.round_timer.times(rows, max_depth)[max_depth]
        for depth in range(1 if self.chooses_depth else max_depth, max_depth + 1):
            if kind == "comb":
                values = chain_values(chances, depth) + sorted(leaf_values(chances, depth), reverse=True)
            else:
                values = [value for value, path in best_paths(chances, max_depth, max_nodes) if len(path) <= depth]
            tokens = list(itertools.accumulate(values, initial=1.0))  # of a row, by its number of nodes
            seconds = self.round_timer.tree_times(rows, depth, max_nodes)
            for number in self.numbers:
                if depth < number < len(tokens) and tokens[number] / seconds[number] > best_rate:
                    best, best_rate = (depth, number), tokens[number] / seconds[number]
        return best

    def observe(self, round_: Round) -> None:
        """Learn which ranks the target has chosen."""
        self.ranks.observe(round_)
        self.num_rounds += 1
        if self.num_rounds % ROUNDS_OF_A_SHAPE == 0:
            self.chances = self.ranks.chances
            self.sizes.clear()
            self.shapes.clear()

    def shape(self, kind: TreeKind, depth: int) -> Shape:
        """That of a row whose chain of first choices has `depth` candidates; of a full tree, at most so many."""
        if self.num_nodes <= depth:
            kind = "comb"  # the chain, which has no other branches
        key = kind, depth, self.num_nodes
        if key not in self.shapes:
            make = full_shape if kind == "full" else comb_shape
            self.shapes[key] = make(self.chances, depth, self.num_nodes)
        return self.shapes[key]

    def num_choices(self, position: int, depths: Sequence[int], kind: TreeKind = "comb") -> int:
        """How many choices trees that go to these depths have at a position, the first among them."""
        ranks = [0]
        for depth in set(depths):
            shape = self.shape(kind, depth)
            ranks += [rank for at, rank in zip(shape.positions, shape.ranks, strict=True) if at == position]
        return 1 + max(ranks)


def chain_values(chances: Sequence[float], length: int) -> list[float]:
    """What the candidates of a chain are worth by the chances of ranks, in their order."""
    return [chances[0] ** (position + 1) for position in range(length)]


def leaf_values(chances: Sequence[float], length: int) -> list[float]:
    """What the leaves beside a chain of `length` are worth, by position and then by rank."""
    return [chances[0] ** position * chance for position in range(length) for chance in chances[1:]]


def comb_shape(chances: Sequence[float], length: int, nodes: int) -> Shape:
    """A chain of `length` with leaves as far as there are `nodes`, those that are worth most."""
    if not length:
        return Shape((), (), ())
    places = [(position, rank) for position in range(length) for rank in range(1, len(chances))]
    values = leaf_values(chances, length)
    best_first = sorted(range(len(places)), key=values.__getitem__, reverse=True)  # stable
    leaves = sorted(places[number] for number in best_first[: max(0, nodes - length)])
    positions, ranks = zip(*((position, 0) for position in range(length)), *leaves, strict=True)
    return Shape(tuple(position - 1 for position in positions), positions, ranks)


@lru_cache(256)
def best_paths(chances: tuple[float, ...], depth: int, nodes: int) -> list[tuple[float, tuple[int, ...]]]:
    """The `nodes` candidates up to a depth that are worth most, best first: the value of each, and the ranks to it."""
    taken: list[tuple[float, tuple[int, ...]]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-chances[0], (0,))] if depth else []  # a heap
    while waiting and len(taken) < nodes:
        negative_value, path = heapq.heappop(waiting)
        taken.append((-negative_value, path))
        rank = path[-1]
        if rank + 1 < len(chances):  # its next sibling
            ratio = chances[rank + 1] / chances[rank] if chances[rank] else 0.0
            heapq.heappush(waiting, (negative_value * ratio, (*path[:-1], rank + 1)))
        if len(path) < depth:  # its first child
            heapq.heappush(waiting, (negative_value * chances[0], (*path, 0)))
    return taken


def full_shape(chances: tuple[float, ...], depth: int, nodes: int) -> Shape:
    """The `nodes` candidates up to a depth that are worth most, those of first choice first."""
    order = sorted((path for _, path in best_paths(chances, depth, nodes)), key=any)  # stable
    numbers = {path: candidate for candidate, path in enumerate(order)} | {(): -1}
    parents = tuple(numbers[path[:-1]] for path in order)
    return Shape(parents, tuple(len(path) - 1 for path in order), tuple(path[-1] for path in order))
