"""What the tokens of a tokenizer mean: the bytes that each adds to a text, and a text as tokens."""

import copy
import json
from collections.abc import Iterable, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_specx.common.errors import require


FAST = "load the fast one, as AutoTokenizer.from_pretrained does where the repository has a tokenizer.json"
STARTS, ENDS = ("bos_token_id", "cls_token_id"), ("eos_token_id", "sep_token_id")
CLOSING = frozenset(".,;:!?)]}%'\"-/")  # WordPiece does not say where spaces were; before these there is mostly none
PIECE_BYTES, PIECES = 32, 65_536  # how long a piece of text is that is kept with its tokens, and how many are


def tokens_without_bytes(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer says which bytes its tokens stand for."""
    name, backend = type(tokenizer).__name__, getattr(tokenizer, "backend_tokenizer", None)
    told = f"{name} does not say which bytes its tokens stand for; {FAST}, or choose a draft with the same tokenizer."
    require(backend is not None, told)
    assert backend is not None
    kinds = {part["type"] for part in parts(backend.decoder)}
    require(
        bool(kinds & {"ByteLevel", "WordPiece", "Metaspace", "Replace", "ByteFallback"}),
        f"{name} is none of byte-level, SentencePiece and WordPiece (its decoder is "
        f"{', '.join(sorted(kinds)) or 'None'}), so it is not known what its tokens stand for; choose a draft with "
        "the target's own tokenizer.",
    )


class TokenBytes:
    """The tokens of one tokenizer as bytes, and pieces of text as its tokens.

    Args:
        tokenizer: a fast one: byte-level, SentencePiece or WordPiece. It is left as it is.

    Attributes:
        contents: by id, the bytes that a token adds in the middle of a text; b"" where an id has no token. Those of a
            special token are how it is written.
        special: ids of special tokens, by how they are written.
        fallbacks: ids of tokens that stand for one byte beside others that mean the same, as `<0x41>`.
        end, start, unknown: ids of these special tokens, None where there is none.
        before: ids that it puts before a text.
        opens_with_space: whether it puts a space before a text.

    Raises:
        ValueError: if the tokenizer does not say which bytes its tokens stand for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        tokens_without_bytes(tokenizer)
        backend = tokenizer.backend_tokenizer
        self.backend: Any = copy.deepcopy(backend)  # calls of the tokenizer leave padding and truncation in it
        self.backend.no_padding()
        self.backend.no_truncation()
        named, self.special, self.fallbacks = tokenizer.get_vocab(), dict[str, int](), set[int]()
        self.contents = [b""] * (1 + max(named.values(), default=-1))
        added, read = tokenizer.added_tokens_decoder, self._reader(backend.decoder)
        specials = set(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}
        for token, number in named.items():
            literal = number in added or number in specials
            self.contents[number] = token.encode() if literal else read(token, number)
            if number in specials:
                self.special[token] = number
        self.end, self.start = (self._role(tokenizer, names) for names in (ENDS, STARTS))
        self.unknown = tokenizer.unk_token_id
        bare = self._ids("a")
        self.before = _before(self.backend.encode("a").ids, bare)
        self.backend.encode_special_tokens = True  # what a text says is text
        self.opens_with_space = self.joined(bare).startswith(b" ")
        skipped = set(self.special.values())
        self.numbers: dict[bytes, int] = {}  # of contents; a byte by itself only where nothing else means it
        for number in sorted(range(len(self.contents)), key=lambda number: number in self.fallbacks):
            if self.contents[number] and number not in skipped:
                self.numbers.setdefault(self.contents[number], number)
        self.longest = max(map(len, self.numbers), default=0)
        self.known: dict[bytes, list[int]] = {}

    def _reader(self, decoder: Any) -> Any:
        """A function from a token, as it is in the vocabulary, and its id to its bytes."""
        found = {part["type"]: part for part in parts(decoder)}
        if "ByteLevel" in found:
            meant = {char: number for number, char in bytes_to_unicode().items()}
            return lambda token, _: b"".join(
                bytes([meant[char]]) if char in meant else char.encode() for char in token
            )
        if "WordPiece" in found:
            inside = found["WordPiece"]["prefix"]
            return lambda token, _: _word_piece(token, inside).encode()
        space = found.get("Metaspace", {}).get("replacement", "▁")
        falls_back = "ByteFallback" in found

        def read(token: str, number: int) -> bytes:
            if falls_back and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                self.fallbacks.add(number)
                return bytes([int(token[3:5], 16)])
            return token.replace(space, " ").encode()

        return read

    @staticmethod
    def _role(tokenizer: PreTrainedTokenizerBase, names: Iterable[str]) -> int | None:
        return next((number for name in names if (number := getattr(tokenizer, name, None)) is not None), None)

    def joined(self, ids: Iterable[int]) -> bytes:
        """The bytes of tokens in the middle of a text; none for ids without a token."""
        size = len(self.contents)
        return b"".join(self.contents[number] for number in ids if number < size)

    def encode(self, text: bytes, opens: bool = False) -> list[int]:
        """A piece of text as tokens, at least one.

        They have exactly these bytes wherever the tokenizer has tokens for them: those that it takes itself, without
        the space that it may put before, or else the longest ones from left to right. Where it has none, as for
        capitals if it knows lower case only, they are what it makes of the text.

        Args:
            text: not empty.
            opens: whether nothing comes before it.
        """
        if opens or len(text) > PIECE_BYTES:
            return self._encoded(text, opens)
        found = self.known.get(text)
        if found is None:
            if len(self.known) >= PIECES:
                self.known.clear()
            found = self.known[text] = self._encoded(text)
        return found

    def _encoded(self, text: bytes, opens: bool = False) -> list[int]:
        found: list[int] = []
        for piece in _readable(text):
            found += (
                self._longest(piece) or [] if isinstance(piece, bytes) else self._piece(piece, opens and not found)
            )
        return found or [self.filler]

    def _piece(self, text: str, opens: bool) -> list[int]:
        if opens:
            return self._ids(text)
        wanted, begun = text.encode(), self.opens_with_space and text.startswith(" ")
        ids = self._ids(text[1:] if begun else text)
        content = self.joined(ids)
        if content == wanted:
            return ids
        if content == b" " + wanted and len(head := self.contents[ids[0]]) > 1:
            first = self._longest(head[1:])
            if first is not None:
                return [*first, *ids[1:]]
        return self._longest(wanted) or ids

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return found

    def _longest(self, text: bytes) -> list[int] | None:
        """The longest tokens from left to right; None if they cannot make up the text."""
        found, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self.longest), start, -1)
            end = next((end for end in ends if text[start:end] in self.numbers), None)
            if end is None:
                return None
            found.append(self.numbers[text[start:end]])
            start = end
        return found

    @property
    def filler(self) -> int:
        """A token for what cannot be written."""
        return next((number for number in (self.unknown, self.end, self.start) if number is not None), 0)


def parts(component: Any) -> Iterator[dict[str, Any]]:
    """The settings of a component of a fast tokenizer, and of the components that it is a sequence of."""
    todo = [] if component is None else [json.loads(component.__getstate__())]
    while todo:
        part = todo.pop()
        yield part
        todo += part.get("decoders", [])


def _word_piece(token: str, inside: str) -> str:
    if token.startswith(inside) and token != inside:
        return token.removeprefix(inside)
    return token if set(token) <= CLOSING else f" {token}"


def _before(ids: list[int], bare: list[int]) -> list[int]:
    """What comes before `bare` in ids."""
    starts = range(len(ids) - len(bare) + 1) if bare else ()
    return next((ids[:start] for start in starts if ids[start : start + len(bare)] == bare), [])


def _readable(text: bytes) -> Iterator[str | bytes]:
    """Pieces of a text: str where it is UTF-8, bytes where it is not."""
    while text:
        try:
            yield text.decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield text[: error.start].decode()
            yield text[error.start : error.end]
            text = text[error.end :]
