"""Trees of heads that go token by token: the children of all candidates at one position in one step."""

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
from hf_specx.drafting.trees import MAX_RANKS, Shape, shape_below


class Level(NamedTuple):
    """One step of the draft: some candidates of the level before are fed, and their children are this level.

    The first level has the children of the last emitted token. Only candidates that have children are fed. Over all
    levels the fed ones are numbered from 0 on; candidate number i of these has slot i behind the text.

    Attributes:
        first_slot: behind the text, of the first that is fed; -1 in the first level.
        fed: [n] int64, which candidates of the level before are fed.
        fed_parents: [n] int64, the parent of each, as its place among those that were fed in the level before.
        tree: of all that are fed up to this level; None in the first.
        num_ranks: k, how many choices are looked at behind each.
        chosen: [c] int64, the level's candidates among these choices [n * k]: the place of the parent times k, plus
            the rank.
    """

    first_slot: int
    fed: torch.Tensor
    fed_parents: torch.Tensor
    tree: Tree | None
    num_ranks: int
    chosen: torch.Tensor


@lru_cache(256)
def levels_of(shape: Shape, rows: int, device: torch.device) -> tuple[list[Level], tuple[int, ...]]:
    """The levels of a shape, the same for all rows, and where each of its candidates stands in the order of levels."""
    levels, order = list[Level](), list[int]()
    slots = {-1: -1}  # behind the text, of candidates that are fed, and of the last emitted token
    parent_slots = list[int]()  # of those that are fed, by their own slots
    previous, previous_fed = [-1], [-1]  # candidates of the level before, and those that it was fed
    for position in range(1 + max(shape.positions)):
        candidates = [candidate for candidate, at in enumerate(shape.positions) if at == position]
        fed = sorted({shape.parents[candidate] for candidate in candidates})  # the first choice is the first
        first_slot = len(parent_slots) if position else -1
        if position:
            fed_parents = [previous_fed.index(shape.parents[candidate]) for candidate in fed]
            for candidate in fed:
                slots[candidate] = len(parent_slots)
                parent_slots.append(slots[shape.parents[candidate]])
        else:
            fed_parents = [0]
        num_ranks = 1 + max(shape.ranks[candidate] for candidate in candidates)
        chosen = [fed.index(shape.parents[each]) * num_ranks + shape.ranks[each] for each in candidates]
        index = ([previous.index(candidate) for candidate in fed], fed_parents, chosen)
        fed_index, fed_parents_index, chosen_index = (to_device_async(numbers, device) for numbers in index)
        tree = tree_of((tuple(parent_slots),) * rows, len(parent_slots), device) if position else None
        levels.append(Level(first_slot, fed_index, fed_parents_index, tree, num_ranks, chosen_index))
        order += candidates
        previous, previous_fed = candidates, fed
    places = {candidate: place for place, candidate in enumerate(order)}
    return levels, tuple(places[candidate] for candidate in range(len(order)))


class TreeDrafter(SampledCandidateGenerator):
    """Drafts full trees level by level, each candidate by all that stands before it.

    All rows have the tree of the deepest row, cut to their own depth. A comb is drafted instead if masks apply, if a
    confidence threshold ends rows, or with compiled forwards, of which there would be many.
    """

    grows_trees = False  # whether `level_logits` is there for this draft

    def level_logits(self, batch: Batch, tokens: torch.Tensor, level: Level) -> torch.Tensor:
        """Logits [R, n, V] behind fed tokens [R, n]; those of the first level are the last emitted ones."""
        raise NotImplementedError

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        if self.tree_shapes is None or not self.grows_trees or self.processors.mask_size or self.threshold:
            return super().propose(batch, lengths)
        depths = self.tree_shapes.begin_round(lengths, "full")
        max_ranks = self.vocab_size or MAX_RANKS
        shape = shape_below(self.tree_shapes.shape("full", max(depths)), (max_ranks,) * max(depths))
        if shape.is_chain:
            return super().propose(batch, lengths)
        levels, order = levels_of(shape, len(lengths), batch.ids.device)
        tokens = batch.last(1)  # [R, c] of the level before
        tokens_of_levels, probs = list[torch.Tensor](), list[torch.Tensor]()
        for position, level in enumerate(levels):
            fed_tokens = tokens[:, level.fed]
            if level.tree is not None:  # the processors see what stands before each of them
                batch.write(fed_tokens, level.first_slot)
                batch.tree = level.tree
            scores = self._level_scores(batch, fed_tokens, level)
            ranked, drawn_from = self.verifier.top_candidates(batch, scores, position, level.num_ranks)
            tokens = ranked.flatten(1)[:, level.chosen]
            tokens_of_levels.append(tokens)
            if drawn_from is not None:
                probs.append(drawn_from[:, :1])  # behind the first choice
        q = torch.cat(probs, 1) if probs else None
        return self._cut_to_depths(shape, torch.cat(tokens_of_levels, 1), order, depths, q)

    def _level_scores(self, batch: Batch, fed_tokens: torch.Tensor, level: Level) -> torch.Tensor:
        """Processed scores [R, n, V] behind fed tokens [R, n]."""
        logits = self.level_logits(batch, fed_tokens, level)
        num_missing = 0 if self.vocab_size is None else self.vocab_size - logits.shape[-1]
        if num_missing:  # cut, if that is negative
            logits = nn.functional.pad(logits, (0, num_missing), value=-torch.inf)
        return self.processors(batch, None, logits, 1 + level.first_slot)

    def _cut_to_depths(
        self,
        shape: Shape,
        tokens: torch.Tensor,
        order: Sequence[int],
        depths: list[int],
        q: torch.Tensor | None,
    ) -> Draft:
        """The draft of rows with these depths [R], by tokens [R, N] in the order of levels."""
        rows = {depth: _cut_to_depth(shape, depth) for depth in set(depths)}
        most = max(len(candidates) for candidates, _ in rows.values())
        index, lengths, parents = [], [], []
        for depth in depths:
            candidates, parents_of_row = rows[depth]
            index.append([*(order[candidate] for candidate in candidates), *[0] * (most - len(candidates))])
            lengths.append(len(candidates))
            parents.append(parents_of_row)
        tokens = tokens.gather(1, to_device_async(index, tokens.device))
        return Draft(tokens, lengths, q, self.source, parents=parents)


@lru_cache(256)
def _cut_to_depth(shape: Shape, depth: int) -> tuple[list[int], tuple[int, ...]]:
    """The candidates of a shape up to a depth, and their parents as numbers among them."""
    candidates = [candidate for candidate, position in enumerate(shape.positions) if position < depth]
    numbers = {candidate: number for number, candidate in enumerate(candidates)} | {-1: -1}
    return candidates, tuple(numbers[shape.parents[candidate]] for candidate in candidates)
