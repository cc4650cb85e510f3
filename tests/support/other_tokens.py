"""Tokenizers of several kinds, learned from a few sentences, and drafts that have one kind for targets of another."""

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache

import torch
from tiny import tiny
from tiny_tokenizer import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_specx import DraftTargetPair
from hf_specx.drafting.vocabulary_map import VocabularyMap, vocabulary_map


TEXTS = [
    "The cat sat on the mat, and the dog sat there too. Don't they like that? Then they ran to the other cats.",
    "def count(values: list[int]) -> int:\n    return sum(values)  # the number of values\n",
    "Ångström naïve café déjà vu; the naïve cat sat in the café. 🙂 🙂 🙃 日本語の文章 日本語",
    "There are 12 cats and 345 dogs in the house; nobody counted the other animals that ran there.",
]
PROMPTS = [
    "The cat sat there. 🙂 Then",
    "def count(values",
    "naïve 日本語",
    "the dog\n\n  ran there",
    "a",
    "Don't they like the café?",
    "12 cats and 345",
    "the other animals sat on the mat and ran",
]


def _unigram(size: int) -> PreTrainedTokenizerFast:
    """As SentencePiece makes them: a space is part of the next token, and one is put before a text."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    made.train_from_iterator(
        TEXTS * 9, trainers.UnigramTrainer(vocab_size=size, special_tokens=special, unk_token="<unk>")
    )
    return _begun(made)


def _begun(made: Tokenizer) -> PreTrainedTokenizerFast:
    """Texts begin with a special token."""
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **roles)


def _fallback(size: int) -> PreTrainedTokenizerFast:
    """As Llama 2 has it: spaces as above, and every byte by itself, so that some tokens mean the same."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>"]
    made.train_from_iterator(TEXTS * 9, trainers.BpeTrainer(vocab_size=size - 256, special_tokens=special))
    values = json.loads(made.to_str())
    learned = [*values["model"]["vocab"]]
    tokens = [*special, *(f"<0x{number:02X}>" for number in range(256)), *learned[len(special) :]]
    values["model"]["vocab"] = {token: number for number, token in enumerate(tokens)}
    return _begun(Tokenizer.from_str(json.dumps(values)))


def _word_piece(lowercase: bool = False) -> PreTrainedTokenizerFast:
    """Of all characters, at the start of a word and inside, and words that occur twice; its trainer has no seed."""
    whole = " ".join(TEXTS).lower() if lowercase else " ".join(TEXTS)
    counts = Counter(re.findall(r"\w+", whole))
    words = [word for word, count in counts.items() if count > 1 and len(word) > 1]
    characters = sorted({*whole} - {" ", "\n"})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokens = [*special, *characters, *(f"##{character}" for character in characters), *words, "##s", "##re", "##ed"]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    made = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    made.add_special_tokens(special)
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    roles = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **roles)


USER = ["<user>"]
KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": lambda: tiny_tokenizer(TEXTS, size=420, more=USER),
    "byte-level, other merges": lambda: tiny_tokenizer(TEXTS[1:], size=380, more=USER),
    "byte-level, with a space before": lambda: tiny_tokenizer(TEXTS[:3], size=400, prefix=True, more=USER),
    "unigram": lambda: _unigram(180),
    "byte fallback": lambda: _fallback(440),
    "word pieces": lambda: _word_piece(),
    "word pieces in lower case": lambda: _word_piece(lowercase=True),
}


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    return KINDS[kind]()


@cache
def target_of(kind: str, **changes) -> PreTrainedModel:
    """A random target with as many tokens as this kind of tokenizer, which goes by the last token most."""
    target = tiny(vocab_size=len(tokenizer_of(kind)), **changes)
    for name, weight in target.named_parameters():
        if any(part in name for part in ("o_proj", "down_proj")):
            weight.data *= 0.02
    return target


def vocabularies_of(kind: str, draft_kind: str) -> VocabularyMap:
    """The map between two kinds."""
    tokenizers = tokenizer_of(kind), tokenizer_of(draft_kind)
    return vocabulary_map(*tokenizers, (len(tokenizers[0]), len(tokenizers[1])))


@cache
def draft_of(kind: str, draft_kind: str, **changes) -> PreTrainedModel:
    """A draft with another kind of tokenizer that mostly agrees with `target_of(kind)`.

    It is the target with embeddings for the draft's own tokens: those of the target's that mean the same, or the mean
    of those that spell them.
    """
    target, vocabularies = target_of(kind, **changes), vocabularies_of(kind, draft_kind)
    draft = tiny(seed=1, vocab_size=len(tokenizer_of(draft_kind)), **changes)
    own, weights = draft.state_dict(), target.state_dict()
    generator = torch.Generator().manual_seed(2)
    for name, weight in own.items():
        if weight.shape == weights[name].shape:
            moved = 0.02 * weight.std() * torch.randn(weight.shape, generator=generator)
            weight.copy_(weights[name] + (moved if weight.ndim > 1 else 0))
    for number, content in enumerate(vocabularies.draft.contents):
        meant = vocabularies.to_target[number]
        spelled = [meant] if meant >= 0 else vocabularies.target.encode(content)
        for name, weight in own.items():
            if weight.shape != weights[name].shape:
                weight[number] = weights[name][spelled].mean(0)
    return draft


def pair_of(kind: str, draft_kind: str) -> DraftTargetPair:
    """A pair of both."""
    own = tokenizer_of(draft_kind)
    pair = DraftTargetPair(target_of(kind), draft_of(kind, draft_kind), tokenizer_of(kind), draft_tokenizer=own)
    pair.config.prompts = PROMPTS[3:6]
    return pair


def texts(kind: str, rows: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of unequal length, some with special tokens of a chat."""
    tokenizer = tokenizer_of(kind)
    chosen = [f"{'<user>' if row % 3 == 1 else ''}{PROMPTS[row % len(PROMPTS)]}" for row in range(rows)]
    encoded = tokenizer(chosen, return_tensors="pt", padding=True)
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}
