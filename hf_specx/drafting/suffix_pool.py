"""Texts of earlier calls, in which a suffix draft looks for what follows."""

import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_specx.common.errors import is_int, require
from hf_specx.common.tokenizers import vocabulary_of

from .suffix_index import SuffixIndex


MERGED = 4  # an index that is at most so many times as large as the one after it is merged with it
FREED = 8  # where the pool is full, the oldest texts leave until one part in so many is free
FORMAT = "hf_specx.SuffixPool 1"


class SuffixPool:
    """A bounded number of tokens of earlier texts, shared between calls; the oldest texts leave first.

    It takes 12 bytes a token and about 250 a text; while texts are added, some 100 bytes more for each token that is
    sorted. Threads may read and add at once: a reader goes on with what was there when it began to look.

    Args:
        max_tokens: what it holds at most; of a longer text it keeps the end.
        vocab_size: of the models whose texts it holds; None takes that of the first target that it serves.
        tokenizer: of the texts; None takes that of the first target that it serves and whose tokenizer is known, as
            it is to a pair, and to a strategy with `tokenizer=`.

    Attributes:
        indices: tuple of `SuffixIndex`, the oldest texts first; replaced as a whole, never changed.
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
        check_number("max_tokens", max_tokens, 1)
        if vocab_size is not None:
            check_number("vocab_size", vocab_size, 1)
        self.max_tokens, self.vocab_size = max_tokens, vocab_size
        self.vocabulary = None if tokenizer is None else vocabulary_of(tokenizer).digest
        self.indices: tuple[SuffixIndex, ...] = ()
        self._added, self._largest_id = 0, -1
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"SuffixPool({len(self)} of at most {self.max_tokens} tokens, {len(self.texts)} texts)"

    def __len__(self) -> int:
        """Tokens that it holds."""
        return sum(map(len, self.indices))

    @property
    def texts(self) -> list[array]:
        """The texts that it holds, array("i") of token ids, the oldest first."""
        return [text for index in self.indices for text in index.texts.values()]

    def add(self, *texts: Iterable[int] | torch.Tensor) -> None:
        """Add texts as token ids, each a list, or a tensor [n]; many at once take less time than one by one.

        Raises:
            ValueError: if an id is negative, not an int, or outside of the vocabulary.
        """
        given = _newest([ids for text in texts if (ids := _token_ids(text)[-self.max_tokens :])], self.max_tokens)
        with self._lock:
            self._check_ids(given)
            new = {self._added + number: text for number, text in enumerate(given)}
            self._added += len(new)
            self._largest_id = max([self._largest_id, *map(max, given)])
            indices = list(self.indices)
            while indices and len(indices[-1]) <= MERGED * sum(map(len, new.values())):
                new = {**indices.pop().texts, **new}
            if new:
                self.indices = tuple(_trimmed([*indices, SuffixIndex(new)], self.max_tokens))

    def meet(self, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Serve a target of so many tokens, and from then on none of another number, or with another tokenizer.

        Raises:
            ValueError: if the texts are those of another vocabulary.
        """
        vocabulary = None if tokenizer is None else vocabulary_of(tokenizer).digest
        with self._lock:
            told = "the pool's texts are of another tokenizer than the target's; use a SuffixPool of its own for each."
            require(None in (vocabulary, self.vocabulary) or vocabulary == self.vocabulary, told)
            if self.vocab_size not in (None, vocab_size) or self._largest_id >= vocab_size:
                raise ValueError(
                    f"the pool's texts are of a vocabulary of {self.vocab_size or self._largest_id + 1} tokens, and "
                    f"the target has {vocab_size}; use a SuffixPool of its own for each tokenizer."
                )
            self.vocab_size, self.vocabulary = vocab_size, self.vocabulary or vocabulary

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `load` and `torch.load` read: the token ids of all texts, and of which vocabulary."""
        tokens, lengths = array("i"), []
        for text in self.texts:
            tokens.extend(text)
            lengths.append(len(text))
        content = {"format": FORMAT, "max_tokens": self.max_tokens, "vocab_size": self.vocab_size}
        content |= {"vocabulary": self.vocabulary}
        content |= {"tokens": torch.tensor(tokens, dtype=torch.int32), "lengths": torch.tensor(lengths)}
        written = Path(path).with_name(f"{Path(path).name}.{os.getpid()}.{threading.get_ident()}")
        torch.save(content, written)
        written.replace(path)

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
            told = f"{os.fspath(path)} was not written by SuffixPool.save, or is damaged; give another file."
            raise ValueError(told) from error
        return pool

    def _check_ids(self, texts: list[array]) -> None:
        limit = self.vocab_size or 2**31
        for text in texts:
            wrong = min(text) if min(text) < 0 else max(text)
            if not 0 <= wrong < limit:
                raise ValueError(
                    f"token id {wrong} is outside of the pool's vocabulary, 0 to {limit - 1}; add texts of the "
                    "target's own tokenizer."
                )


def check_number(name: str, number: Any, least: int) -> None:
    """Refuse what is not an int of `least` or more.

    Raises:
        ValueError: for anything else.
    """
    require(is_int(number) and number >= least, f"{name}={number!r} is not an int of {least} or more; give one.")


def _token_ids(text: Iterable[int] | torch.Tensor) -> array:
    try:
        return array("i", text.tolist() if isinstance(text, torch.Tensor) else text)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a text of a SuffixPool is a list of token ids, or a tensor [n]: {error}.") from None


def _newest(texts: list[array], max_tokens: int) -> list[array]:
    """The last texts, as many as fit."""
    totals = list(accumulate(len(text) for text in reversed(texts)))
    return texts[len(texts) - bisect_right(totals, max_tokens) :]


def _trimmed(indices: list[SuffixIndex], max_tokens: int) -> list[SuffixIndex]:
    """Without the oldest texts, where there are too many tokens; the newest text stays."""
    surplus = sum(map(len, indices)) - max_tokens
    if surplus <= 0:
        return indices
    surplus += max_tokens // FREED
    sizes = [(number, len(text)) for index in indices for number, text in index.texts.items()]
    leaving = sum(total < surplus for total in accumulate(size for _, size in sizes)) + 1
    least = sizes[min(leaving, len(sizes) - 1)][0]
    return [kept for index in indices if (kept := index.since(least)).texts]
