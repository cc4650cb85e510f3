"""How the candidates of a round branch: their parents, and what follows from these.

Node 0 of a row is its last emitted token, and node i + 1 its candidate i: so a forward of a round gives logits after
each node, in this order, whether candidates are a chain or a tree.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from .devices import to_device_async


Parents = tuple[int, ...]  # of each candidate of a row the candidate that it follows; -1 for the last emitted token
KEPT_TREES = 256  # shapes whose tensors are kept, since most rounds have the shape of the one before


class Branches(NamedTuple):
    """What follows from the parents of the candidates of one row.

    Attributes:
        depths: [n + 1], of each node: how many candidates there are on the way to it, itself among them.
        paths: [n + 1], the candidates on the way to each node, itself the last.
        ranks: [n], how many siblings stand before each candidate.
        children: [n + 1], how many candidates follow each node.
        first: the branch of first children.
    """

    depths: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    children: tuple[int, ...]
    first: tuple[int, ...]


@lru_cache(4096)
def branches_of(parents: Parents) -> Branches:
    """What follows from the parents of a row.

    Raises:
        ValueError: if a candidate stands before its parent.
    """
    depths, ranks, children = [0], list[int](), [0] * (len(parents) + 1)
    paths: list[tuple[int, ...]] = [()]
    first: list[int] = []
    for number, parent in enumerate(parents):
        if not -1 <= parent < number:
            message = f"candidate {number} has the parent {parent}; parents stand before their children, and -1 is "
            raise ValueError(message + "that of those that follow the last emitted token.")
        depths.append(depths[parent + 1] + 1)
        paths.append((*paths[parent + 1], number))
        ranks.append(children[parent + 1])
        children[parent + 1] += 1
        if not ranks[-1] and parent == (first[-1] if first else -1):
            first.append(number)
    return Branches(tuple(depths), tuple(paths), tuple(ranks), tuple(children), tuple(first))


class Tree:
    """The candidates of R rows, K in the row that has most; rows with fewer have fillers, which nobody sees.

    Attributes:
        rows: [R], the `Branches` of each row.
        depth: D, candidates of the longest branch.
        depths: [R, K + 1] int64, of each node.
        parents: [R, K] int64, the node that each candidate follows.
        paths: [R, K + 1, D + 1] int64, the nodes on the way to each node by their depth; behind it, itself.
        sees: [R, K + 1, K + 1] bool, whether a node is another one, or follows it.
        first: [R, D + 1] int64, the nodes on the branch of first children; behind its end, node 0.
    """

    def __init__(self, parents: Sequence[Parents], most: int, device: torch.device):
        self.parents_of_rows, self.most, self.device = tuple(parents), most, device
        self.rows = [branches_of(of_row) for of_row in parents]
        self.depth = max(max(row.depths) for row in self.rows)
        nodes, columns = most + 1, self.depth + 1
        numbers, first = [], []
        for of_row, row in zip(parents, self.rows, strict=True):
            for node in range(nodes):
                is_filler = node >= len(row.paths)
                path = [0, node] if is_filler else [0, *(number + 1 for number in row.paths[node])]
                parent = -1 if node == 0 or is_filler else of_row[node - 1]
                numbers.append([len(path) - 1, parent + 1, *path[:columns], *[node] * (columns - len(path))])
            first.append([0, *(number + 1 for number in row.first), *[0] * (self.depth - len(row.first))])
        table = to_device_async(numbers, device).view(len(self.rows), nodes, 2 + columns)
        self.depths, self.parents, self.paths = table[..., 0], table[:, 1:, 1], table[..., 2:]
        self.sees = (self.paths[..., None] == torch.arange(nodes, device=device)).any(2)
        self.first = to_device_async(first, device)

    def row(self, index: int) -> "Tree":
        """That of one row alone."""
        return tree_of((self.parents_of_rows[index],), self.most, self.device)


@lru_cache(KEPT_TREES)
def tree_of(parents: tuple[Parents, ...], most: int, device: torch.device) -> Tree:
    """The `Tree` of rows with these parents, `most` candidates in one that has most."""
    return Tree(parents, most, device)


def at_nodes(values: torch.Tensor, nodes: torch.Tensor | None) -> torch.Tensor:
    """Of values [R, K + 1, ...] those at nodes [R, n]: [R, n, ...]; all of them for None, as in a chain."""
    if nodes is None:
        return values
    rows = torch.arange(len(nodes), device=values.device)[:, None]
    return values[rows, nodes.to(values.device)]
