"""Where the last tokens of a text stood before: positions in many texts, sorted by the tokens before them.

It is a suffix array of the texts read backwards. A lookup is a binary search; positions after the same tokens are
neighbours. 12 bytes a token: 4 for its id and 8 for its position in the order.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping

import torch


DEPTH = 32  # tokens before a position that are compared; a power of 2
SAMPLE = 16  # positions that are looked at where more match
FACTOR = 0x9E3779B1  # of a hash, 2**32 over the golden ratio
OFFSET_BITS = 32
OFFSET = (1 << OFFSET_BITS) - 1


class SuffixIndex:
    """Positions of texts in the order of what stands before them, read backwards.

    Args:
        texts: token ids, array("i"), by number; they may grow, and a new token is `insert`ed.
        indexed: whether to index what the texts hold by now, all at once.

    Attributes:
        order: array("q") of positions: the text's number times 2**32, plus the offset of the token at it. Offset 0
            has nothing before it and is left out.
    """

    def __init__(self, texts: Mapping[int, array], indexed: bool = True):
        self.texts = texts
        self.order = sort_positions(texts) if indexed else array("q")

    def insert(self, number: int, offset: int) -> None:
        """Index the token at an offset of a text, which is there already."""
        if offset:
            position = number << OFFSET_BITS | offset
            self.order.insert(bisect_left(self.order, self.before(position), key=self.before), position)

    def __len__(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.texts.values()))

    def since(self, least: int) -> "SuffixIndex":
        """An index of the texts from this number on; this one itself if these are all."""
        if min(self.texts) >= least:
            return self
        kept = SuffixIndex({number: text for number, text in self.texts.items() if number >= least}, indexed=False)
        if self.order:
            order = torch.frombuffer(self.order, dtype=torch.int64)
            kept.order = _as_array(order[order >= least << OFFSET_BITS])
        return kept

    def before(self, position: int) -> array:
        """Up to `DEPTH` tokens before a position, the nearest first."""
        text, offset = self.texts[position >> OFFSET_BITS], position & OFFSET
        return text[offset - 1 : offset - 1 - DEPTH : -1] if offset > DEPTH else text[offset - 1 :: -1]

    def longest(self, suffix: array) -> tuple[int, int]:
        """How many leading tokens of `suffix` (the last tokens of a text, the last one first) stand together in the
        texts, and where in the order that is."""
        order = self.order
        at = bisect_left(order, suffix, key=self.before)
        above = _alike(suffix, self.before(order[at])) if at < len(order) else 0
        below = _alike(suffix, self.before(order[at - 1])) if at else 0
        return (above, at) if above > below else (below, at - 1)

    def positions(self, suffix: array, length: int, at: int) -> list[int]:
        """Positions after the first `length` tokens of `suffix`, up to `SAMPLE` of them around `at` in the order."""
        order, wanted = self.order, suffix[:length]
        first, end = at, at + 1
        while first and end - first < SAMPLE and self.before(order[first - 1])[:length] == wanted:
            first -= 1
        while end < len(order) and end - first < SAMPLE and self.before(order[end])[:length] == wanted:
            end += 1
        return order[first:end].tolist()


class FollowedRuns:
    """Which runs of a fixed number of tokens have another token after them; a quick no before a lookup.

    One run in 16 or fewer that has none is taken for one that has; no other answer is wrong. 16 to 32 bytes a token.

    Args:
        texts: as for `SuffixIndex`.
        length: tokens of a run.
    """

    def __init__(self, texts: Mapping[int, array], length: int):
        size = 1 << max(16, (16 * sum(map(len, texts.values()))).bit_length())
        self.length, self.mask, self.table = length, size - 1, bytearray(size)
        known = torch.frombuffer(self.table, dtype=torch.uint8)
        for text in texts.values():
            if (number := len(text) - length) > 0:
                ids, codes = torch.frombuffer(text, dtype=torch.int32).long(), torch.zeros(number, dtype=torch.int64)
                for start in range(length):
                    codes = codes * FACTOR + ids[start : start + number]  # modulo 2**64, so modulo the size as well
                known[codes & self.mask] = 1

    def add(self, text: array) -> None:
        """A text has grown by one token."""
        if len(text) > self.length:
            self.table[self._code(text[-self.length - 1 : -1])] = 1

    def has(self, text: array) -> bool:
        """Whether the last tokens of a text may have another one after them, in any of the texts."""
        return len(text) >= self.length and bool(self.table[self._code(text[-self.length :])])

    def _code(self, run: array) -> int:
        code = 0
        for token in run:
            code = (code * FACTOR + token) & self.mask
        return code


def _alike(one: array, other: array) -> int:
    """How many leading tokens are the same."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def sort_positions(texts: Mapping[int, array]) -> array:
    """All positions but the first of each text in the order of `SuffixIndex`, by prefix doubling on whole tensors."""
    texts = {number: text for number, text in texts.items() if text}
    if not texts:
        return array("q")
    tokens, positions = [], []
    for number, text in texts.items():
        ids = torch.frombuffer(text, dtype=torch.int32).long() + 2  # -1 is an id as well
        tokens.append(torch.nn.functional.pad(ids, (1, 0)))  # 0 before a text, so that it ends what is compared
        positions.append(torch.arange(len(text) + 1) + (number << OFFSET_BITS))
    ranks, place = torch.cat(tokens), torch.cat(positions)
    used = ranks > 0
    used[torch.tensor([len(part) for part in tokens]).cumsum(0) - 1] = False  # nothing follows the last token yet
    compared = 1
    while True:
        values, order = ranks.sort(stable=True)
        steps = torch.nn.functional.pad((values[1:] != values[:-1]).long(), (1, 0)).cumsum(0)
        if compared >= DEPTH or steps[-1] == len(steps) - 1:
            return _as_array(place[order[used[order]]])
        ranks = torch.empty_like(steps).scatter_(0, order, steps)
        earlier = torch.nn.functional.pad(ranks, (compared, 0))[: len(ranks)]
        ranks = ranks * len(ranks) + earlier
        compared *= 2


def _as_array(numbers: torch.Tensor) -> array:
    """int64 numbers as array("q")."""
    found = array("q", bytes(8 * len(numbers)))
    if found:
        torch.frombuffer(found, dtype=torch.int64).copy_(numbers)
    return found
