"""Whether a draft with another tokenizer has enough tokens in common with its target."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.architectures import vocabulary
from hf_specx.common.errors import refusal
from hf_specx.common.tokenizers import same_tokens

from .drafter import Drafter, TokenizerMatch
from .other_tokenizer import OtherTokenizerDrafter
from .vocabulary_map import VocabularyMap, vocabulary_map


MATCHES = ("auto", "tokens")
ENOUGH_COMMON = 0.5  # coverage from which such a draft is likely to help


@refusal
def too_few_common_tokens(vocabularies: VocabularyMap, match: str) -> str | None:
    if vocabularies.coverage >= (ENOUGH_COMMON if match == "auto" else 1e-9):
        return None
    asked = ", or try tokenizer_match='tokens' all the same" if vocabularies.coverage else ""
    return (
        f"only {vocabularies.coverage:.0%} of the tokens of a sample text are in both tokenizers, too few for a draft "
        "that can propose no others; choose a draft with the target's own tokenizer, check that each tokenizer "
        f"belongs to its model{asked}."
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
        ValueError: if it is not known what the tokens of one stand for, or too few are in both: under "auto" less
            than half of those of a sample text, under "tokens" none.
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
    return OtherTokenizerDrafter(draft, vocabularies, matched(vocabularies, match))


def matched(vocabularies: VocabularyMap, match: str = "auto") -> TokenizerMatch:
    """How two tokenizers are matched, and why.

    Raises:
        ValueError: if they have too few tokens in common.
    """
    too_few_common_tokens(vocabularies, match)
    told = f"{vocabularies.coverage:.0%} of the tokens of a sample text are in both tokenizers"
    reason = f"{'chosen' if match == 'auto' else 'asked for'}: {told}"
    return TokenizerMatch("tokens", reason, vocabularies.overlap, vocabularies.coverage)
