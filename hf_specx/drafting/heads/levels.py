"""Trees of heads that go token by token: the children of all candidates at one depth in one step."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from hf_specx.common.batch import Batch
from hf_specx.common.devices import to_device_async
from hf_specx.common.round import Draft
from hf_specx.common.tree import Tree, tree_of
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.drafting.trees import MOST_RANKS, Shape


class Level(NamedTuple):
    """One step of the draft, which gives the candidates of one depth: the children of those that are fed.

    The fed ones are numbered through all levels; these numbers are their slots behind the text.

    Attributes:
        first: the number of the first that is fed; -1 for the level of the last emitted token.
        fed: [n] int64, which candidates of the level before are fed.
        parents: [n] int64, for each the index of its parent among those that were fed in the level before.
        tree: of all that are fed up to this level; None in the first.
        choices: [c] int64, for each candidate of the level its index into the flattened top k of the fed ones [n * k]:
            that of its parent, times k, plus its rank.
        num_ranks: k.
    """

    first: int
    fed: torch.Tensor
    parents: torch.Tensor
    tree: Tree | None
    choices: torch.Tensor
    num_ranks: int


@lru_cache(256)
def levels_of(shape: Shape, rows: int, device: torch.device) -> tuple[list[Level], tuple[int, ...]]:
    """The levels of a shape, the same for all rows, and the number of each of its nodes in the order of levels."""
    levels, order = list[Level](), list[int]()
    fed_before, nodes_before = [-1], [-1]
    numbers, parents_of_fed = {-1: -1}, list[int]()
    for depth in range(1 + max(shape.depths)):
        nodes = [node for node, at in enumerate(shape.depths) if at == depth]
        fed = sorted({shape.parents[node] for node in nodes})  # that of first choice is the first
        first = len(parents_of_fed) if depth else -1
        for node in fed if depth else []:
            numbers[node] = len(parents_of_fed)
            parents_of_fed.append(numbers[shape.parents[node]])
        follows = [fed_before.index(shape.parents[node]) for node in fed] if depth else [0]
        num_ranks = 1 + max(shape.ranks[node] for node in nodes)
        choices = [fed.index(shape.parents[node]) * num_ranks + shape.ranks[node] for node in nodes]
        of_fed = [nodes_before.index(node) for node in fed]
        of_fed_tensor, follows_tensor, choices_tensor = (
            to_device_async(x, device) for x in (of_fed, follows, choices)
        )
        tree = tree_of((tuple(parents_of_fed),) * rows, len(parents_of_fed), device) if depth else None
        levels.append(Level(first, of_fed_tensor, follows_tensor, tree, choices_tensor, num_ranks))
        order += nodes
        fed_before, nodes_before = fed, nodes
    places = {node: place for place, node in enumerate(order)}
    return levels, tuple(places[node] for node in range(len(order)))


class LevelDrafter(SampledCandidateGenerator):
    """Drafts whole trees, where candidates may branch: each child by what stands before it.

    All rows have the tree of the deepest row, cut to their own depth. A comb is drafted instead if masks apply, if a
    confidence threshold ends rows, or with compiled forwards, of which there would be many.
    """

    drafts_levels = False  # whether `level_logits` is there for this draft

    def level_logits(self, batch: Batch, tokens: torch.Tensor, level: Level) -> torch.Tensor:
        """Logits [R, n, V] behind fed tokens [R, n]; those of the first level are the last emitted ones."""
        raise NotImplementedError

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        if self.trees is None or not self.drafts_levels or self.processors.mask_size or self.threshold:
            return super().propose(batch, lengths)
        depths = self.trees.plan(len(lengths), lengths, "full")
        most_ranks = self.vocab_size or MOST_RANKS
        shape = self.trees.shape("full", max(depths)).with_ranks_below([most_ranks] * max(depths))
        if shape.is_chain:
            return super().propose(batch, lengths)
        levels, order = levels_of(shape, len(lengths), batch.ids.device)
        tokens, probs = list[torch.Tensor](), list[torch.Tensor]()
        for depth, level in enumerate(levels):
            fed = tokens[-1][:, level.fed] if depth else batch.last(1)
            if level.tree is not None:
                batch.write(fed, level.first)
                batch.tree = level.tree
            logits = self.level_logits(batch, fed, level)
            num_missing = 0 if self.vocab_size is None else self.vocab_size - logits.shape[-1]
            if num_missing:  # cut, if that is negative
                logits = nn.functional.pad(logits, (0, num_missing), value=-torch.inf)
            scores = self.processors(batch, None, logits, 1 + level.first)
            ranked, drawn_from = self.verifier.rank(batch, scores, depth, level.num_ranks)
            tokens.append(ranked.flatten(1)[:, level.choices])
            if drawn_from is not None:
                probs.append(drawn_from[:, :1])
        return self._cut_to_depths(shape, torch.cat(tokens, 1), order, depths, probs)

    def _cut_to_depths(
        self,
        shape: Shape,
        tokens: torch.Tensor,
        order: Sequence[int],
        depths: list[int],
        probs: list[torch.Tensor],
    ) -> Draft:
        """The draft of rows with these depths [R], by tokens [R, N] in the order of levels."""
        by_depth = {depth: [node for node, at in enumerate(shape.depths) if at < depth] for depth in set(depths)}
        kept, parents = [by_depth[depth] for depth in depths], []
        for nodes in kept:
            numbers = {node: number for number, node in enumerate(nodes)} | {-1: -1}
            parents.append(tuple(numbers[shape.parents[node]] for node in nodes))
        lengths = list(map(len, kept))
        most = max(lengths)
        index = [[*(order[node] for node in nodes), *[0] * (most - len(nodes))] for nodes in kept]
        tokens = tokens.gather(1, to_device_async(index, tokens.device))
        q = torch.cat(probs, 1) if probs else None
        return Draft(tokens, lengths, q, self.source, parents=parents)
