"""A tokenizer's vocabulary is listed once, and again where tokens were added."""

import copy

import pytest
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from hf_specx.common.tokenizers import same_tokens, vocabulary_of


def test_a_vocabulary_is_listed_once_and_added_tokens_are_seen(monkeypatch: pytest.MonkeyPatch):
    tokenizer = tiny_tokenizer()
    other = copy.deepcopy(tokenizer)
    assert same_tokens(tokenizer, other)
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "get_vocab", pytest.fail)
        before = vocabulary_of(other)
        assert same_tokens(tokenizer, other)
    other.add_tokens(["<one more>"])
    assert not same_tokens(tokenizer, other)
    assert vocabulary_of(other).largest == before.largest + 1
