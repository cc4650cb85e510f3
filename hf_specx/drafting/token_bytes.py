"""What the tokens of a tokenizer mean: the bytes that each adds to a text, and a text as tokens."""

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_specx.common.errors import require


FAST = "load the fast one, as AutoTokenizer.from_pretrained does where the repository has a tokenizer.json"
REVERSIBLE_DECODERS = {"ByteLevel", "WordPiece", "Metaspace", "Replace", "ByteFallback"}
BYTE = re.compile("<0x([0-9A-F]{2})>")
BROKEN = re.compile("([\udc80-\udcff]+)")  # bytes that are no text, as Python decodes them with "surrogateescape"
CLOSING = frozenset(".,;:!?)]}%'\"-/")  # WordPiece does not say where spaces were; before these there is mostly none
PIECE_BYTES, PIECES = 32, 65_536  # how long a piece of text is that is kept with its tokens, and how many are


class TokenBytes:
    """The tokens of one tokenizer as bytes, and pieces of text as its tokens.

    The tokenizer is left as it is; a ValueError says that it does not tell which bytes its tokens stand for.

    Attributes:
        contents: by id, the bytes that a token adds in the middle of a text; b"" where an id has no token.
        special: ids of special tokens, by how they are written; `ids_by_bytes`: ids of all others.
        end, start, unknown: ids of these special tokens, None where there is none.
        prefix_ids: ids of special tokens that it puts before a text, told by those that come before "a".
        opens_with_space: whether it puts a space before a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        name = type(tokenizer).__name__
        backend = cast(Any, getattr(tokenizer, "backend_tokenizer", None))
        require(
            backend is not None,
            f"{name} does not say which bytes its tokens stand for; {FAST}, or choose a draft with the same "
            "tokenizer.",
        )
        self.backend = copy.deepcopy(backend)  # calls leave padding and truncation in it
        decoders = {part["type"]: part for part in _parts(self.backend.decoder)}
        types = ", ".join(sorted(decoders)) or "None"
        require(
            bool(decoders.keys() & REVERSIBLE_DECODERS),
            f"{name} is none of byte-level, SentencePiece and WordPiece (its decoder is {types}), so it is not known "
            "what its tokens stand for; choose a draft with the target's own tokenizer.",
        )
        self.backend.no_padding()
        self.backend.no_truncation()
        vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
        special = set(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}
        self.special = {token: number for token, number in vocabulary.items() if number in special}
        self.end = _first(tokenizer.eos_token_id, tokenizer.sep_token_id)
        self.start = _first(tokenizer.bos_token_id, tokenizer.cls_token_id)
        self.unknown = tokenizer.unk_token_id
        self.filler = _first(self.unknown, self.end, self.start, 0)  # for what cannot be written
        self.contents = [b""] * (1 + max(vocabulary.values(), default=-1))
        self.ids_by_bytes: dict[bytes, int] = {}
        bytes_of = _bytes_reader(decoders)
        # of tokens that mean the same, those for single bytes as `<0x41>` come last
        for token, number in sorted(vocabulary.items(), key=lambda item: (bool(BYTE.fullmatch(item[0])), item[1])):
            content = token.encode() if number in added or number in special else bytes_of(token)
            self.contents[number] = content
            if content and number not in special:
                self.ids_by_bytes.setdefault(content, number)
        self.longest = max(map(len, self.ids_by_bytes), default=0)
        ids, with_special = self._ids("a"), self.backend.encode("a")
        self.prefix_ids: list[int] = with_special.ids[: with_special.special_tokens_mask.index(0)] if ids else []
        self.backend.encode_special_tokens = True  # what a text says is text
        self.opens_with_space = self.joined(ids).startswith(b" ")
        self._cached = lru_cache(PIECES)(self._encoded)

    def joined(self, ids: Iterable[int]) -> bytes:
        """The bytes of tokens in the middle of a text; none for ids without a token."""
        size = len(self.contents)
        return b"".join(self.contents[number] for number in ids if number < size)

    def encode(self, text: bytes, opens: bool = False) -> list[int]:
        """The tokens of a piece of text that is not empty, at least one; `opens` if nothing comes before it.

        They have exactly these bytes wherever the tokenizer has tokens for them: those that it takes itself, without
        the space that it may put before, or else the longest ones from left to right. Where it has none, as for
        capitals if it knows lower case only, they are what it makes of the text.
        """
        return self._encoded(text, opens) if opens or len(text) > PIECE_BYTES else self._cached(text)

    def _encoded(self, text: bytes, opens: bool = False) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(BROKEN.split(text.decode(errors="surrogateescape"))):
            if number % 2:  # bytes that are no text
                ids += self._longest(part.encode(errors="surrogateescape"))
            elif part:
                ids += self._piece(part, opens and not ids)
        return ids or [self.filler]

    def _piece(self, text: str, opens: bool) -> list[int]:
        """The tokens of a text without broken bytes, with the space that the tokenizer puts before it taken back."""
        puts_space = not opens and self.opens_with_space and text.startswith(" ")
        ids = self._ids(text[1:] if puts_space else text)
        content = self.joined(ids)
        expected = text.encode()
        if opens or content == expected:
            return ids
        if content == b" " + expected:
            without_space = self._longest(self.contents[ids[0]][1:])
            if without_space:
                return [*without_space, *ids[1:]]
        return self._longest(expected) or ids

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def _longest(self, text: bytes) -> list[int]:
        """The longest tokens from left to right; none if they cannot make up the text."""
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self.longest), start, -1)
            end = next((end for end in ends if text[start:end] in self.ids_by_bytes), None)
            if end is None:
                return []
            ids.append(self.ids_by_bytes[text[start:end]])
            start = end
        return ids


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """The settings of a component of a fast tokenizer, and of the components that it is a sequence of."""
    parts = [] if component is None else [json.loads(component.__getstate__())]
    while parts:
        part = parts.pop()
        yield part
        parts += part.get("decoders", [])


def _bytes_reader(decoders: dict[str, dict[str, Any]]) -> Callable[[str], bytes]:
    """A function from a token, as it is in the vocabulary, to its bytes."""
    if "ByteLevel" in decoders:
        byte_of = {char: bytes([number]) for number, char in bytes_to_unicode().items()}
        return lambda token: b"".join(byte_of.get(char) or char.encode() for char in token)
    if "WordPiece" in decoders:
        prefix = decoders["WordPiece"]["prefix"]
        return lambda token: _word_piece(token, prefix).encode()
    space = decoders.get("Metaspace", {}).get("replacement", "▁")

    def of_piece(token: str) -> bytes:
        byte = BYTE.fullmatch(token) if "ByteFallback" in decoders else None
        return token.replace(space, " ").encode() if byte is None else bytes([int(byte[1], 16)])

    return of_piece


def _word_piece(token: str, prefix: str) -> str:
    """The text of a token: behind a space, unless its prefix says that it goes on with a word, or it is closing."""
    if token.startswith(prefix) and token != prefix:
        return token.removeprefix(prefix)
    return token if set(token) <= CLOSING else f" {token}"


def _first(*numbers: int | None) -> Any:
    return next((number for number in numbers if number is not None), None)
