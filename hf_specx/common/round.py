"""The data of one round: the draft, the verdict on it, and the record of the round that listeners are given."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import eq
from typing import Any, NamedTuple, Protocol

import torch

from .devices import to_device_async
from .tree import Parents, Tree, row_tree_of


class Draft(NamedTuple):
    """Candidates of the R decoding rows, each row with its own number of them: a chain, or a tree.

    Arrays of K are indexed by candidate, in the order of `tokens`. Arrays of D are indexed by depth on the chain of
    first choices, wherever these stand among the candidates; without `parents` the two are the same.

    Attributes:
        tokens: [R, K] int64. From a row's length on they are fillers: nothing is proposed there.
        lengths: [R], the number of candidates of each row, 0 to K.
        probs: [R, D, V], the distribution q that each first choice was drawn from; None if they were not drawn from
            one. Nobody asks for that of other candidates.
        source: who proposed them; a list [R] where rows have different sources.
        forced: [R, D], which first choices are the only token that the processors allow there; None if that is not
            known.
        prefix_acceptance: for each row the probability that its first i candidates are all accepted, i = 1 to its
            length, as the drafter expects it; None if it expects nothing.
        model_free: [R] bool, rows whose candidates are from a part of the draft without a model, such as n-grams;
            None if all rows are of one kind, as they are unless the draft has several parts.
        host_tokens: the first columns of `tokens` as lists, [up to K][R], if they were read back from the device.
        parents: of each row as many numbers as it has candidates: the candidate that each follows, -1 for the last
            emitted token. Parents stand before their children, and a better choice before its siblings. None if each
            candidate follows the one before.
    """

    tokens: torch.Tensor
    lengths: list[int]
    probs: torch.Tensor | None = None
    source: str | list[str] = "none"
    forced: list[list[bool]] | None = None
    prefix_acceptance: list[list[float]] | None = None
    model_free: list[bool] | None = None
    host_tokens: Sequence[list[int]] = ()
    parents: Sequence[Parents] | None = None

    def first_choices(self) -> "Draft":
        """The chain of first choices, which is the draft itself if that is no tree."""
        if self.parents is None:
            return self
        chains = [row_tree_of(tuple(of_row)).first_choices for of_row in self.parents]
        lengths = list(map(len, chains))
        longest = max(lengths, default=0)
        tokens = self.tokens[:, :longest]
        if any(chain != tuple(range(len(chain))) for chain in chains):
            index = [[*chain, *[0] * (longest - len(chain))] for chain in chains]
            tokens = self.tokens.gather(1, to_device_async(index, tokens.device))
            host_tokens: Sequence[list[int]] = ()  # of other candidates
        else:
            host_tokens = self.host_tokens[: min(lengths, default=0)]
        return self._replace(
            tokens=tokens, lengths=lengths, prefix_acceptance=None, host_tokens=host_tokens, parents=None
        )

    def cut(self, max_nodes: int) -> "Draft":
        """The first `max_nodes` candidates of each row, forced ones aside; these are a tree, as parents come first."""
        forced = self.forced or [[]] * len(self.lengths)
        lengths = [min(length, max_nodes + sum(flags)) for length, flags in zip(self.lengths, forced, strict=True)]
        if lengths == self.lengths:
            return self
        acceptance, parents = self.prefix_acceptance, self.parents
        if acceptance is not None:
            acceptance = [of_row[:length] for of_row, length in zip(acceptance, lengths, strict=True)]
        if parents is not None:
            parents = [of_row[:length] for of_row, length in zip(parents, lengths, strict=True)]
        longest = max(lengths)
        return self._replace(
            tokens=self.tokens[:, :longest],
            lengths=lengths,
            prefix_acceptance=acceptance,
            host_tokens=self.host_tokens[:longest],
            parents=parents,
        )

    @property
    def sources(self) -> list[str]:
        """[R], the source of each row."""
        return [self.source] * len(self.lengths) if isinstance(self.source, str) else self.source

    @property
    def model_lengths(self) -> list[int]:
        """[R], the number of candidates of each row, 0 in those that are `model_free`."""
        if self.model_free is None:
            return self.lengths
        return [0 if is_free else length for is_free, length in zip(self.model_free, self.lengths, strict=True)]

    @property
    def steps(self) -> int:
        """How many steps of the draft the candidates took: positions where some row has one that is not forced.

        Rows that are `model_free` take none. Where `model_free` is None, steps are counted for any draft.
        """
        if self.forced is None:
            return max(self.model_lengths, default=0)
        of_candidates = [flags[:length] for flags, length in zip(self.forced, self.model_lengths, strict=True)]
        return sum(not all(flags) for flags in zip_longest(*of_candidates, fillvalue=True))

    @property
    def is_candidate(self) -> torch.Tensor | None:
        """[R, K] bool, which tokens are candidates; None where all are."""
        rows, max_length = self.tokens.shape
        if sum(self.lengths) == rows * max_length:
            return None
        device = self.tokens.device
        return torch.arange(max_length, device=device) < to_device_async(self.lengths, device)[:, None]


class Verdict(NamedTuple):
    """What a verifier says of a draft, for each of the R rows.

    Attributes:
        accepted: [R] int64, leading candidates that are kept, 0 to the row's length.
        next_token: [R] int64, the recovered token, or the bonus token where all candidates are kept.
        prefix_acceptance: [R, K], for i = 1 to K the probability that at least i candidates are accepted, given them
            all. It is known at all K positions, also after a rejection, so its mean over rounds estimates
            P(accepted >= i) without bias. float64; int64, 0 or 1, from `verify_match`.
        overlap: [R, K], sum_x min(p, q) at each candidate; under greedy 1 for a match.
        undefined: [R, K + 1] bool, positions without a distribution, where `generate` raises if a row gets there.
        path_nodes: [R, D + 1] int64, the nodes on the branch that was taken in a tree of depth D, node 0 first; what
            lies behind the accepted ones is not read. None for a chain. `undefined` is [R, D + 1] then, of this
            branch; `prefix_acceptance` and `overlap` [R, D] are of the chain of first choices, behind whose end they
            are not read.
    """

    accepted: torch.Tensor
    next_token: torch.Tensor
    prefix_acceptance: torch.Tensor
    overlap: Any = None
    undefined: Any = None
    path_nodes: torch.Tensor | None = None


class RoundRecord(NamedTuple):
    """The counts of one row in one round.

    Attributes:
        drafted: candidates of the row; of a tree, those of first choice.
        accepted, emitted: as in `Round`.
        forced: positions of candidates that were the only token allowed.
        nodes: all candidates of the row, those on branches among them.
        ranks: those of the accepted candidates among their siblings; 0 is the draft's first choice.
        is_bonus: whether no candidate followed the accepted ones.
    """

    drafted: int
    accepted: int
    emitted: int
    forced: tuple[int, ...] = ()
    nodes: int = 0
    ranks: tuple[int, ...] = ()
    is_bonus: bool = False


@dataclass
class Round:
    """What a round did; every listener gets it once the text has grown. Lists have an entry for each of the R rows.

    Of a tree, `draft` is the chain of first choices, and `forward` and `scores` are those on the branch that was
    taken, so that whoever reads a round need not know of trees.

    Attributes:
        batch: the text after the round.
        rows: the numbers of the rows that took part.
        draft: their candidates.
        emitted_before: how many tokens each row had emitted before the round.
        emitted: how many tokens it has emitted in the round: `num_new_tokens`, or fewer if it was cut at a stop.
        tokens: the ids of these.
        accepted: how many candidates were accepted, whether or not a stop cut them off.
        num_new_tokens: accepted candidates and the token after them; in lockstep, of the row that has fewest.
        prefix_acceptance, overlap: of `Verdict`, for the candidates of each row.
        undefined: the first position of each row without a distribution; K + 1 if there is none.
        ended: the numbers of rows that have ended.
        forward: the target's, with the model's own logits; None in a record made without it.
        scores: [R, P, V], the same after all processors.
        keep_indices: [R'] int64, the row indices of those that go on; None if all do. The last rows to end stay. It
            is set for models and schedule only.
        finished: whether all rows have ended and no request takes their places; set for these as well.
        tree: the candidates with their branches; None for a chain.
        accepted_candidates: the numbers of the accepted candidates in the draft that was judged.
    """

    batch: Any
    rows: list[int]
    draft: Draft
    emitted_before: list[int]
    emitted: list[int]
    tokens: list[list[int]]
    accepted: list[int]
    num_new_tokens: list[int]
    prefix_acceptance: list[list[float]]
    overlap: list[list[float]]
    undefined: list[int]
    ended: list[int] = field(default_factory=list)
    forward: Any = None
    scores: Any = None
    keep_indices: torch.Tensor | None = None
    finished: bool = False
    tree: Tree | None = None
    accepted_candidates: list[list[int]] = field(default_factory=list)

    @property
    def accepted_in_chain(self) -> list[int]:
        """[R], how many of the accepted candidates are leading ones of the chain of first choices."""
        if self.tree is None:
            return self.accepted
        pairs = zip(self.accepted_candidates, self.tree.rows, strict=True)
        return [sum(map(eq, candidates, row.first_choices)) for candidates, row in pairs]

    @property
    def judged(self) -> list[int]:
        """[R], how many candidates of first choice were judged: the accepted ones, and the first that was rejected."""
        pairs = zip(self.accepted_in_chain, self.draft.lengths, strict=True)
        return [min(number + 1, length) for number, length in pairs]

    @property
    def is_bonus(self) -> list[bool]:
        """[R], whether no candidate followed the accepted ones, so that the token after them is a bonus token."""
        if self.tree is None:
            return [number == length for number, length in zip(self.accepted, self.draft.lengths, strict=True)]
        last_nodes = [candidates[-1] + 1 if candidates else 0 for candidates in self.accepted_candidates]
        return [not row.node_children[node] for row, node in zip(self.tree.rows, last_nodes, strict=True)]

    @property
    def num_candidates(self) -> list[int]:
        """[R], all candidates of each row, those on branches among them."""
        if self.tree is None:
            return self.draft.lengths
        return [len(row.ranks) for row in self.tree.rows]

    @property
    def accepted_ranks(self) -> list[list[int]]:
        """[R], the rank of each accepted candidate among its siblings."""
        if self.tree is None:
            return [[0] * number for number in self.accepted]
        pairs = zip(self.accepted_candidates, self.tree.rows, strict=True)
        return [[row.ranks[candidate] for candidate in candidates] for candidates, row in pairs]

    @property
    def draft_acceptance(self) -> list[list[float]]:
        """`prefix_acceptance` at the candidates that took a step of the draft: those neither forced nor model-free."""
        return self._unforced_acceptance(self.draft.model_lengths)

    @property
    def unforced_acceptance(self) -> list[list[float]]:
        """`prefix_acceptance` at the candidates that were not forced, since any draft has these right."""
        return self._unforced_acceptance(self.draft.lengths)

    def _unforced_acceptance(self, lengths: list[int]) -> list[list[float]]:
        """`prefix_acceptance` at the first `lengths` [R] candidates, without forced ones."""
        acceptance = [of_row[:number] for of_row, number in zip(self.prefix_acceptance, lengths, strict=True)]
        if self.draft.forced is None:
            return acceptance
        unforced = []
        for of_row, flags in zip(acceptance, self.draft.forced, strict=True):
            unforced.append([value for value, is_forced in zip(of_row, flags, strict=False) if not is_forced])
        return unforced


class Listener(Protocol):
    """An object that wants to know what became of each round."""

    def observe(self, round_: Round) -> None:
        """Called once the text has grown."""
