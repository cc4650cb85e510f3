"""Which layout a model is decoded in: the best one that has been shown to be exact for its architecture."""

import transformers
from transformers import PreTrainedModel

from hf_specx.common.architectures import BY_MASK, INEXACT, LATER, LAYOUTS_OF, MASKED, REFUSED, SINCE, UNKNOWN
from hf_specx.common.errors import refusal

from .compiled import CompiledDecoder
from .decoder import Decoder
from .lockstep import LockstepDecoder
from .packed import PackedDecoder
from .padded import PaddedDecoder
from .prompts import Prompt
from .ragged import RaggedDecoder


DECODERS: dict[str, type[Decoder]] = {
    "ragged": RaggedDecoder,
    "padded": PaddedDecoder,
    "packed": PackedDecoder,
    "lockstep": LockstepDecoder,
}
LAYOUTS = ("auto", *DECODERS)
REASONS = {
    "ragged": "{0} takes positions and a 4D mask by position under {1}",
    "padded": "{0} takes its positions from a 2D mask or from distances, under {1}",
    "packed": "{0} takes positions and a 4D mask by position under {1}, so that all rows can be one",
    "lockstep": "no other layout has been shown to be exact for {0} under {1}",
}


@refusal
def type_that_is_not_exact(model: PreTrainedModel, drafts: bool) -> str | None:
    refused = REFUSED if drafts else REFUSED | INEXACT
    for name in (model.config.model_type, model.config.get_text_config(decoder=True).model_type):
        if name in refused:
            role = "a draft" if drafts else "a target"
            return f"model type {name!r} cannot be {role} of speculative decoding: {refused[name]}; choose another."
    return None


@refusal
def type_of_a_later_version(model: PreTrainedModel, version: str) -> str | None:
    name = model.config.model_type
    if name not in LATER or tuple(map(int, version.split(".")[:2])) >= SINCE:
        return None
    return (
        f"model type {name!r} has been shown to be exact on transformers {SINCE[0]}.{SINCE[1]} and later, not on "
        f"{version}; upgrade transformers."
    )


@refusal
def attention_without_layout(model: PreTrainedModel, able: list[str]) -> str | None:
    if able:
        return None
    config = model.config.get_text_config(decoder=True)
    return (
        f"model type {config.model_type!r} is exact with a mask by position only, which "
        f"attn_implementation={config._attn_implementation!r} cannot take; load it with attn_implementation='sdpa'."
    )


@refusal
def layout_that_is_not_exact(model: PreTrainedModel, layout: str, able: list[str]) -> str | None:
    if layout == "auto" or layout in able:
        return None
    config = model.config.get_text_config(decoder=True)
    return (
        f"layout={layout!r} has not been shown to be exact for model type {config.model_type!r} under "
        f"attn_implementation={config._attn_implementation!r}; use {', '.join(map(repr, able))} or 'auto'."
    )


def layouts_of(model: PreTrainedModel, drafts: bool = False) -> list[str]:
    """The layouts that have been shown to be exact for a model, best first.

    Args:
        model: any model that can generate.
        drafts: whether it is the draft, which may be inexact: verification corrects any distribution of its tokens.

    Raises:
        ValueError: the model has no such layout.
    """
    config = model.config.get_text_config(decoder=True)
    type_that_is_not_exact(model, drafts)
    if not drafts:
        type_of_a_later_version(model, transformers.__version__)
    able = LAYOUTS_OF.get(model.config.model_type, UNKNOWN)
    # Falcon makes its linear biases (alibi) from a 2D mask, and takes no other
    masked = config._attn_implementation in MASKED and not getattr(config, "alibi", False)
    found = [x for x in able if masked or x not in BY_MASK]
    attention_without_layout(model, found)
    return found


def make_decoder(layout: str, prompt: Prompt, known_ids: int | None = None, compiled: bool = False) -> Decoder:
    """The decoder of a layout for one model; it has not read its prompts yet.

    Args:
        layout: one of `DECODERS`.
        prompt: the model and its inputs.
        known_ids: as for `Decoder`.
        compiled: whether forwards are compiled, which implies the ragged layout.
    """
    return (CompiledDecoder if compiled else DECODERS[layout])(prompt, known_ids)


def choose_layout(model: PreTrainedModel, layout: str = "auto") -> tuple[str, str]:
    """The layout for a model, and the reason in words.

    Args:
        model: the target.
        layout: one of `LAYOUTS`.

    Raises:
        ValueError: the model cannot be decoded exactly in this layout, or in any.
    """
    able = layouts_of(model)
    config = model.config.get_text_config(decoder=True)
    name, attention = config.model_type, config._attn_implementation
    layout_that_is_not_exact(model, layout, able)
    chosen = able[0] if layout == "auto" else layout
    asked = "chosen" if layout == "auto" else "asked for"
    return chosen, f"{asked}: {REASONS[chosen].format(name, attention)}"
