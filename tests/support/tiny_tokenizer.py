"""A tiny byte-level tokenizer, learned from a few words, and models that read it in folders."""

import json
from collections.abc import Sequence
from pathlib import Path

from tiny import near, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast


END, PAD = "<end>", "<pad>"
TEXTS = ("the cat", "a dog [bold]sat[/bold] on", "on the mat")
SIZES = {"vocab_size": 280, "eos_token_id": 0, "pad_token_id": 1}  # of a model that reads it


def tiny_tokenizer(
    texts: Sequence[str] = TEXTS,
    fewer_merges: int = 0,
    size: int = 280,
    prefix: bool = False,
    more: Sequence[str] = (),
    **special: str,
) -> PreTrainedTokenizerFast:
    """At most `size` tokens: the two special ones and `more`, all bytes, and some merges.

    Args:
        texts: what they are learned from.
        fewer_merges: the last of them, left out; the tokens stay.
        prefix: whether a text begins with a space.
        **special: other special tokens than `END` and `PAD`.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END, PAD, *more], initial_alphabet=alphabet)
    bpe.train_from_iterator(list(texts) * 9, trainer)
    if fewer_merges:
        values = json.loads(bpe.to_str())
        del values["model"]["merges"][-fewer_merges:]
        bpe = Tokenizer.from_str(json.dumps(values))
    special = {"eos_token": END, "pad_token": PAD, "padding_side": "left"} | special
    return PreTrainedTokenizerFast(tokenizer_object=bpe, additional_special_tokens=[*more], **special)


def saved(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """The folder, with both in it."""
    for part in (model, tokenizer):
        if part is not None:
            part.save_pretrained(folder)
    return str(folder)


def saved_models(root: Path, noise: float, **changes) -> dict[str, str]:
    """Folders of a "target", and of drafts for it: the "same", a "draft" that is moved by that noise, the same one
    "bare", without a tokenizer, and a "stranger" with one of its own."""
    target, own = tiny(**SIZES | changes), tiny_tokenizer()
    draft, other = near(target, noise), tiny_tokenizer(["some other words"])
    models = {"target": (target, own), "same": (target, own), "draft": (draft, own), "bare": (draft, None)}
    models["stranger"] = tiny(**SIZES | changes), other
    return {name: saved(root / name, *parts) for name, parts in models.items()}
