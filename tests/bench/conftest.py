"""Fixtures of these tests."""

import pytest
from transformers import PreTrainedModel
from zoo import build


@pytest.fixture
def t5() -> PreTrainedModel:
    """With as many tokens as `tiny_tokenizer` needs."""
    model = build("seq2seq", "t5")
    model.resize_token_embeddings(280)
    return model
