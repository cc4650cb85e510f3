"""Why a call is decoded by transformers itself: whatever plain `generate` serves, and candidates would not exactly.

Each reason stands beside what it looks at, and names the remedy. What plain `generate` refuses too is refused.
"""

from hf_specx.models.prompts import Prompt

from .check_inputs import why_length_plain, why_mode_plain, why_text_plain
from .check_models import why_model_plain, why_plain


def reasons_of(prompt: Prompt, new_tokens: int) -> list[str]:
    """Reasons in a model and in what `generate` has prepared for it; none if so many new tokens can be speculated."""
    model = [*why_model_plain(prompt.model), why_plain(prompt)]
    call = [*why_mode_plain(prompt), *why_text_plain(prompt), *why_length_plain(prompt, new_tokens)]
    return [why for why in [*model, *call] if why]
