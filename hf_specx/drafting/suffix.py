"""A draft without a model: what followed the last tokens of a row where these stood before."""

import copy
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Round
from hf_specx.sampling.rules import RejectionRule

from .candidates import no_candidates
from .costs import Costs
from .drafter import Drafter, Reading
from .suffix_index import DEPTH, OFFSET, OFFSET_BITS, SuffixIndex
from .suffix_pool import SuffixPool, check_number


UNLIKELY = 0.1  # chance to be kept below which a candidate is not looked for
COLUMN_TIME = 0.2  # what one more candidate adds to a forward, as a part of it, where that was not measured
PRIOR = 3.0  # candidates that the acceptance assumed at first counts for
MEMORY = 0.99  # what earlier candidates are worth after one more match
FRESH = 4096  # tokens that are indexed one by one before all are sorted anew, at least
GROWTH = 8  # and at least one part in so many of what was sorted


class Found(NamedTuple):
    """Candidates of one row.

    Attributes:
        tokens: their ids.
        chances: that each is kept, with all before it.
        length: tokens of the match that they follow.
    """

    tokens: list[int]
    chances: list[float]
    length: int


class SuffixDraft(Drafter):
    """Proposes what followed the longest suffix of a row's text that stood before.

    It is looked for in the row itself, in the other rows of the batch and in a pool of earlier texts. Of several
    continuations the most frequent one is taken. How many candidates a row gets follows the number of tokens that
    match, and how often candidates after such matches were kept so far in all calls with this draft, down to none.
    With `seeds` under "token" or "block" each row is looked for in itself alone, so that it is independent of others.

    Where candidates are judged by match ("coupled", the default, and greedy) the text is that of `generate`; under
    "token" and "block" it has the same distribution, as everywhere. Calls in several threads may share it.

    Args:
        max_candidates: of a row and round, at most; `num_draft_tokens` is less or the same where it is given.
        min_match: tokens that must match at least. More than 32 are not told apart.
        pool: each call adds its rows to it at its end.

    Raises:
        ValueError: if a number is not an int of 1 or more, or the pool is no `SuffixPool`.

    Example:
        >>> strategy = SpeculativeDecoding(SuffixDraft())
        >>> model.generate(**inputs, max_new_tokens=128, custom_generate=strategy)
    """

    def __init__(self, max_candidates: int = 16, min_match: int = 2, pool: SuffixPool | None = None):
        check_number("max_candidates", max_candidates, 1)
        check_number("min_match", min_match, 1)
        if not isinstance(pool, SuffixPool | None):
            raise ValueError(f"pool is a {type(pool).__name__}; give a SuffixPool, or leave it out.")
        self.max_candidates: int = max_candidates
        self.min_match, self.pool = min(min_match, DEPTH), pool
        self.acceptance = Acceptance()
        self.calls: WeakKeyDictionary[Batch, list[Rows]] = WeakKeyDictionary()  # of each batch, by row

    def meet(self, vocab_size: int) -> None:
        """Check the pool's vocabulary."""
        if self.pool is not None:
            self.pool.meet(vocab_size)

    def read(self, reading: Reading) -> None:
        """Index the prompts."""
        ids = {row: reading.batch.row(row) for row in reading.batch.rows}
        known = {row: text.where((text >= 0) & (text < reading.vocab_size), -1) for row, text in ids.items()}
        texts = {row: array("i", text.tolist()) for row, text in known.items()}
        if isinstance(reading.rule, RejectionRule) and reading.rule.seeds is not None:
            rows = [Rows({row: texts[row]}, copy.deepcopy(self.acceptance)) for row in texts]
        else:
            rows = [Rows(texts, self.acceptance, self.pool, reading.costs)] * len(texts)
        self.calls[reading.batch] = rows

    def cost(self, batch: Batch) -> Callable[[int], object]:
        """Nothing; but that forwards of the target are timed."""
        return lambda _: None

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Up to `lengths` [R] candidates a row; `Draft.probs` is None."""
        groups = self.calls.get(batch)
        if groups is None or not any(lengths):
            return no_candidates(batch)
        found = [
            groups[row].find(row, self.min_match, min(length, self.max_candidates)) if length else Found([], [], 0)
            for row, length in zip(batch.rows, lengths, strict=True)
        ]
        if groups[0] is groups[-1]:
            found = _worth(found, groups[0])
        else:
            found = [_worth([one], groups[row])[0] for row, one in zip(batch.rows, found, strict=True)]
        for row, one in zip(batch.rows, found, strict=True):
            groups[row].proposed[row] = one
        width = max(len(one.tokens) for one in found)
        if not width:
            return no_candidates(batch)
        tokens = torch.tensor([one.tokens + [0] * (width - len(one.tokens)) for one in found]).to(batch.ids)
        if batch.over is not None:
            tokens = tokens.masked_fill(batch.over[:, None], batch.pad_token_id)
        batch.put(tokens)
        return Draft(tokens, [len(one.tokens) for one in found], None, "suffix")

    def observe(self, done: Round) -> None:
        """Take in what each row has emitted, and how many of its candidates were kept."""
        groups = self.calls.get(done.batch)
        if groups is None:
            return
        for row, accepted, judged in zip(done.rows, done.accepted, done.judged, strict=True):
            one = groups[row].proposed.pop(row, None)
            if one is not None and one.length:
                groups[row].acceptance.note(one.length, accepted, judged)
        for row, tokens in zip(done.rows, _emitted(done), strict=True):
            groups[row].grow(row, tokens)
        if done.finished and self.pool is not None:
            self.pool.add(*([token for token in rows.texts[row] if token >= 0] for row, rows in enumerate(groups)))


class Rows:
    """Rows of a batch that are looked for in one another, and in a pool.

    Args:
        texts: token ids by row, which grow; -1 for one that is not of the vocabulary.
        acceptance: of candidates by the length of their match.
        pool: as it is now; what other calls add is not seen.
        costs: the times of forwards, as they are when they are first asked for.
    """

    def __init__(
        self,
        texts: dict[int, array],
        acceptance: "Acceptance",
        pool: SuffixPool | None = None,
        costs: Costs | None = None,
    ):
        self.texts, self.acceptance, self.costs = texts, acceptance, costs
        self.earlier = () if pool is None else pool.indices
        self.sorted, self.fresh = SuffixIndex(texts), SuffixIndex(texts, indexed=False)
        self.proposed: dict[int, Found] = {}
        self.known_times: dict[int, list[float]] = {}  # by the number of rows that decode

    def times(self, rows: int, most: int) -> list[float]:
        """Of forwards with 0 to `most` candidates a row, in any unit."""
        if not self.known_times and self.costs is not None:
            self.costs = copy.copy(self.costs)
            self.costs.table = dict(self.costs.table)  # what other calls measure does not count
        times = self.known_times.setdefault(rows, [])
        while len(times) <= most:
            if self.costs is None or not self.costs.table:
                times.append(1 + COLUMN_TIME * len(times))
            else:
                times.append(self.costs.target(rows, 1 + len(times)))
        return times

    def find(self, row: int, min_match: int, most: int) -> Found:
        """Candidates that are worth judging in a forward of this row alone, at most `most`."""
        text = self.texts[row]
        suffix = text[: -DEPTH - 1 : -1]
        indices = (self.fresh, self.sorted, *self.earlier)
        matches = [index.longest(suffix) for index in indices]
        length = max(length for length, _ in matches)
        if length < min_match:
            return Found([], [], 0)
        rate = self.acceptance.rate(length)
        most = min(most, int(math.log(UNLIKELY) / math.log(min(rate, 0.999))) if rate > UNLIKELY else 0)
        if not most:
            return Found([], [], length)
        followers: list[list[int]] = []
        for index, (matched, at) in zip(indices, matches, strict=True):
            if matched == length:
                followers += [self._following(index, row, p, most) for p in index.positions(suffix, length, at)]
        return Found(*_most_frequent(followers, most, rate), length)

    def _following(self, index: SuffixIndex, row: int, position: int, most: int) -> list[int]:
        """What follows a position; text that runs into its own end goes round."""
        number, offset = position >> OFFSET_BITS, position & OFFSET
        following = index.texts[number][offset : offset + most].tolist()
        if len(following) < most and number == row and index.texts is self.texts:
            following = (following * -(-most // len(following)))[:most]
        return following

    def grow(self, row: int, tokens: list[int]) -> None:
        """A row has emitted tokens."""
        text = self.texts[row]
        for token in tokens:
            text.append(token)
            self.fresh.insert(row, len(text) - 1)
        if len(self.fresh.order) > max(FRESH, len(self.sorted.order) // GROWTH):
            self.sorted, self.fresh = SuffixIndex(self.texts), SuffixIndex(self.texts, indexed=False)


class Acceptance:
    """How often candidates were kept after matches of 1, 2 to 3, 4 to 7 tokens and so on."""

    def __init__(self) -> None:
        self.kept: Counter[int] = Counter()
        self.tried: Counter[int] = Counter()

    def rate(self, length: int) -> float:
        """The chance that a candidate is kept, if those before it are."""
        size = length.bit_length()
        return (self.kept[size] + PRIOR * (1 - 0.5**size)) / (self.tried[size] + PRIOR)

    def note(self, length: int, accepted: int, judged: int) -> None:
        """A match of so many tokens was found; of its candidates so many were judged, maybe none."""
        size = length.bit_length()
        self.kept[size] = self.kept[size] * MEMORY + accepted  # type: ignore[assignment]
        self.tried[size] = self.tried[size] * MEMORY + judged  # type: ignore[assignment]


def _most_frequent(followers: list[list[int]], most: int, rate: float) -> tuple[list[int], list[float]]:
    """Token by token what most of the continuations have that agreed so far, and the chance that it is all kept."""
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


def _worth(found: list[Found], rows: Rows) -> list[Found]:
    """Cut to the number of candidates with the most tokens a second; a forward takes as long as its longest row."""
    tokens = [float(len(found))]
    for depth in range(max(len(one.tokens) for one in found)):
        tokens.append(tokens[-1] + sum(one.chances[depth] for one in found if len(one.chances) > depth))
    times = rows.times(len(found), len(tokens) - 1)
    most = max(range(len(tokens)), key=lambda number: tokens[number] / times[number])
    return [Found(one.tokens[:most], one.chances[:most], one.length) for one in found]


def _emitted(done: Round) -> Iterator[list[int]]:
    """What each row has emitted in a round, by one transfer to the host."""
    batch, most = done.batch, max(done.emitted)
    if not most:
        return iter([[]] * len(done.rows))
    rows = torch.tensor(done.rows)
    columns = torch.tensor([batch.width + batch.counts[row] for row in done.rows])[:, None] + torch.arange(-most, 0)
    rows, columns = rows.to(batch.ids.device), columns.clamp(min=0).to(batch.ids.device)
    tokens = batch.ids[rows[:, None], columns].tolist()
    return iter([text[most - number :] for text, number in zip(tokens, done.emitted, strict=True)])
