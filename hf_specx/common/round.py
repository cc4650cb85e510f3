"""What passes through one round: a draft, and then the record of what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import eq
from typing import Any, NamedTuple, Protocol

import torch

from .devices import to_device_async
from .tree import Parents, Tree, branches_of


class Draft(NamedTuple):
    """Candidates of the R decoding rows, each row with its own number of them: a chain, or a tree.

    Attributes:
        tokens: [R, K] int64. From a row's length on they are fillers: nothing is proposed there.
        lengths: [R], the number of candidates of each row, 0 to K.
        probs: [R, K, V], the distribution q that each candidate was drawn from; None if they were not drawn from one.
            Of a tree, those of the chain of first choices alone.
        source: who proposed them; a list [R] where rows have different sources.
        forced: [R, K], which of them are the only token that the processors allow there; None if that is not known.
        estimate: for each row the chance that its first i candidates are all kept, i = 1 to its length; None if the
            drafter has no such estimate.
        free: [R] bool, rows whose candidates took no steps of a draft model; None if all rows are alike.
        known: ids of the first columns of `tokens`, [up to K][R], as far as they were read back.
        parents: of each row as many numbers as it has candidates: the candidate that each follows, -1 for the last
            emitted token. Parents stand before their children, and a better choice before its siblings. None if each
            candidate follows the one before. `forced`, `estimate` and `free` are of the chain of first choices.
    """

    tokens: torch.Tensor
    lengths: list[int]
    probs: torch.Tensor | None = None
    source: str | list[str] = "none"
    forced: list[list[bool]] | None = None
    estimate: list[list[float]] | None = None
    free: list[bool] | None = None
    known: Sequence[list[int]] = ()
    parents: Sequence[Parents] | None = None

    def first_choices(self) -> "Draft":
        """The chain of first choices, which is the draft itself if that is no tree."""
        if self.parents is None:
            return self
        chains = [branches_of(tuple(of_row)).first for of_row in self.parents]
        lengths = list(map(len, chains))
        most = max(lengths, default=0)
        tokens = self.tokens[:, :most]
        if any(chain != tuple(range(len(chain))) for chain in chains):
            index = [[*chain, *[0] * (most - len(chain))] for chain in chains]
            tokens = self.tokens.gather(1, to_device_async(index, tokens.device))
        known = self.known[: min(lengths, default=0)]
        return self._replace(tokens=tokens, lengths=lengths, known=known, parents=None)

    @property
    def sources(self) -> list[str]:
        """[R], the source of each row."""
        return [self.source] * len(self.lengths) if isinstance(self.source, str) else self.source

    @property
    def drafted(self) -> list[int]:
        """[R], how many candidates of each row are a draft model's; in rows of its own forced ones count as well."""
        if self.free is None:
            return self.lengths
        return [0 if free else length for free, length in zip(self.free, self.lengths, strict=True)]

    @property
    def steps(self) -> int:
        """How many steps of the draft the candidates took: positions where a row has one that is not forced.

        Rows that are `free` take none; if all rows are alike, candidates count as steps of any draft.
        """
        if self.forced is None:
            return max(self.drafted, default=0)
        proposed = [flags[:length] for flags, length in zip(self.forced, self.drafted, strict=True)]
        return sum(not all(flags) for flags in zip_longest(*proposed, fillvalue=True))

    @property
    def proposed(self) -> torch.Tensor | None:
        """[R, K] bool, which tokens are candidates; None where all are."""
        rows, most = self.tokens.shape
        if sum(self.lengths) == rows * most:
            return None
        device = self.tokens.device
        return torch.arange(most, device=device) < to_device_async(self.lengths, device)[:, None]


class Verdict(NamedTuple):
    """What a verifier says of a draft, for each of the R rows.

    Attributes:
        accepted: [R] int64, leading candidates that are kept, 0 to the row's length.
        next_token: [R] int64, the recovered token, or the bonus token where all candidates are kept.
        acceptance: [R, K], for i = 1 to K the probability that at least i candidates are accepted, given them all.
            It is known at all K positions, also after a rejection, so its mean over rounds estimates
            P(accepted >= i) without bias. float64; int64, 0 or 1, from `verify_match`.
        overlap: [R, K], sum_x min(p, q) at each candidate; under greedy 1 for a match.
        undefined: [R, K + 1] bool, positions without a distribution, where `generate` raises if a row gets there.
        path: [R, D + 1] int64, the nodes on the branch that was taken in a tree of depth D, node 0 first; what lies
            behind the accepted ones is not read. None for a chain. `undefined` is [R, D + 1] then, of this branch;
            `acceptance` and `overlap` are of the chain of first choices, behind whose end they are not read.
    """

    accepted: torch.Tensor
    next_token: torch.Tensor
    acceptance: torch.Tensor
    overlap: Any = None
    undefined: Any = None
    path: torch.Tensor | None = None


class RoundRecord(NamedTuple):
    """One row's part in one round, in numbers alone.

    Attributes:
        accepted, emitted: as in `Round`; `drafted`: candidates of the row, of a tree those of first choice.
        forced: positions of candidates that were the only token allowed.
        nodes: all candidates of the row, those on branches among them.
        branch: the ranks of the accepted candidates among their siblings; 0 is the draft's first choice.
    """

    drafted: int
    accepted: int
    emitted: int
    forced: tuple[int, ...] = ()
    nodes: int = 0
    branch: tuple[int, ...] = ()


@dataclass
class Round:
    """What a round did; every listener gets it once the text has grown. Lists are of the R rows that took part.

    Of a tree, `draft` is the chain of first choices, and `forward` and `scores` are those on the branch that was
    taken, so that whoever reads a round need not know of trees.

    Attributes:
        before: tokens that each row had emitted before.
        emitted: how many tokens entered the text, after any cut at a stop; `tokens`: their ids.
        accepted: candidates that the verifier kept, before a cut; `judged`: those whose predecessors were all kept.
        gained: tokens by which the row went on, before a cut; in lockstep all have that of the slowest row.
        acceptance, overlap: of `Verdict`, for the candidates of each row.
        undefined: the first position of each row without a distribution; K + 1 if there is none.
        ended: rows that have ended.
        forward, scores: the target's, with scores [R, P, V] after all processors at the positions that were judged.
        stay: [R'] int64, the row indices of those that go on; None if all do. The last rows to end stay.
        finished: whether all rows have ended and nothing comes in their places; both are said to the models only.
        tree: the candidates with their branches; None for a chain. `paths`: the numbers in it of the accepted ones.
    """

    batch: Any
    rows: list[int]
    draft: Draft
    before: list[int]
    emitted: list[int]
    tokens: list[list[int]]
    accepted: list[int]
    judged: list[int]
    gained: list[int]
    acceptance: list[list[float]]
    overlap: list[list[float]]
    undefined: list[int]
    ended: list[int] = field(default_factory=list)
    forward: Any = None
    scores: Any = None
    stay: torch.Tensor | None = None
    finished: bool = False
    tree: Tree | None = None
    paths: list[list[int]] = field(default_factory=list)

    @property
    def first_accepted(self) -> list[int]:
        """[R], how many of the accepted candidates are leading ones of the chain of first choices."""
        if self.tree is None:
            return self.accepted
        pairs = zip(self.paths, self.tree.rows, strict=True)
        return [sum(map(eq, path, branches.first)) for path, branches in pairs]

    @property
    def nodes(self) -> list[int]:
        """[R], all candidates of each row."""
        if self.tree is None:
            return self.draft.lengths
        return [len(branches.ranks) for branches in self.tree.rows]

    @property
    def branches(self) -> list[list[int]]:
        """[R], the rank of each accepted candidate among its siblings."""
        if self.tree is None:
            return [[0] * number for number in self.accepted]
        pairs = zip(self.paths, self.tree.rows, strict=True)
        return [[branches.ranks[number] for number in path] for path, branches in pairs]

    @property
    def chances(self) -> list[list[float]]:
        """`acceptance` of a draft model's candidates, without forced ones, which are kept if those before them are."""
        drafted, forced = self.draft.drafted, self.draft.forced
        acceptance = [chances[:number] for chances, number in zip(self.acceptance, drafted, strict=True)]
        if forced is None:
            return acceptance
        free = []
        for chances, flags in zip(acceptance, forced, strict=True):
            free.append([chance for chance, is_forced in zip(chances, flags, strict=False) if not is_forced])
        return free


class Listener(Protocol):
    """An object that wants to know what became of each round."""

    def observe(self, done: Round) -> None:
        """Called once the text has grown."""
