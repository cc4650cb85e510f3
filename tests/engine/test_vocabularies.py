"""Whether the tokens of a draft mean what the target's mean, where not both tokenizers were given."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny import VOCAB_SIZE, prompts, tiny
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_specx import SpeculativeDecoding


WORDS = [f"w{number}" for number in range(VOCAB_SIZE)]
OTHERS = WORDS[::-1]


def tokenizer_of(words: Sequence[str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)})))


def loaded(folder: Path, words: Sequence[str] | None = None, seed: int = 0) -> PreTrainedModel:
    """A model loaded from a folder, in which its tokenizer may lie too."""
    tiny(seed=seed).save_pretrained(folder)
    if words is not None:
        tokenizer_of(words).save_pretrained(folder)
    return type(tiny()).from_pretrained(folder).eval()


def call(target: PreTrainedModel, draft: PreTrainedModel, **options) -> None:
    strategy = SpeculativeDecoding(draft, num_draft_tokens=2, **options)
    target.generate(**prompts(2, width=6), max_new_tokens=3, do_sample=False, custom_generate=strategy)


@pytest.mark.parametrize("given", [{}, {"tokenizer": tokenizer_of(WORDS)}, {"draft_tokenizer": tokenizer_of(OTHERS)}])
def test_files_of_other_tokenizers(given: dict, tmp_path: Path):
    """One tokenizer may be given, the other is the one beside the model; without one nothing can be compared."""
    target, draft = loaded(tmp_path / "target", WORDS), loaded(tmp_path / "draft", OTHERS, seed=1)
    told = "different tokenizers: 48 of 48 ids stand for other tokens, for instance 47 for 'w47' and 'w0'; pass token"
    for _ in range(2):  # not once, as a warning
        with pytest.raises(ValueError, match=told):
            call(target, draft, **given)
    call(target, loaded(tmp_path / "same", WORDS, seed=1), tokenizer=given.get("tokenizer"))
    call(target, tiny(seed=2), tokenizer=given.get("tokenizer"))
