"""A tiny byte-level tokenizer, learned from a few words."""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


END, PAD = "<end>", "<pad>"
TEXTS = ("the cat", "a dog [bold]sat[/bold] on", "on the mat")


def tiny_tokenizer(texts: Sequence[str] = TEXTS, fewer_merges: int = 0, **special: str) -> PreTrainedTokenizerFast:
    """At most 280 tokens: the two special ones, all bytes, and some merges.

    Args:
        texts: what they are learned from.
        fewer_merges: the last of them, left out; the tokens stay.
        **special: other special tokens than `END` and `PAD`.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=[END, PAD], initial_alphabet=alphabet)
    bpe.train_from_iterator(list(texts) * 9, trainer)
    if fewer_merges:
        values = json.loads(bpe.to_str())
        del values["model"]["merges"][-fewer_merges:]
        bpe = Tokenizer.from_str(json.dumps(values))
    special = {"eos_token": END, "pad_token": PAD, "padding_side": "left"} | special
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special)
