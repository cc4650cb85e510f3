"""A tokenizer's vocabulary is listed once, and not in each call."""

import copy

import pytest
import torch
from tiny import tiny
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from hf_specx import SpeculativeDecoding
from hf_specx.common.tokenizers import same_tokens, vocabulary_of


@pytest.mark.parametrize("same", [True, False])
def test_later_calls_list_no_vocabulary(monkeypatch, same):
    tokenizer, draft_tokenizer = tiny_tokenizer(), tiny_tokenizer(fewer_merges=0 if same else 20)
    target, draft = tiny(seed=0, vocab_size=len(tokenizer)), tiny(seed=1, vocab_size=len(draft_tokenizer))
    ids = torch.tensor([[5, 6, 7]])
    strategy = SpeculativeDecoding(draft, tokenizer=tokenizer, draft_tokenizer=draft_tokenizer)
    target.generate(ids, max_new_tokens=4, custom_generate=strategy)
    monkeypatch.setattr(PreTrainedTokenizerFast, "get_vocab", pytest.fail)
    target.generate(ids, max_new_tokens=4, custom_generate=strategy)


def test_added_tokens_are_seen():
    tokenizer = tiny_tokenizer()
    other = copy.deepcopy(tokenizer)
    assert same_tokens(tokenizer, other)
    before = vocabulary_of(other)
    other.add_tokens(["<one more>"])
    assert not same_tokens(tokenizer, other)
    assert vocabulary_of(other).largest == before.largest + 1
