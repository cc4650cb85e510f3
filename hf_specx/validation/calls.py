"""Checks of what a call asks for: a way of generating, a cache, a stream."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StaticCache

from hf_specx.common.architectures import WITHOUT_ATTENTIONS
from hf_specx.common.errors import refusal


STOCK_NOISE_DEVICES = ("cpu", "cuda")  # elsewhere stock draws ahead, or its generator cannot be read


def other_mode(name: str, mode: str) -> Callable[[GenerationConfig], None]:
    """The check of a field that selects another way of generating."""

    def check(config: GenerationConfig) -> str | None:
        value = getattr(config, name, None)
        if value is None or value is False:
            return None
        return (
            f"{name}={value!r} selects {mode}; for greedy decoding or sampling leave it out, also of "
            "model.generation_config."
        )

    check.__name__ = name
    return refusal(check)


OTHER_MODES = [
    other_mode("penalty_alpha", "contrastive search"),
    other_mode("dola_layers", "DoLa"),
    other_mode("prompt_lookup_num_tokens", "prompt lookup"),
    other_mode("assistant_early_exit", "early exit"),
    other_mode("use_mtp", "multi-token prediction heads"),
    other_mode("speculation_type", "a kind of draft that transformers makes itself"),
    other_mode("assistant_ensemble_weight", "a mixture of draft and target"),
    other_mode("constraints", "decoding under constraints"),
    other_mode("force_words_ids", "decoding with forced words"),
]


@refusal
def beam_search(config: GenerationConfig) -> str | None:
    if config.num_beams in (None, 1):
        return None
    return f"num_beams={config.num_beams} is beam search; set num_beams=1 for greedy or sampling."


@refusal
def groups_of_beams(config: GenerationConfig) -> str | None:
    groups = getattr(config, "num_beam_groups", None)
    if groups in (None, 1):
        return None
    return f"num_beam_groups={groups} is beam search; leave it out."


@refusal
def no_cache(model_kwargs: dict[str, Any]) -> str | None:
    if model_kwargs.get("use_cache") is not False:
        return None
    return "use_cache=False cannot be honoured: judging candidates needs a cache; pass use_cache=True."


@refusal
def other_cache(config: GenerationConfig) -> str | None:
    if config.cache_implementation in (None, "dynamic"):
        return None
    return (
        f"cache_implementation={config.cache_implementation!r} cannot be honoured: speculative decoding keeps a cache "
        "of its own; pass cache_implementation='dynamic'."
    )


@refusal
def static_past(model_kwargs: dict[str, Any]) -> str | None:
    past = model_kwargs.get("past_key_values")
    if not isinstance(past, StaticCache):
        return None
    return f"past_key_values is a {type(past).__name__}, from which nothing can be taken back; pass a DynamicCache."


@refusal
def past_without_columns(layout: str) -> str | None:
    if layout == "auto":
        return None
    return (
        f"layout={layout!r} needs the keys of all tokens, and past_key_values= does not have them (a window drops "
        "some); use layout='auto' or leave past_key_values out."
    )


@refusal
def noise_that_cannot_be_redrawn(device: torch.device, verification: str) -> str | None:
    if verification != "coupled" or device.type in STOCK_NOISE_DEVICES:
        return None
    return f"verification='coupled' cannot redraw stock's noise on device type {device.type!r}; use 'block' there."


@refusal
def streamer_of_one_row(streamer: Any, rows: int) -> str | None:
    if streamer is None or rows == 1 or (hasattr(streamer, "put_row") and hasattr(streamer, "end_row")):
        return None
    return (
        f"a {type(streamer).__name__} takes one row, and the batch has {rows}; use hf_specx.BatchStreamer, or leave "
        "the streamer out."
    )


def check_call(
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    verification: str,
    streamer: Any,
) -> None:
    """What one call of `generate` asks for, besides its text."""
    beam_search(generation_config)
    groups_of_beams(generation_config)
    for other_mode_in in OTHER_MODES:
        other_mode_in(generation_config)
    noise_that_cannot_be_redrawn(input_ids.device, verification)
    no_cache(model_kwargs)
    other_cache(generation_config)
    static_past(model_kwargs)
    streamer_of_one_row(streamer, len(input_ids))


@refusal
def attentions_of_no_kind(model: PreTrainedModel, config: GenerationConfig) -> str | None:
    attention, reason = WITHOUT_ATTENTIONS.get(model.config.model_type, (None, ""))
    asked = config.return_dict_in_generate and config.output_attentions
    if not asked or not reason or attention not in (None, model.config._attn_implementation):
        return None
    return f"output_attentions=True is not available for model type {model.config.model_type!r}: {reason}."


def check_outputs(model: PreTrainedModel, generation_config: GenerationConfig) -> None:
    """Whether a model gives what one call wants to know besides the text."""
    attentions_of_no_kind(model, generation_config)


def check_past(layout: str) -> None:
    """Whether a cache that does not have the keys of all its tokens can be continued in the layout asked for."""
    past_without_columns(layout)
