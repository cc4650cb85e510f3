"""The vocabularies of tokenizers, cached since reading one takes a tenth of a second; rows of tokens as a batch."""

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase


class Vocabulary(NamedTuple):
    """Figures of a vocabulary: its size, the SHA-256 of all tokens with their ids, the largest id (-1 if none)."""

    size: int
    digest: str
    largest: int


VOCABULARIES: WeakKeyDictionary[PreTrainedTokenizerBase, Vocabulary] = WeakKeyDictionary()


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """The vocabulary of a tokenizer; computed anew only where tokens were added to it."""
    vocabulary = VOCABULARIES.get(tokenizer)
    size = len(tokenizer if hasattr(tokenizer, "__len__") else tokenizer.get_vocab())  # the second takes longer
    if vocabulary is None or vocabulary.size != size:
        ids = tokenizer.get_vocab()
        digest = hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()
        vocabulary = Vocabulary(size, digest, max(ids.values(), default=-1))
        VOCABULARIES[tokenizer] = vocabulary
    return vocabulary


def same_tokens(tokenizer: PreTrainedTokenizerBase | None, draft_tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether each token has the same id in both; True where one of them is not known."""
    if tokenizer is None or draft_tokenizer is None or tokenizer is draft_tokenizer:
        return True
    return vocabulary_of(tokenizer).digest == vocabulary_of(draft_tokenizer).digest


def padded_rows(
    rows: Sequence[Sequence[int] | torch.Tensor], side: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` [B, L] int64, with pads on the "left" or "right".

    Pads are the tokenizer's pad token, else its end token, else 0: processors see them in the text.
    """
    ids = [row if isinstance(row, torch.Tensor) else torch.as_tensor(row, device="cpu") for row in rows]
    ones = [torch.ones_like(row) for row in ids]
    special = () if tokenizer is None else (tokenizer.pad_token_id, tokenizer.eos_token_id)
    pad = next((token for token in special if token is not None), 0)
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad, padding_side=side),
        "attention_mask": pad_sequence(ones, batch_first=True, padding_side=side),
    }
