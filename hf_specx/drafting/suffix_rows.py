"""Candidates for a row from what followed its last tokens in other texts, and how often such candidates were kept."""

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from .suffix_index import DEPTH, OFFSET, OFFSET_BITS, FollowedRuns, SuffixIndex


UNLIKELY = 0.1  # chance to be kept below which a candidate is not looked for
LEAST_ASSUMED = 0.25  # chance of a candidate after a match of one token; after 2 or 3 it is a half, and so on
ASSUMED_WEIGHT = 3.0  # candidates that the acceptance assumed at first counts for
REMEMBERED = 0.99  # what earlier candidates are worth after one more match
FRESH = 4096  # tokens that are indexed one by one before all are sorted anew, at least
GROWTH = 8  # and at least one part in so many of what was sorted


class Match(NamedTuple):
    """Candidates of one row.

    Attributes:
        tokens: their ids.
        chances: that each is kept, with all before it.
        length: tokens of the match that they follow.
    """

    tokens: list[int]
    chances: list[float]
    length: int


class Rows:
    """Rows of a batch that are looked for in one another, and in earlier texts.

    Args:
        texts: token ids by row, which grow; -1 for one that is not of the vocabulary.
        acceptance: of candidates by the length of their match.
        earlier: indices of other texts.
        min_match: tokens that must match at least.

    Attributes:
        proposed: by row what `find` has found for the round that is going on, also where less of it is judged.
    """

    def __init__(
        self,
        texts: dict[int, array],
        acceptance: "Acceptance",
        earlier: Sequence[SuffixIndex] = (),
        min_match: int = 2,
    ):
        self.texts, self.acceptance, self.earlier, self.min_match = texts, acceptance, earlier, min_match
        self.proposed: dict[int, Match] = {}
        self._sort()

    def _sort(self) -> None:
        """Index all texts anew."""
        self.sorted, self.fresh = SuffixIndex(self.texts), SuffixIndex(self.texts, indexed=False)
        self.followed = FollowedRuns(self.texts, self.min_match)

    def find(self, row: int, most: int, max_match: int = DEPTH) -> Match:
        """Candidates for a row, at most `most`, each no less likely to be kept than `UNLIKELY`."""
        if not most or not (self.earlier or self.followed.has(self.texts[row])):
            return Match([], [], 0)
        suffix = self.texts[row][: -max_match - 1 : -1]
        indices = (self.fresh, self.sorted, *self.earlier)
        matches = [index.longest(suffix) for index in indices]
        length = max(length for length, _ in matches)
        if length < self.min_match:
            return Match([], [], 0)
        rate = self.acceptance.rate(length)
        most = min(most, int(math.log(UNLIKELY) / math.log(min(rate, 0.999))) if rate > UNLIKELY else 0)
        if not most:
            return Match([], [], length)
        followers: list[list[int]] = []
        for index, (matched, at) in zip(indices, matches, strict=True):
            if matched == length:
                followers += [self._following(index, row, p, most) for p in index.positions(suffix, length, at)]
        return Match(*_most_frequent(followers, most, rate), length)

    def _following(self, index: SuffixIndex, row: int, position: int, most: int) -> list[int]:
        """What follows a position; text that runs into its own end goes round."""
        number, offset = position >> OFFSET_BITS, position & OFFSET
        following = index.texts[number][offset : offset + most].tolist()
        if len(following) < most and number == row and index.texts is self.texts:
            following = (following * -(-most // len(following)))[:most]
        return following

    def observe(self, row: int, tokens: list[int]) -> None:
        """A row has emitted tokens; its candidates are compared with them, whether or not they were judged."""
        found = self.proposed.pop(row, None)
        if found is not None and found.length:
            alike = [one == other for one, other in zip(found.tokens, tokens, strict=False)]
            accepted = (*alike, False).index(False)
            self.acceptance.note(found.length, accepted, min(accepted + 1, len(alike)))
        text = self.texts[row]
        for token in tokens:
            text.append(token)
            self.followed.add(text)
            self.fresh.insert(row, len(text) - 1)
        if len(self.fresh.order) > max(FRESH, len(self.sorted.order) // GROWTH):
            self._sort()

    def replace(self, texts: dict[int, array]) -> None:
        """Other texts have the places of rows; all are indexed anew."""
        self.texts |= texts
        for row in texts:
            self.proposed.pop(row, None)
        self._sort()


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
