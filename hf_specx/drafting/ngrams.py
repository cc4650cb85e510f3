"""Where the last tokens of a text stood before, or in others: a dict from runs of tokens to places."""

from array import array
from collections.abc import Iterable


DEPTH = 32  # tokens of a match that are compared at most
TRIED = 64  # places that are compared, the latest first
SAMPLE = 16  # places after a match that are used
OFFSET_BITS = 32
OFFSET = (1 << OFFSET_BITS) - 1
NOWHERE = -1


class NGrams:
    """Texts that grow, and for each run of `length` tokens the last place after it.

    From a place the one before it after the same run is known, and so on. A place is the number of a text times
    2**32, plus the offset of the token that stands there. It takes 12 bytes a token, and some 120 for each run.

    Args:
        length: tokens of a run; no match is shorter.

    Attributes:
        texts: token ids, array("i"), by number.
        latest: by run, as bytes, the last place after it.
        earlier: by text, for each of its offsets the place before that follows the same run.
    """

    def __init__(self, length: int):
        self.length = length
        self.texts: dict[int, array] = {}
        self.latest: dict[bytes, int] = {}
        self.earlier: dict[int, array] = {}

    def extend(self, number: int, tokens: Iterable[int]) -> None:
        """Add tokens to the end of a text, which may be a new one."""
        text = self.texts.setdefault(number, array("i"))
        earlier = self.earlier.setdefault(number, array("q"))
        for token in tokens:
            offset, place = len(text), NOWHERE
            if offset >= self.length:
                run = self._run(text, offset)
                place = self.latest.get(run, NOWHERE)
                self.latest[run] = number << OFFSET_BITS | offset
            earlier.append(place)
            text.append(token)

    def remove(self, number: int) -> None:
        """Forget a text. Of runs that stand in it places before those in it may be lost as well."""
        text, earlier = self.texts.pop(number), self.earlier.pop(number)
        for offset in range(self.length, len(text)):
            run = self._run(text, offset)
            place = self.latest.get(run, NOWHERE)
            while place >> OFFSET_BITS == number:
                place = earlier[place & OFFSET]
            if place >> OFFSET_BITS in self.texts:
                self.latest[run] = place
            else:
                self.latest.pop(run, None)

    def find(self, text: array, most: int, count: int) -> tuple[int, list[list[int]]]:
        """The longest match with the end of a text, and up to `count` tokens after each place where it stands.

        Args:
            text: one of the texts, or another; from its own end on, what follows in it goes round.
            most: tokens that are compared.
            count: 1 or more.

        Returns:
            Tokens that match, 0 for none; and lists of tokens, the latest place first.
        """
        longest, places = 0, list[int]()
        place = self.latest.get(self._run(text, len(text)), NOWHERE)
        for _ in range(TRIED):
            number, offset = place >> OFFSET_BITS, place & OFFSET
            if number not in self.texts:  # none, or in a text that was removed
                break
            length = _alike(text, self.texts[number], offset, most)
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append(place)
            if longest == most and len(places) == SAMPLE:
                break
            place = self.earlier[number][offset]
        return longest, [self._following(text, place, count) for place in places[:SAMPLE]]

    def _run(self, text: array, offset: int) -> bytes:
        """The tokens before an offset; fewer, as no key is, where the text begins."""
        return text[max(0, offset - self.length) : offset].tobytes()

    def _following(self, text: array, place: int, count: int) -> list[int]:
        other, offset = self.texts[place >> OFFSET_BITS], place & OFFSET
        following = other[offset : offset + count].tolist()
        if len(following) < count and other is text:
            following = (following * -(-count // len(following)))[:count]
        return following


def _alike(text: array, other: array, offset: int, most: int) -> int:
    """How many tokens at the end of `text` stand before an offset of another one, at most `most`."""
    most = min(most, len(text), offset)
    if text[len(text) - most :] == other[offset - most : offset]:
        return most
    end, length = len(text) - 1, 0
    while text[end - length] == other[offset - 1 - length]:
        length += 1
    return length
