"""What tells one call of `complete` from another, so that no file holds texts of two."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from grammar_cases import make
from head_files import random_head, write
from tiny import near, tiny
from tiny_tokenizer import tiny_tokenizer
from transformers import LogitsProcessor

from hf_specx import DraftHead, DraftTargetPair, EarlyExitDraft, SuffixDraft
from hf_specx.pairs.fingerprint import arguments_of, json_value


@pytest.fixture(scope="module")
def pair() -> DraftTargetPair:
    tokenizer = tiny_tokenizer()
    target = tiny(vocab_size=len(tokenizer))
    return DraftTargetPair(target, near(target, 0.1), tokenizer)


class Holding(LogitsProcessor):
    """Does what it is told by what it holds."""

    stateless = True

    def __init__(self, content: Any):
        self.content = content

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def below(limit: int):
    return lambda row, text: [token for token in range(9) if token < limit]


HELD: dict[str, tuple[Any, Any, Any]] = {  # equal ones, and another
    "number": (0.5, 0.5, 0.6),
    "list": ([1, [2]], [1, [2]], [1, [3]]),
    "set": ({"a", "b"}, {"b", "a"}, {"a", "c"}),
    "tensor": (torch.ones(2), torch.ones(2), torch.zeros(2)),
    "dtype": (torch.float16, torch.float16, torch.bfloat16),
    "bytes": (b"a", b"a", b"b"),
    "function": (below(3), below(3), below(4)),
    "code": (lambda x: x + 1, lambda x: x + 1, lambda x: x + 2),
    "method": ("a".join, "a".join, "b".join),
    "object": (Holding(Holding([1])), Holding(Holding([1])), Holding(Holding([2]))),
}


@pytest.mark.parametrize("kind", HELD)
def test_equal_processors_are_the_same_and_others_are_not(pair: DraftTargetPair, kind: str):
    def arguments(content: Any) -> str:
        return json.dumps(arguments_of(pair, 0, {"logits_processor": [Holding(content)]}))

    one, same, other = HELD[kind]
    assert arguments(one) == arguments(same) != arguments(other)


@pytest.mark.parametrize("library", ["outlines", "outlines llguidance", "prefix function"])
def test_grammars_are_told_apart(library: str):
    pytest.importorskip("outlines")
    values = [json.dumps(json_value([make(library, case)])) for case in ("date", "date", "words")]
    assert values[0] == values[1] != values[2]


def test_what_cannot_be_told_from_others_says_what_it_does_or_is_refused(pair: DraftTargetPair, tmp_path: Path):
    processor, options = Holding(threading.Lock()), {"max_new_tokens": 2}
    with pytest.raises(ValueError, match="lock .*attribute fingerprint"):
        pair.complete(["the cat"], out=tmp_path / "done.jsonl", logits_processor=[processor], **options)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match="generator"):
        json_value(Holding(token for token in "ab"))
    pair.complete(["the cat"], logits_processor=[processor], **options)
    processor.fingerprint = "nothing"
    pair.complete(["the cat"], out=tmp_path / "done.jsonl", logits_processor=[processor], **options)
    processor.fingerprint = "something"
    with pytest.raises(ValueError, match="logits_processor=.*nothing"):
        pair.complete(["the cat"], out=tmp_path / "done.jsonl", logits_processor=[processor], **options)


def test_drafts_of_other_settings_are_told_apart(pair: DraftTargetPair):
    """Under "block" the text depends on what was drafted, and how; the weights are the same."""
    one, same, other = (DraftTargetPair(pair.target, EarlyExitDraft(count), pair.tokenizer) for count in (1, 1, 2))
    assert arguments_of(one, 0, {}) == arguments_of(same, 0, {}) != arguments_of(other, 0, {})
    suffixes = [DraftTargetPair(pair.target, SuffixDraft(), pair.tokenizer) for _ in range(2)]
    suffixes[0].complete(["the cat"], max_new_tokens=8)
    assert arguments_of(suffixes[0], 0, {}) == arguments_of(suffixes[1], 0, {}) != arguments_of(one, 0, {})
    matching = DraftTargetPair(pair.target, pair.draft, pair.tokenizer)
    matching.strategy.tokenizer_match = "tokens"
    assert arguments_of(matching, 0, {}) != arguments_of(pair, 0, {})


def test_heads_and_tokenizers_are_told_apart(pair: DraftTargetPair, tmp_path: Path):
    """Two of one form; of heads the weights alone are others."""
    target = tiny(vocab_size=280, num_hidden_layers=8)
    folders = [write(random_head(vocab=280, seed=seed), tmp_path / str(seed)) for seed in (0, 1)]
    heads = [DraftHead.from_pretrained(folder, target=target) for folder in folders]
    tokenizers = tiny_tokenizer(["some words"]), tiny_tokenizer(["mose wodrs"])
    assert len(tokenizers[0]) == len(tokenizers[1])
    pairs = [DraftTargetPair(target, head, tokenizers[0]) for head in heads]
    pairs.append(DraftTargetPair(target, heads[0], tokenizers[1]))
    arguments = [arguments_of(each, 0, {}) for each in pairs]
    assert all(arguments.count(each) == 1 for each in arguments)
