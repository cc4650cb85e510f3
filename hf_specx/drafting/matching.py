"""How the tokens of a draft with another tokenizer are matched with the target's."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.architectures import vocabulary
from hf_specx.common.errors import refusal
from hf_specx.common.tokenizers import same_tokens

from .drafter import Drafter, TokenizerMatch
from .other_tokenizer import OtherTokenizerDrafter, TextDrafter
from .vocabulary_map import VocabularyMap, vocabulary_map


MATCHES = ("auto", "tokens", "text")
ENOUGH_COMMON = 0.5  # coverage from which "auto" goes by tokens


@refusal
def no_common_tokens(vocabularies: VocabularyMap) -> str | None:
    if vocabularies.coverage:
        return None
    return (
        "tokenizer_match='tokens' needs tokens that both tokenizers have, and of a sample text there are none; use "
        "tokenizer_match='text', or check that each tokenizer belongs to its model."
    )


def match_tokenizers(
    draft: Any,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
    match: str = "auto",
) -> Any:
    """The same draft or drafts, with a drafter for one call in place of a model with another tokenizer.

    Args:
        draft: as `SpeculativeDecoding` takes it.
        target: of the call.
        tokenizer: the target's, and `draft_tokenizer` the draft's; where one is not known they count as the same.
        match: one of `MATCHES`; no tokens have to be matched where the tokenizers have the same.

    Raises:
        ValueError: if it is not known what the tokens of one stand for, or none is in both and `match` is "tokens".
    """
    if same_tokens(tokenizer, draft_tokenizer):
        return draft
    assert tokenizer is not None
    assert draft_tokenizer is not None
    if isinstance(draft, Sequence):
        return [match_tokenizers(part, target, tokenizer, draft_tokenizer, match) for part in draft]
    if not isinstance(draft, PreTrainedModel):
        return draft
    return _drafter(draft, vocabulary_map(tokenizer, draft_tokenizer, (vocabulary(target), vocabulary(draft))), match)


def _drafter(draft: PreTrainedModel, vocabularies: VocabularyMap, match: str) -> Drafter:
    found = matched(vocabularies, match)
    return (OtherTokenizerDrafter if found.match == "tokens" else TextDrafter)(draft, vocabularies, found)


def matched(vocabularies: VocabularyMap, match: str = "auto") -> TokenizerMatch:
    """How to match two tokenizers, one of "tokens" and "text", and why."""
    known = vocabularies.overlap, vocabularies.coverage
    covered = f"{vocabularies.coverage:.0%} of the tokens of a sample text are in both tokenizers"
    if match == "tokens":
        no_common_tokens(vocabularies)
    if match != "auto":
        return TokenizerMatch(match, f"asked for; {covered}", *known)
    return TokenizerMatch("tokens" if vocabularies.coverage >= ENOUGH_COMMON else "text", f"chosen: {covered}", *known)
