"""What a call asks of a tokenizer's vocabulary, found once: to list 150,000 tokens takes a tenth of a second."""

import hashlib
import json
from typing import NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase


class Vocabulary(NamedTuple):
    """All tokens of a tokenizer.

    Attributes:
        size: how many tokens there were when this was found.
        digest: SHA-256 of all tokens and their ids; the same for tokenizers that have the same.
        largest: the largest id, -1 if there are no tokens.
    """

    size: int
    digest: str
    largest: int


KNOWN: WeakKeyDictionary[PreTrainedTokenizerBase, Vocabulary] = WeakKeyDictionary()


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """The vocabulary of a tokenizer; found anew only where tokens were added to it."""
    found = KNOWN.get(tokenizer)
    size = len(tokenizer if hasattr(tokenizer, "__len__") else tokenizer.get_vocab())  # the second takes longer
    if found is None or found.size != size:
        ids = tokenizer.get_vocab()
        digest = hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()
        found = KNOWN[tokenizer] = Vocabulary(size, digest, max(ids.values(), default=-1))
    return found


def same_tokens(tokenizer: PreTrainedTokenizerBase | None, draft_tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether each token has the same id in both; also where one of them is not known."""
    if tokenizer is None or draft_tokenizer is None or tokenizer is draft_tokenizer:
        return True
    return vocabulary_of(tokenizer).digest == vocabulary_of(draft_tokenizer).digest
