"""Why a call is decoded by transformers itself: whatever plain `generate` serves, and candidates would not exactly.

Each reason stands beside what it looks at, and names the remedy. What plain `generate` refuses too is refused.
"""

from collections.abc import Iterator

from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor

from hf_specx.models.prompts import PreparedInputs
from hf_specx.sampling.processors import SYNTHID, can_look_ahead

from .check_inputs import why_length_plain, why_mode_plain, why_text_plain
from .check_models import why_model_plain, why_plain


RARE_PROCESSORS: dict[type[LogitsProcessor], str] = {
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor: (
        "guidance_scale= feeds a second text to the model, one token at a time; leave it out to have candidates"
    ),
    logits_process.WatermarkLogitsProcessor: (
        "a WatermarkingConfig draws a list of tokens after each token; a SynthIDTextWatermarkingConfig has candidates"
    ),
    SYNTHID: (
        "SynthID has candidates where its processor is unused, without debug_mode= and skip_first_ngram_calls=, and "
        "with a sampling_table_size= that is a power of 2 up to 65536"
    ),
    logits_process.EncoderRepetitionPenaltyLogitsProcessor: (
        "encoder_repetition_penalty= is applied to one token at a time; leave it out to have candidates"
    ),
    logits_process.EncoderNoRepeatNGramLogitsProcessor: (
        "encoder_no_repeat_ngram_size= is applied to one token at a time; leave it out to have candidates"
    ),
}


def why_processors_plain(prompt: PreparedInputs) -> Iterator[str]:
    """Reasons in the processors of a call: those of transformers that few use, for which nothing is written here."""
    for processor in prompt.processors:
        if type(processor) in RARE_PROCESSORS and not can_look_ahead(processor):
            yield RARE_PROCESSORS[type(processor)]


def reasons_of(prompt: PreparedInputs, new_tokens: int) -> list[str]:
    """Reasons in a model and in what `generate` has prepared for it; none if so many new tokens can be speculated."""
    model = [*why_model_plain(prompt.model), why_plain(prompt)]
    call = [*why_mode_plain(prompt), *why_text_plain(prompt), *why_length_plain(prompt, new_tokens)]
    return [why for why in [*model, *call, *why_processors_plain(prompt)] if why]
