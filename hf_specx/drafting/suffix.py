"""A draft without a model: what followed the last tokens of a row where these stood before."""

import copy
import heapq
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import count, zip_longest
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.batch import Batch
from hf_specx.common.devices import to_device_async
from hf_specx.common.errors import kind, require
from hf_specx.common.round import Draft, Round
from hf_specx.common.tree import row_tree_of

from .auto import best_num_candidates
from .drafter import DraftContext, Drafter, check_number, no_candidates
from .forward_times import NOTHING, ForwardSize
from .round_timer import RoundTimer
from .suffix_pool import DEPTH, NGrams, SuffixPool
from .trees import MIN_GAIN, TreeShapes


UNLIKELY = 0.1  # chance to be kept below which a candidate is not looked for
UNLIKELY_BRANCH = 0.02  # the same where candidates may branch, and are looked for up to a number
MAX_BRANCHES = 64  # candidates of a row that may branch, where no number was asked for
MIN_ASSUMED = 0.25  # chance of a candidate after a match of one token; after 2 or 3 it is a half, and so on
ASSUMED_WEIGHT = 3.0  # candidates that the acceptance assumed at first counts for
REMEMBERED = 0.99  # what earlier candidates are worth after one more match


class Match(NamedTuple):
    """Candidates of one row, the likeliest first, and how many tokens matched.

    Attributes:
        tokens: of each candidate.
        chances: that each is kept, and all before it.
        parents: the number of the candidate that each follows, -1 for the last emitted token.
        length: of the match.
    """

    tokens: list[int]
    chances: list[float]
    parents: list[int]
    length: int

    def first_choices(self) -> "Match":
        """The chain of first choices."""
        chain = row_tree_of(tuple(self.parents)).first_choices
        tokens, chances = [self.tokens[number] for number in chain], [self.chances[number] for number in chain]
        return Match(tokens, chances, list(range(-1, len(chain) - 1)), self.length)

    def followed_by(self, text: Sequence[int]) -> tuple[int, int]:
        """How many candidates a text goes along, and how many of these and the next ones it says right or wrong of."""
        numbers = {place: number for number, place in enumerate(zip(self.parents, self.tokens, strict=True))}
        last, accepted = -1, 0
        while accepted < len(text) and (last, text[accepted]) in numbers:
            last = numbers[last, text[accepted]]
            accepted += 1
        return accepted, accepted + (accepted < len(text) and last in self.parents)


NO_MATCH = Match([], [], [], 0)


class MatchAcceptance:
    """How often candidates were kept after matches of 1, 2 to 3, 4 to 7 tokens and so on."""

    def __init__(self) -> None:
        self.kept = defaultdict[int, float](float)
        self.tried = defaultdict[int, float](float)

    def rate(self, length: int) -> float:
        """The chance that a candidate is kept, if those before it are."""
        size = length.bit_length()
        assumed = max(MIN_ASSUMED, 1 - 0.5 ** (size - 1))
        return (self.kept[size] + ASSUMED_WEIGHT * assumed) / (self.tried[size] + ASSUMED_WEIGHT)

    def update(self, length: int, accepted: int, judged: int) -> None:
        """Count a match of so many tokens, of whose candidates so many were judged, maybe none, and accepted."""
        size = length.bit_length()
        self.kept[size] = self.kept[size] * REMEMBERED + accepted
        self.tried[size] = self.tried[size] * REMEMBERED + judged


class SuffixDraft(Drafter):
    """Proposes what followed the longest suffix of a row's text that stood before.

    It is looked for in the row itself, in the other rows of the batch and in a pool of earlier texts. Of several
    continuations the most frequent one is taken, or with `tree=` as many as are likely enough. How many candidates a
    row gets follows the number of tokens that match, and how often candidates after such matches were kept so far in
    all calls with this draft, down to none.
    With `seeds` under "token" or "block" each row is looked for in itself alone, and goes by what was kept of it
    alone, so that it is the same beside any others and after any other calls.

    Where candidates are judged by match ("coupled", the default, and greedy) the text is that of `generate`; under
    "token" and "block" it has the same distribution, as everywhere. Calls in several threads may share it.

    Args:
        max_candidates: of a row and round, at most; `num_draft_tokens` is less or the same where it is given. Where
            candidates branch, so many may follow each other.
        min_match: tokens that must match at least, up to 32; more count as 32.
        pool: each call adds its rows to it at its end.
        max_match: tokens that are compared at most, as `min_match`. A longer match is more often right.

    Raises:
        ValueError: if a number is not an int of 1 or more, or the pool is no `SuffixPool`.

    Example:
        >>> strategy = SpeculativeDecoding(SuffixDraft())
        >>> model.generate(**inputs, max_new_tokens=128, custom_generate=strategy)
    """

    proposes_trees = True
    tree_shapes: TreeShapes | None = None

    def __init__(
        self,
        max_candidates: int = 16,
        min_match: int = 2,
        pool: SuffixPool | None = None,
        max_match: int = DEPTH,
    ):
        for name, number in (("max_candidates", max_candidates), ("min_match", min_match), ("max_match", max_match)):
            check_number(name, number)
        require(isinstance(pool, SuffixPool | None), f"pool is {kind(pool)}; give a SuffixPool, or leave it out.")
        require(
            max_match >= min(min_match, DEPTH),
            f"max_match={max_match} is less than min_match={min_match}; give at least as much.",
        )
        self.max_candidates: int = max_candidates
        self.min_match, self.max_match = min(min_match, DEPTH), min(max_match, DEPTH)
        self.pool = pool
        self.acceptance = MatchAcceptance()

    def __repr__(self) -> str:
        arguments: dict[str, object] = dict(self.options)
        if self.pool is not None:
            arguments["pool"] = self.pool
        return f"SuffixDraft({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"

    @property
    def options(self) -> dict[str, int]:
        """The arguments that it was made with, its pool aside."""
        return {name: getattr(self, name) for name in ("max_candidates", "min_match", "max_match")}

    def bind(self, target: PreTrainedModel) -> "SuffixDraft":
        """The drafter of one call: a copy, which learns together with this."""
        return copy.copy(self)

    def check(self, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if self.pool is not None:
            self.pool.check(vocab_size, tokenizer)

    def start(self, context: DraftContext) -> None:
        self.vocab_size = context.vocab_size
        self.independent_rows, self.tree_shapes = context.independent_rows, context.tree_shapes
        rows = context.batch.rows
        self.text_numbers = list(rows)  # of each row, in the index in which it is looked for
        self.num_texts = len(rows)  # numbers that texts have had
        if self.independent_rows:
            self.round_timer = RoundTimer(None)
            self.indices = [NGrams(self.min_match) for _ in rows]
            self.row_acceptance = [MatchAcceptance() for _ in rows]
        else:
            self.round_timer = context.round_timer
            self.indices = [NGrams(self.min_match)] * len(rows)
            self.row_acceptance = [self.acceptance] * len(rows)
        self.matches: dict[int, Match] = {}  # for this round by row, also where less of it is judged
        self._index(context.batch, rows)

    def _index(self, batch: Batch, rows: Iterable[int]) -> None:
        """Index the texts of rows; ids outside of the vocabulary are -1, which is never proposed."""
        for row in rows:
            text = batch.row(row)
            ids = text.where((text >= 0) & (text < self.vocab_size), -1).tolist()
            self.indices[row].extend(self.text_numbers[row], ids)

    def cost(self, batch: Batch) -> Callable[[int], object]:
        return lambda _: None  # nothing, but forwards of the target are timed

    def size(self) -> ForwardSize:
        return NOTHING

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Up to `lengths` [R] candidates one after another, as are worth a longer round; `Draft.probs` is None."""
        matches = [self._find(row, length) for row, length in zip(batch.rows, lengths, strict=True)]
        self.matches = dict(zip(batch.rows, matches, strict=True))
        if self.tree_shapes is not None and self.tree_shapes.nodes == "auto":
            matches = self._best_kind(matches)
        chances = [match.chances for match in matches]
        if self.independent_rows:
            numbers = [self._best([of_row]) for of_row in chances]
        else:
            numbers = [self._best(chances)] * len(matches)
        candidates = [match.tokens[:number] for match, number in zip(matches, numbers, strict=True)]
        num_candidates = list(map(len, candidates))
        if not any(num_candidates):
            return no_candidates(batch)
        columns = [list(column) for column in zip_longest(*candidates, fillvalue=0)]
        acceptance = [of_row[:number] for of_row, number in zip(chances, num_candidates, strict=True)]
        tokens = to_device_async(columns, batch.ids.device).T
        parents = None
        if self.tree_shapes is not None:
            parents = [tuple(match.parents[:number]) for match, number in zip(matches, num_candidates, strict=True)]
            if all(of_row == tuple(range(-1, len(of_row) - 1)) for of_row in parents):
                parents = None  # chains, which forced tokens may follow
        return Draft(
            tokens, num_candidates, None, "suffix", prefix_acceptance=acceptance, host_tokens=columns, parents=parents
        )

    def _best(self, chances: list[list[float]]) -> int:
        """The number of candidates with the most tokens a second, by the chances of each row's to be kept."""
        return self._best_number(chances, may_branch=self.tree_shapes is not None)[0]

    def _best_number(self, chances: list[list[float]], may_branch: bool) -> tuple[int, float]:
        """That number, and how many tokens a second of a row it promises."""
        rows, longest = len(chances), max(map(len, chances))
        means = [sum(row[i] for row in chances if i < len(row)) / rows for i in range(longest)]
        seconds, numbers = list(self.round_timer.times(rows, longest, steps=False)), list(range(1 + longest))
        if may_branch and self.tree_shapes is not None:
            numbers = [number for number in (0, *self.tree_shapes.numbers, longest) if number <= longest]
            self.round_timer.considers_trees = True
            seconds[1:] = self.round_timer.tree_times(rows, 0, longest)[1:]
        number, speedup = best_num_candidates(means, seconds, numbers)
        return number, speedup / seconds[0]

    def _best_kind(self, matches: list[Match]) -> list[Match]:
        """The matches [R], or their chains of first choices where trees do not promise enough more."""
        chains = [match.first_choices() for match in matches]
        if chains == matches:
            return matches
        of_trees, of_chains = (
            self._best_number([match.chances for match in kind], may_branch)[1]
            for kind, may_branch in ((matches, True), (chains, False))
        )
        return matches if of_trees > MIN_GAIN * of_chains else chains

    def _find(self, row: int, max_candidates: int) -> Match:
        """Candidates for a row, of which so many may follow each other at most, and that are likely enough."""
        depth = min(max_candidates, self.max_candidates)
        if not depth:
            return NO_MATCH
        text = self._text(row)
        length, continuations = self.indices[row].find(text, self.max_match, depth)
        if self.pool is not None and not self.independent_rows:
            pool_length, of_pool = self.pool.find(text, self.min_match, self.max_match, depth)
            if pool_length > length:
                length, continuations = pool_length, of_pool
            elif pool_length == length:
                continuations = continuations + of_pool
        rate = self.row_acceptance[row].rate(length)
        if self.tree_shapes is None:
            return Match(*_most_frequent(continuations, depth, rate), length)
        number = self.tree_shapes.nodes if isinstance(self.tree_shapes.nodes, int) else MAX_BRANCHES
        return Match(*_likeliest(continuations, depth, rate, number, UNLIKELY_BRANCH), length)

    def _text(self, row: int) -> array:
        return self.indices[row].texts[self.text_numbers[row]]

    def add_rows(self, batch: Batch, previous_indices: torch.Tensor) -> None:
        for row in range(len(self.text_numbers), len(batch.counts)):
            self.indices.append(NGrams(self.min_match) if self.independent_rows else self.indices[0])
            self.row_acceptance.append(MatchAcceptance() if self.independent_rows else self.acceptance)
            self.text_numbers.append(self.num_texts)
            self.num_texts += 1
            self.indices[row].extend(self.text_numbers[row], [])

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Index new prompts, in place of texts that have ended, which go to the pool."""
        self._add_to_pool(rows)
        for row in rows:
            self.indices[row].remove(self.text_numbers[row])
            self.text_numbers[row] = self.num_texts
            self.num_texts += 1
            self.matches.pop(row, None)
            if self.independent_rows:
                self.row_acceptance[row] = MatchAcceptance()
        self._index(batch, rows)

    def observe(self, round_: Round) -> None:
        """Index what each row has emitted; its match is compared with that, whether or not it was judged."""
        for row, tokens in zip(round_.rows, round_.tokens, strict=True):
            match = self.matches.pop(row, NO_MATCH)
            if match.length:
                self.row_acceptance[row].update(match.length, *match.followed_by(tokens))
            self.indices[row].extend(self.text_numbers[row], tokens)
        if round_.finished:
            self._add_to_pool(range(len(self.text_numbers)))

    def _add_to_pool(self, rows: Iterable[int]) -> None:
        """Add the texts of rows to the pool, if there is one."""
        if self.pool is not None:
            self.pool.add(*([token for token in self._text(row) if token >= 0] for row in rows))


Candidates = tuple[list[int], list[float], list[int]]  # tokens, chances and parents, as in `Match`


class Branch(NamedTuple):
    """A way along continuations: the token that it ends in may become a candidate.

    Attributes:
        token: that token.
        parent: the number of the candidate before it, -1 for the last emitted token.
        depth: how many candidates it has, this one among them.
        chance: that all of them are kept.
        chance_if_listed: the same if the text goes on as one of the continuations of the match.
        continuations: those that begin with it.
    """

    token: int
    parent: int
    depth: int
    chance: float
    chance_if_listed: float
    continuations: list[list[int]]


def _most_frequent(continuations: list[list[int]], depth: int, rate: float) -> Candidates:
    """At most `depth` candidates, each what most continuations have that agreed so far."""
    return _likeliest(continuations, depth, rate, depth, UNLIKELY, siblings=1)


def _likeliest(
    continuations: list[list[int]],
    max_depth: int,
    rate: float,
    number: int,
    least: float,
    siblings: int | None = None,
) -> Candidates:
    """At most `number` candidates out of the trie of continuations, those that are likeliest to be kept first.

    Args:
        continuations: of one match, the latest first; of equally frequent ones it is preferred.
        max_depth: how many candidates may follow each other.
        rate: the chance that a token is kept if the text goes on as one of the continuations.
        least: the chance that each candidate must have.
        siblings: how many may follow the same candidate; None for any number.
    """
    order, total = count(), len(continuations)
    waiting: list[tuple[float, int, Branch]] = []  # a heap: the likeliest first, and of equals the earlier
    taken: list[Branch] = []
    branch = Branch(-1, -1, 0, 1.0, 1.0, continuations)  # the last emitted token, which all begin behind
    while True:
        chance_if_listed = branch.chance_if_listed * rate
        following = _following(branch.continuations, branch.depth) if branch.depth < max_depth else []
        for token, agreeing in following[:siblings]:
            chance = chance_if_listed * len(agreeing) / total
            if token >= 0 and chance >= least:
                longer = Branch(token, len(taken) - 1, branch.depth + 1, chance, chance_if_listed, agreeing)
                heapq.heappush(waiting, (-chance, next(order), longer))
        if not waiting or len(taken) == number:
            break
        branch = heapq.heappop(waiting)[-1]
        taken.append(branch)
    return [each.token for each in taken], [each.chance for each in taken], [each.parent for each in taken]


def _following(continuations: list[list[int]], depth: int) -> list[tuple[int, list[list[int]]]]:
    """The tokens at a depth, each with the continuations that have it there, the most frequent first."""
    following: dict[int, list[list[int]]] = {}
    for continuation in continuations:
        if depth < len(continuation):
            following.setdefault(continuation[depth], []).append(continuation)
    if len(following) < 2:
        return list(following.items())
    return sorted(following.items(), key=lambda item: -len(item[1]))
