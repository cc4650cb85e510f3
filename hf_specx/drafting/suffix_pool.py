"""Where the last tokens of a text stood before: in growing texts, and in a pool of texts of earlier calls."""

import os
import threading
from array import array
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_specx.common.errors import require
from hf_specx.common.tokenizers import vocabulary_of

from .drafter import check_number


FORMAT = "hf_specx.SuffixPool 1"
DEPTH = 32  # tokens that are compared at most
MAX_PLACES = 64  # places that are compared, the latest first
MAX_CONTINUATIONS = 16  # places after a match that are used
OFFSET_BITS = 32
OFFSET = (1 << OFFSET_BITS) - 1
NOWHERE = -1


class NGrams:
    """Texts that grow, and for each n-gram, n = `length`, the `latest` place after it; no match is shorter.

    From a place the `earlier` one after the same n-gram is known, and so on. A place is a text's number times 2**32,
    plus the offset of the token that stands there. It takes 12 bytes a token, and some 120 for each n-gram.
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
                ngram = self._ngram(text, offset)
                place = self.latest.get(ngram, NOWHERE)
                self.latest[ngram] = number << OFFSET_BITS | offset
            earlier.append(place)
            text.append(token)

    def remove(self, number: int) -> None:
        """Forget a text. Of n-grams that stand in it places before those in it may be lost as well."""
        text, earlier = self.texts.pop(number), self.earlier.pop(number)
        for offset in range(self.length, len(text)):
            ngram = self._ngram(text, offset)
            place = self.latest.get(ngram, NOWHERE)
            while place >> OFFSET_BITS == number:
                place = earlier[place & OFFSET]
            if place >> OFFSET_BITS in self.texts:
                self.latest[ngram] = place
            else:
                self.latest.pop(ngram, None)

    def find(self, text: array, max_match: int, count: int) -> tuple[int, list[list[int]]]:
        """The longest match with the end of a text, and up to `count` tokens after each place where it stands.

        The text may be one of these; from its own end on, what follows in it goes round. At most `max_match` tokens
        are compared. Returns how many match, 0 for none, and lists of tokens, the latest place first.
        """
        longest, places = 0, list[int]()
        place = self.latest.get(self._ngram(text, len(text)), NOWHERE)
        for _ in range(MAX_PLACES):
            number, offset = place >> OFFSET_BITS, place & OFFSET
            if number not in self.texts:  # none, or in a text that was removed
                break
            length = _shared_suffix_length(text, self.texts[number], offset, max_match)
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append(place)
            if longest == max_match and len(places) == MAX_CONTINUATIONS:
                break
            place = self.earlier[number][offset]
        return longest, [self._following(text, place, count) for place in places[:MAX_CONTINUATIONS]]

    def _ngram(self, text: array, offset: int) -> bytes:
        """The tokens before an offset; fewer, as no key is, where the text begins."""
        return text[max(0, offset - self.length) : offset].tobytes()

    def _following(self, text: array, place: int, count: int) -> list[int]:
        other, offset = self.texts[place >> OFFSET_BITS], place & OFFSET
        following = other[offset : offset + count].tolist()
        if len(following) < count and other is text:
            following = (following * -(-count // len(following)))[:count]
        return following


def _shared_suffix_length(text: array, other: array, offset: int, max_length: int) -> int:
    """How many tokens at the end of `text` also stand before an offset of another one, at most `max_length`."""
    max_length = min(max_length, len(text), offset)
    if text[len(text) - max_length :] == other[offset - max_length : offset]:
        return max_length
    last, length = len(text) - 1, 0
    while text[last - length] == other[offset - 1 - length]:
        length += 1
    return length


class SuffixPool:
    """A bounded number of tokens of earlier texts, shared between calls; the oldest texts leave first.

    It takes some 16 bytes a token, and 120 for each pair of tokens that stands in it. Threads may read and add at
    once.

    Args:
        max_tokens: what it holds at most; of a longer text it keeps the end.
        vocab_size: of the models whose texts it holds; None takes that of the first target that it serves.
        tokenizer: of the texts; None takes that of the first target that it serves and whose tokenizer is known, as
            it is to a pair, and to a strategy with `tokenizer=`.

    Attributes:
        vocabulary: of the tokenizer, by `vocabulary_of`; None while that is not known.

    Raises:
        ValueError: if a number is not an int of 1 or more.
    """

    def __init__(
        self,
        max_tokens: int = 1_000_000,
        vocab_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        check_number("max_tokens", max_tokens)
        if vocab_size is not None:
            check_number("vocab_size", vocab_size)
        self.max_tokens, self.vocab_size = max_tokens, vocab_size
        self.vocabulary = None if tokenizer is None else vocabulary_of(tokenizer).digest
        self._texts: dict[int, array] = {}  # by a number that grows
        self._indices: dict[int, NGrams] = {}  # by the shortest match that was asked for
        self._num_added = 0
        self._num_tokens = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which have the same texts and go their own way."""
        with self._lock:
            return vars(self) | {"_texts": dict(self._texts), "_indices": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def __repr__(self) -> str:
        return f"SuffixPool({len(self)} of at most {self.max_tokens} tokens, {len(self._texts)} texts)"

    def __len__(self) -> int:
        """Tokens that it holds."""
        return self._num_tokens

    @property
    def texts(self) -> list[array]:
        """The texts that it holds, array("i") of token ids, the oldest first."""
        with self._lock:
            return list(self._texts.values())

    def add(self, *texts: Iterable[int] | torch.Tensor) -> None:
        """Add texts as token ids, each a list, or a tensor [n].

        Raises:
            ValueError: if an id is negative, not an int, or outside of the vocabulary.
        """
        ids_of_texts = [_token_ids(text)[-self.max_tokens :] for text in texts]
        ids_of_texts = [ids for ids in ids_of_texts if ids]
        with self._lock:
            limit = self.vocab_size or 2**31
            for ids in ids_of_texts:
                for number in (min(ids), max(ids)):
                    require(
                        0 <= number < limit,
                        f"token id {number} is outside of the pool's vocabulary, 0 to {limit - 1}; add texts of the "
                        "target's own tokenizer.",
                    )
            for ids in ids_of_texts:
                self._num_added += 1
                self._texts[self._num_added] = ids
                self._num_tokens += len(ids)
                for index in self._indices.values():
                    index.extend(self._num_added, ids)
                while self._num_tokens > self.max_tokens:
                    self._remove_oldest()

    def _remove_oldest(self) -> None:
        number = next(iter(self._texts))
        self._num_tokens -= len(self._texts.pop(number))
        for index in self._indices.values():
            index.remove(number)

    def find(self, text: array, min_match: int, max_match: int, count: int) -> tuple[int, list[list[int]]]:
        """As `NGrams.find`, for matches of `min_match` tokens or more."""
        with self._lock:
            if min_match not in self._indices:
                self._indices[min_match] = NGrams(min_match)
                for number, ids in self._texts.items():
                    self._indices[min_match].extend(number, ids)
            return self._indices[min_match].find(text, max_match, count)

    def check(self, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Raise ValueError if the texts are of another vocabulary than that of a target of so many tokens.

        From then on the pool serves none of another number, or with another tokenizer.
        """
        vocabulary = None if tokenizer is None else vocabulary_of(tokenizer).digest
        with self._lock:
            require(
                None in (vocabulary, self.vocabulary) or vocabulary == self.vocabulary,
                "the pool's texts are of another tokenizer than the target's; use a SuffixPool of its own for each.",
            )
            pool_size = self.vocab_size or max([vocab_size, *(max(text) + 1 for text in self._texts.values())])
            require(
                pool_size == vocab_size,
                f"the pool's texts are of a vocabulary of {pool_size} tokens, and the target has {vocab_size}; use a "
                "SuffixPool of its own for each tokenizer.",
            )
            self.vocab_size = vocab_size
            self.vocabulary = self.vocabulary or vocabulary

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `load` and `torch.load` read: the token ids of all texts, and of which vocabulary."""
        texts = self.texts
        content = {
            "format": FORMAT,
            "max_tokens": self.max_tokens,
            "vocab_size": self.vocab_size,
            "vocabulary": self.vocabulary,
            "tokens": torch.tensor(list(chain(*texts)), dtype=torch.int32, device="cpu"),
            "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int64, device="cpu"),
        }
        temporary = Path(path).with_name(f"{Path(path).name}.{os.getpid()}.{threading.get_ident()}")
        torch.save(content, temporary)
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "SuffixPool":
        """The pool of a file that `save` wrote. Nothing in the file is run.

        Raises:
            ValueError: if the file holds anything else.
        """
        try:
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
            require(content["format"] == FORMAT, "another format")
            pool = cls(content["max_tokens"], content["vocab_size"])
            pool.vocabulary = content.get("vocabulary")
            require(isinstance(pool.vocabulary, str | None), "no vocabulary")
            pool.add(*content["tokens"].split(content["lengths"].tolist()))
        except OSError:
            raise
        except Exception as error:  # whatever torch and a damaged file bring about
            message = f"{os.fspath(path)} was not written by SuffixPool.save, or is damaged; give another file."
            raise ValueError(message) from error
        return pool


def _token_ids(text: Iterable[int] | torch.Tensor) -> array:
    """The ids of a text as array("i"); raises ValueError if it has anything else."""
    try:
        return array("i", text.tolist() if isinstance(text, torch.Tensor) else text)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a text of a SuffixPool is a list of token ids, or a tensor [n]: {error}.") from None
