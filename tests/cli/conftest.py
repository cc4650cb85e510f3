"""A saved pair, and a pair that every id loads."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import near, tiny
from tiny_tokenizer import SIZES, TEXTS, tiny_tokenizer
from transformers import PreTrainedModel

from hf_specx import DraftTargetPair
from hf_specx.hub.pair_config import ModelSource, PairConfig


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a pair without prompts of its own."""
    path, target = tmp_path_factory.mktemp("pairs") / "my-pair", tiny(**SIZES)
    DraftTargetPair(target, near(target, 0.3), tiny_tokenizer()).save_pretrained(path)
    return str(path)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """A file of prompts."""
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    return str(tmp_path / "prompts.txt")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[PreTrainedModel], DraftTargetPair]:
    """Makes of a target the pair that every id loads."""

    def make(target: PreTrainedModel) -> DraftTargetPair:
        config = PairConfig(ModelSource(), ModelSource(subfolder="draft"), num_draft_tokens=3, prompts=list(TEXTS))
        pair = DraftTargetPair(target, near(target, 0.1), tiny_tokenizer(), config)
        monkeypatch.setattr(DraftTargetPair, "from_pretrained", lambda name, **options: pair)
        return pair

    return make


@pytest.fixture
def pair(loaded: Callable[[PreTrainedModel], DraftTargetPair]) -> DraftTargetPair:
    """In float64: in float32 rounding decides which of two tokens is the last of top-k."""
    return loaded(tiny(**SIZES).double())
