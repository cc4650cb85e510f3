"""Rows of unequal length as one batch."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase


def padded_rows(
    rows: Sequence[Sequence[int] | torch.Tensor], side: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` [B, L] int64, with pads on the "left" or "right".

    Pads are the tokenizer's pad token, else its end token, else 0: processors see them in the text.
    """
    ids = [torch.as_tensor(row) for row in rows]
    ones = [torch.ones_like(row) for row in ids]
    known = () if tokenizer is None else (tokenizer.pad_token_id, tokenizer.eos_token_id)
    pad = next((token for token in known if token is not None), 0)
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad, padding_side=side),
        "attention_mask": pad_sequence(ones, batch_first=True, padding_side=side),
    }
