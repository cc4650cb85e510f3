"""A draft without a model: what followed the last tokens of a row where these stood before."""

import copy
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.batch import Batch
from hf_specx.common.devices import sent
from hf_specx.common.errors import kind, require
from hf_specx.common.round import Draft, Round

from .costs import RoundTimer
from .draft_length import best_number
from .drafter import DraftContext, Drafter, alike, check_number, no_candidates
from .forward_times import NOTHING, ForwardSize
from .suffix_pool import DEPTH, NGrams, SuffixPool


UNLIKELY = 0.1  # chance to be kept below which a candidate is not looked for
LEAST_ASSUMED = 0.25  # chance of a candidate after a match of one token; after 2 or 3 it is a half, and so on
ASSUMED_WEIGHT = 3.0  # candidates that the acceptance assumed at first counts for
REMEMBERED = 0.99  # what earlier candidates are worth after one more match


class Match(NamedTuple):
    """Candidates of one row, the chance that each is kept with all before it, and how many tokens matched."""

    tokens: list[int]
    chances: list[float]
    length: int


NONE = Match([], [], 0)


class Acceptance:
    """How often candidates were kept after matches of 1, 2 to 3, 4 to 7 tokens and so on."""

    def __init__(self) -> None:
        self.kept = defaultdict[int, float](float)
        self.tried = defaultdict[int, float](float)

    def rate(self, length: int) -> float:
        """The chance that a candidate is kept, if those before it are."""
        size = length.bit_length()
        assumed = max(LEAST_ASSUMED, 1 - 0.5 ** (size - 1))
        return (self.kept[size] + ASSUMED_WEIGHT * assumed) / (self.tried[size] + ASSUMED_WEIGHT)

    def note(self, length: int, accepted: int, judged: int) -> None:
        """A match of so many tokens was found; of its candidates so many were judged, maybe none."""
        size = length.bit_length()
        self.kept[size] = self.kept[size] * REMEMBERED + accepted
        self.tried[size] = self.tried[size] * REMEMBERED + judged


class SuffixDraft(Drafter):
    """Proposes what followed the longest suffix of a row's text that stood before.

    It is looked for in the row itself, in the other rows of the batch and in a pool of earlier texts. Of several
    continuations the most frequent one is taken. How many candidates a row gets follows the number of tokens that
    match, and how often candidates after such matches were kept so far in all calls with this draft, down to none.
    With `seeds` under "token" or "block" each row is looked for in itself alone, and goes by what was kept of it
    alone, so that it is the same beside any others and after any other calls.

    Where candidates are judged by match ("coupled", the default, and greedy) the text is that of `generate`; under
    "token" and "block" it has the same distribution, as everywhere. Calls in several threads may share it.

    Args:
        max_candidates: of a row and round, at most; `num_draft_tokens` is less or the same where it is given.
        min_match: tokens that must match at least, up to 32; more count as 32.
        pool: each call adds its rows to it at its end.
        max_match: tokens that are compared at most, as `min_match`. A longer match is more often right.

    Raises:
        ValueError: if a number is not an int of 1 or more, or the pool is no `SuffixPool`.

    Example:
        >>> strategy = SpeculativeDecoding(SuffixDraft())
        >>> model.generate(**inputs, max_new_tokens=128, custom_generate=strategy)
    """

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
        told = f"max_match={max_match} is less than min_match={min_match}; give at least as much."
        require(max_match >= min(min_match, DEPTH), told)
        self.max_candidates: int = max_candidates
        self.min_match, self.max_match = min(min_match, DEPTH), min(max_match, DEPTH)
        self.pool, self.acceptance = pool, Acceptance()

    def __repr__(self) -> str:
        given = self.options if self.pool is None else self.options | {"pool": self.pool}
        return f"SuffixDraft({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def options(self) -> dict[str, int]:
        """What it was made with, its pool aside."""
        return {name: getattr(self, name) for name in ("max_candidates", "min_match", "max_match")}

    def bind(self, target: PreTrainedModel) -> "SuffixDraft":
        """The drafter of one call: a copy, which learns together with this."""
        return copy.copy(self)

    def check(self, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if self.pool is not None:
            self.pool.check(vocab_size, tokenizer)

    def start(self, context: DraftContext) -> None:
        self.vocab_size, self.apart = context.vocab_size, context.apart
        self.round_timer = RoundTimer(None) if self.apart else context.round_timer
        rows, shared = context.batch.rows, NGrams(self.min_match)
        # where each row is looked for, and which of these texts is its own
        self.texts, self.numbers = [NGrams(self.min_match) if self.apart else shared for _ in rows], list(rows)
        self.own = [Acceptance() if self.apart else self.acceptance for _ in rows]
        self.found: dict[int, Match] = {}  # for this round by row, also where less of it is judged
        self._read(context.batch, rows)

    def _read(self, batch: Batch, rows: Iterable[int]) -> None:
        """Index the texts of rows; ids outside of the vocabulary are -1, which is never proposed."""
        for row in rows:
            text = batch.row(row)
            known = text.where((text >= 0) & (text < self.vocab_size), -1).tolist()
            self.texts[row].extend(self.numbers[row], known)

    def cost(self, batch: Batch) -> Callable[[int], object]:
        return lambda _: None  # nothing, but forwards of the target are timed

    def size(self) -> ForwardSize:
        return NOTHING

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Up to `lengths` [R] candidates a row, as many as are worth a longer round; `Draft.probs` is None."""
        found = [self._find(row, length) for row, length in zip(batch.rows, lengths, strict=True)]
        self.found = dict(zip(batch.rows, found, strict=True))
        chances = [one.chances for one in found]
        most = [self._best([own]) for own in chances] if self.apart else [self._best(chances)] * len(found)
        chosen = [one.tokens[:number] for one, number in zip(found, most, strict=True)]
        kept = [len(tokens) for tokens in chosen]
        if not any(kept):
            return no_candidates(batch)
        columns = [list(column) for column in zip_longest(*chosen, fillvalue=0)]
        estimate = [row[:number] for row, number in zip(chances, kept, strict=True)]
        return Draft(sent(columns, batch.ids.device).T, kept, None, "suffix", estimate=estimate, known=columns)

    def _best(self, chances: list[list[float]]) -> int:
        """The number of candidates with the most tokens a second, by the chances of each row to keep its first i."""
        rows, most = len(chances), max(map(len, chances))
        means = [sum(row[i] for row in chances if i < len(row)) / rows for i in range(most)]
        return best_number(means, self.round_timer.times(rows, most, steps=False))[0]

    def _find(self, row: int, most: int) -> Match:
        """Candidates for a row, at most `most`, each no less likely to be kept than `UNLIKELY`."""
        count, text = min(most, self.max_candidates), self._text(row)
        if not count:
            return NONE
        length, followers = self.texts[row].find(text, self.max_match, count)
        if self.pool is not None and not self.apart:
            of_pool, others = self.pool.find(text, self.min_match, self.max_match, count)
            followers = others if of_pool > length else followers + others * (of_pool == length)
            length = max(length, of_pool)
        return Match(*_most_frequent(followers, count, self.own[row].rate(length)), length)

    def _text(self, row: int) -> array:
        return self.texts[row].texts[self.numbers[row]]

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Index new prompts, in place of texts that have ended, which go to the pool."""
        self._learn(rows)
        for row in rows:
            self.texts[row].remove(self.numbers[row])
            self.numbers[row] += len(self.numbers)  # which no text has had
            self.found.pop(row, None)
            if self.apart:
                self.own[row] = Acceptance()
        self._read(batch, rows)

    def observe(self, done: Round) -> None:
        """Take in what each row has emitted; what was found is compared with it, whether or not it was judged."""
        for row, tokens in zip(done.rows, done.tokens, strict=True):
            found = self.found.pop(row, NONE)
            if found.length:
                accepted = alike(found.tokens, tokens)
                judged = min(accepted + 1, len(found.tokens), len(tokens))
                self.own[row].note(found.length, accepted, judged)
            self.texts[row].extend(self.numbers[row], tokens)
        if done.finished:
            self._learn(range(len(self.numbers)))

    def _learn(self, rows: Iterable[int]) -> None:
        """Add rows to the pool."""
        if self.pool is not None:
            self.pool.add(*([token for token in self._text(row) if token >= 0] for row in rows))


def _most_frequent(followers: list[list[int]], most: int, rate: float) -> tuple[list[int], list[float]]:
    """Token by token what most continuations have that agreed so far, and the chance that it is all kept."""
    tokens: list[int] = []
    chances: list[float] = []
    total, survival = len(followers), 1.0
    while followers and len(tokens) < most:
        depth, survival = len(tokens), survival * rate
        followers = [following for following in followers if len(following) > depth]
        counts = Counter(following[depth] for following in followers)
        token, count = max(counts.items(), key=lambda item: item[1], default=(-1, 0))
        chance = survival * count / total
        if token < 0 or chance < UNLIKELY:
            break
        tokens.append(token)
        chances.append(chance)
        followers = [following for following in followers if following[depth] == token]
    return tokens, chances
