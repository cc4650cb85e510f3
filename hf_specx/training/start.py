"""What a training starts from, checked before anything runs."""

from typing import Any, NamedTuple

from transformers import PreTrainedModel

from hf_specx.common.architectures import vocabulary
from hf_specx.common.errors import brief, require
from hf_specx.common.tokenizers import same_tokens
from hf_specx.common.wrappers import unwrapped
from hf_specx.drafting.matching import ENOUGH_COMMON
from hf_specx.drafting.vocabulary_map import VocabularyMap, vocabulary_map
from hf_specx.hub.markdown import code
from hf_specx.validation.models import check_own_text, check_pair, check_target

from .first_draft import draft_of_first_layers
from .prompts import GivenPrompts, Split, check_lengths, encode_prompts, split_prompts
from .recipe import TrainingRecipe, first_layers_wanted
from .texts import Tokenizers


class TrainingStart(NamedTuple):
    """Both models, and the prompts.

    Attributes:
        target: as it was given.
        draft: the same, or a copy of the target's first layers.
        layers: how many of these; None for a draft that was given.
        split: prompts as the target's token ids.
        tokenizers: of both.
        vocabularies: what their tokens mean; None if they are the same.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    layers: int | None
    split: Split
    tokenizers: Tokenizers
    vocabularies: VocabularyMap | None

    @property
    def in_words(self) -> str:
        """What the draft is, for the card."""
        if self.layers is not None:
            return f"the first {self.layers} layers of the target, with its embedding and head"
        return code(str(self.draft.name_or_path)) or "a draft that was made here"


def check_start(
    target: PreTrainedModel,
    draft: Any,
    prompts: GivenPrompts,
    held_out: float | GivenPrompts,
    tokenizers: Tokenizers,
    recipe: TrainingRecipe,
) -> TrainingStart:
    """Check models and prompts.

    Args:
        target, draft, prompts, held_out: as `distill` takes them.
        tokenizers: of the target and of the draft.
        recipe: how much is written after a prompt.

    Raises:
        ValueError: a model cannot be used so, they do not fit, or a prompt is empty or too long for one of them.
    """
    target, layers = unwrapped(target), first_layers_wanted(draft)
    told = f"draft={brief(draft)} is no model; load one (adapters of peft merged into it), or give 'layers:N'."
    require(layers is not None or isinstance(unwrapped(draft), PreTrainedModel), told)
    check_target(target, 0)
    told = f"{type(target).__name__} is an encoder-decoder; drafts are trained for decoder-only targets."
    require(not target.config.is_encoder_decoder, told)
    own = unwrapped(draft) if layers is None else draft_of_first_layers(target, layers)
    tokenizers = tokenizers if layers is None else (tokenizers[0], tokenizers[0])
    vocabularies = match_vocabularies(target, own, tokenizers)

    def encoded(given: GivenPrompts, name: str) -> list[list[int]]:
        found = encode_prompts(given, tokenizers[0], name)
        check_lengths(found, target, recipe.max_new_tokens, name)
        read = found if vocabularies is None else [vocabularies.prompt(ids) for ids in found]
        check_lengths(read, own, recipe.max_new_tokens, name)
        return found

    apart = held_out if isinstance(held_out, float | int) else encoded(held_out, "held_out")
    split = split_prompts(encoded(prompts, "prompts"), apart)
    return TrainingStart(target, own, layers, split, tokenizers, vocabularies)


def match_vocabularies(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizers: Tokenizers
) -> VocabularyMap | None:
    """Check that the draft's tokens are the target's, or return what they mean.

    Raises:
        ValueError: they are others, and too few of them are in both.
    """
    own, other = tokenizers
    if same_tokens(own, other):
        check_pair(target, draft, own, other)
        return None
    assert own is not None
    assert other is not None
    check_own_text(target, draft, own, other, 1)
    found = vocabulary_map(own, other, (vocabulary(target), vocabulary(draft)))
    told = f"of the tokens of a sample text {found.coverage:.0%} are in both tokenizers, and a draft is trained to "
    told += f"propose these; train one with at least {ENOUGH_COMMON:.0%} of them, or from 'layers:N'."
    require(found.coverage >= ENOUGH_COMMON, told)
    return found
