"""How the candidates of a round branch: their parents, and what follows from these.

Candidates of a row have the numbers 0 to K - 1, in the order of `Draft.tokens`. Nodes are what a token can follow:
node 0 is the last emitted token, and node i + 1 is candidate i, so that node numbers are candidate numbers plus one.
The forward of a round gives logits after each node, in this order, whether candidates are a chain or a tree. Here and
elsewhere numbers are those of candidates unless a name has "node" in it: `node_depths` has one entry for each node,
`parent_nodes` has nodes as its values, and `node_paths` both.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from .devices import to_device_async


Parents = tuple[int, ...]  # of each candidate of a row the candidate that it follows; -1 for the last emitted token
KEPT_BATCHES = 64  # batches of shapes whose tensors are kept, since most rounds have the shapes of the one before
KEPT_ROWS = 4096  # shapes of one row, of which batches are put together


class RowTree(NamedTuple):
    """What follows from the parents of the n candidates of one row.

    Attributes:
        ranks: [n], how many siblings stand before each candidate; 0 is that of a first choice.
        first_choices: the candidates on the chain of first choices, from the last emitted token on.
        node_depths: [n + 1], how many candidates there are on the way to each node, itself among them.
        node_prefixes: [n + 1], the candidates on the way to each node, itself the last.
        node_children: [n + 1], how many candidates follow each node.
    """

    ranks: tuple[int, ...]
    first_choices: tuple[int, ...]
    node_depths: tuple[int, ...]
    node_prefixes: tuple[tuple[int, ...], ...]
    node_children: tuple[int, ...]


@lru_cache(KEPT_ROWS)
def row_tree_of(parents: Parents) -> RowTree:
    """What follows from the parents of a row.

    Raises:
        ValueError: if a candidate stands before its parent.
    """
    ranks, first_choices = list[int](), list[int]()
    node_prefixes: list[tuple[int, ...]] = [()]
    node_children = [0] * (len(parents) + 1)
    for candidate, parent in enumerate(parents):
        if not -1 <= parent < candidate:
            message = (
                f"candidate {candidate} has the parent {parent}; parents stand before their children, and -1 is that "
                "of those that follow the last emitted token."
            )
            raise ValueError(message)
        parent_node = parent + 1
        node_prefixes.append((*node_prefixes[parent_node], candidate))
        ranks.append(node_children[parent_node])
        node_children[parent_node] += 1
        last_first_choice = first_choices[-1] if first_choices else -1
        if parent == last_first_choice and ranks[candidate] == 0:
            first_choices.append(candidate)
    node_depths = tuple(map(len, node_prefixes))
    return RowTree(tuple(ranks), tuple(first_choices), node_depths, tuple(node_prefixes), tuple(node_children))


class RowTables(NamedTuple):
    """What the tensors of a `Tree` hold of one row, fillers and paths behind their ends among it; paths lie flat."""

    node_depths: list[int]
    parent_nodes: list[int]
    first_choice_nodes: list[int]
    node_paths: list[int]


@lru_cache(KEPT_ROWS)
def flat_row_tables(parents: Parents, max_length: int, depth: int) -> tuple[list[int], list[int]]:
    """The `RowTables` of a row one after another in one list, and the lengths of each.

    Of the rows of its batch `max_length` is the most candidates, and `depth` that of the longest branch.
    """
    row, num_fillers = row_tree_of(parents), max_length - len(parents)
    first_choice_nodes = [0, *(candidate + 1 for candidate in row.first_choices)]
    node_paths = []
    for node, prefix in enumerate(row.node_prefixes):
        path = [0, *(candidate + 1 for candidate in prefix)]
        node_paths += path + [node] * (depth + 1 - len(path))
    for filler in range(len(parents) + 1, max_length + 1):  # a child of node 0, which nothing follows
        node_paths += [0] + [filler] * depth
    tables = RowTables(
        node_depths=[*row.node_depths, *[1] * num_fillers],
        parent_nodes=[parent + 1 for parent in parents] + [0] * num_fillers,
        first_choice_nodes=first_choice_nodes + [0] * (depth + 1 - len(first_choice_nodes)),
        node_paths=node_paths,
    )
    return [*itertools.chain(*tables)], list(map(len, tables))


class Tree:
    """The candidates of R rows, K in the row that has most; rows with fewer have fillers, which nobody sees.

    Attributes:
        rows: [R], the `RowTree` of each row.
        depth: D, candidates of the longest branch.
        node_depths: [R, K + 1] int64, as in `RowTree`.
        parent_nodes: [R, K] int64, the node that each candidate follows.
        node_paths: [R, K + 1, D + 1] int64, the nodes on the way to each node by their depth; behind it, itself.
        node_mask: [R, K + 1, K + 1] bool, whether a node sees another one: itself, and those on the way to it.
        first_choice_nodes: [R, D + 1] int64, node 0 and those on the chain of first choices; behind its end, node 0.
    """

    def __init__(self, parents: Sequence[Parents], max_length: int, device: torch.device):
        """From the `parents` [R] of each row, of which none has more than `max_length` candidates: K."""
        self.parents_of_rows, self.max_length, self.device = tuple(parents), max_length, device
        self.rows = [row_tree_of(of_row) for of_row in parents]
        self.depth = max(max(row.node_depths) for row in self.rows)
        tables_of_rows = [flat_row_tables(of_row, max_length, self.depth) for of_row in parents]
        sizes = tables_of_rows[0][1]  # those of all rows
        views = to_device_async([numbers for numbers, _ in tables_of_rows], device).split(sizes, 1)
        # views would have strides that depend on the depth, for each of which torch would compile forwards again
        parts = [view.clone(memory_format=torch.contiguous_format) for view in views]
        tables = dict(zip(RowTables._fields, parts, strict=True))
        self.node_depths, self.parent_nodes = tables["node_depths"], tables["parent_nodes"]
        self.first_choice_nodes = tables["first_choice_nodes"]
        self.node_paths = tables["node_paths"].view(-1, max_length + 1, self.depth + 1)
        self.node_mask = (self.node_paths[..., None] == torch.arange(max_length + 1, device=device)).any(2)

    def row(self, index: int) -> "Tree":
        """That of one row alone."""
        return tree_of((self.parents_of_rows[index],), self.max_length, self.device)


@lru_cache(KEPT_BATCHES)
def tree_of(parents: tuple[Parents, ...], max_length: int, device: torch.device) -> Tree:
    """The `Tree` of rows with these parents, at most `max_length` candidates each."""
    return Tree(parents, max_length, device)


def at_nodes(values: torch.Tensor, nodes: torch.Tensor | None) -> torch.Tensor:
    """Of values [R, K + 1, ...] those at nodes [R, n]: [R, n, ...]; all of them for None, as in a chain."""
    if nodes is None:
        return values
    rows = torch.arange(len(nodes), device=values.device)[:, None]
    return values[rows, nodes.to(values.device)]
