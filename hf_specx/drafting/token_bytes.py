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
TELLING = {"ByteLevel", "WordPiece", "Metaspace", "Replace", "ByteFallback"}  # decoders
BYTE = re.compile("<0x([0-9A-F]{2})>")
BROKEN = re.compile("([\udc80-\udcff]+)")  # bytes that are no text, as Python decodes them with "surrogateescape"
CLOSING = frozenset(".,;:!?)]}%'\"-/")  # WordPiece does not say where spaces were; before these there is mostly none
PIECE_BYTES, PIECES = 32, 65_536  # how long a piece of text is that is kept with its tokens, and how many are


class TokenBytes:
    """The tokens of one tokenizer as bytes, and pieces of text as its tokens.

    The tokenizer is left as it is; a ValueError says that it does not tell which bytes its tokens stand for.

    Attributes:
        contents: by id, the bytes that a token adds in the middle of a text; b"" where an id has no token.
        special: ids of special tokens, by how they are written; `numbers`: ids of all others, by their bytes.
        end, start, unknown: ids of these special tokens, None where there is none.
        before: ids that it puts before a text, told by what comes before those of "a".
        opens_with_space: whether it puts a space before a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        name, backend = type(tokenizer).__name__, cast(Any, getattr(tokenizer, "backend_tokenizer", None))
        told = f"{name} does not say which bytes its tokens stand for; {FAST}, or choose a draft with the same "
        require(backend is not None, told + "tokenizer.")
        self.backend = copy.deepcopy(backend)  # calls leave padding and truncation in it
        decoders = {part["type"]: part for part in _parts(self.backend.decoder)}
        told = f"{name} is none of byte-level, SentencePiece and WordPiece (its decoder is "
        told += f"{', '.join(sorted(decoders)) or 'None'}), so it is not known what its tokens stand for; choose a "
        require(bool(decoders.keys() & TELLING), told + "draft with the target's own tokenizer.")
        self.backend.no_padding()
        self.backend.no_truncation()
        named, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
        special = set(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}
        self.special = {token: number for token, number in named.items() if number in special}
        self.end = _first(tokenizer.eos_token_id, tokenizer.sep_token_id)
        self.start = _first(tokenizer.bos_token_id, tokenizer.cls_token_id)
        self.unknown = tokenizer.unk_token_id
        self.filler = _first(self.unknown, self.end, self.start, 0)  # for what cannot be written
        self.contents, self.numbers = [b""] * (1 + max(named.values(), default=-1)), dict[bytes, int]()
        read = _reader(decoders)
        # of tokens that mean the same, those for single bytes as `<0x41>` come last
        for token, number in sorted(named.items(), key=lambda item: (bool(BYTE.fullmatch(item[0])), item[1])):
            content = token.encode() if number in added or number in special else read(token)
            self.contents[number] = content
            if content and number not in special:
                self.numbers.setdefault(content, number)
        self.longest = max(map(len, self.numbers), default=0)
        bare, whole = self._ids("a"), self.backend.encode("a")
        self.before: list[int] = whole.ids[: whole.special_tokens_mask.index(0)] if bare else []
        self.backend.encode_special_tokens = True  # what a text says is text
        self.opens_with_space = self.joined(bare).startswith(b" ")
        self._kept = lru_cache(PIECES)(self._encoded)

    def joined(self, ids: Iterable[int]) -> bytes:
        """The bytes of tokens in the middle of a text; none for ids without a token."""
        size = len(self.contents)
        return b"".join(self.contents[number] for number in ids if number < size)

    def encode(self, text: bytes, opens: bool = False) -> list[int]:
        """A piece of text that is not empty as tokens, at least one; `opens` if nothing comes before it.

        They have exactly these bytes wherever the tokenizer has tokens for them: those that it takes itself, without
        the space that it may put before, or else the longest ones from left to right. Where it has none, as for
        capitals if it knows lower case only, they are what it makes of the text.
        """
        return self._encoded(text, opens) if opens or len(text) > PIECE_BYTES else self._kept(text)

    def _encoded(self, text: bytes, opens: bool = False) -> list[int]:
        found: list[int] = []
        for number, part in enumerate(BROKEN.split(text.decode(errors="surrogateescape"))):
            if number % 2:
                found += self._longest(part.encode(errors="surrogateescape"))
            elif part:
                found += self._piece(part, opens and not found)
        return found or [self.filler]

    def _piece(self, text: str, opens: bool) -> list[int]:
        begun, exact = not opens and self.opens_with_space and text.startswith(" "), text.encode()
        ids = self._ids(text[1:] if begun else text)
        content = self.joined(ids)
        if not opens and content == b" " + exact and (first := self._longest(self.contents[ids[0]][1:])):
            return [*first, *ids[1:]]  # all but the space that it has put before
        return ids if opens or content == exact else self._longest(exact) or ids

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return found

    def _longest(self, text: bytes) -> list[int]:
        """The longest tokens from left to right; none if they cannot make up the text."""
        found, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self.longest), start, -1)
            end = next((end for end in ends if text[start:end] in self.numbers), None)
            if end is None:
                return []
            found.append(self.numbers[text[start:end]])
            start = end
        return found


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """The settings of a component of a fast tokenizer, and of the components that it is a sequence of."""
    todo = [] if component is None else [json.loads(component.__getstate__())]
    while todo:
        part = todo.pop()
        yield part
        todo += part.get("decoders", [])


def _reader(decoders: dict[str, dict[str, Any]]) -> Callable[[str], bytes]:
    """A function from a token, as it is in the vocabulary, to its bytes."""
    if "ByteLevel" in decoders:
        meant = {char: bytes([number]) for number, char in bytes_to_unicode().items()}
        return lambda token: b"".join(meant.get(char) or char.encode() for char in token)
    if "WordPiece" in decoders:
        inside = decoders["WordPiece"]["prefix"]
        return lambda token: _word_piece(token, inside).encode()
    space = decoders.get("Metaspace", {}).get("replacement", "▁")

    def read(token: str) -> bytes:
        byte = BYTE.fullmatch(token) if "ByteFallback" in decoders else None
        return token.replace(space, " ").encode() if byte is None else bytes([int(byte[1], 16)])

    return read


def _word_piece(token: str, inside: str) -> str:
    if token.startswith(inside) and token != inside:
        return token.removeprefix(inside)
    return token if set(token) <= CLOSING else f" {token}"


def _first(*numbers: int | None) -> Any:
    return next((number for number in numbers if number is not None), None)
