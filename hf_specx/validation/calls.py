"""Checks of what a call asks for: a way of generating, a cache, a stream."""

from typing import Any

import torch
from transformers import GenerationConfig, StaticCache

from hf_specx.common.errors import kind, refusal, require


NOISE_DEVICES = ("cpu", "cuda")  # on others `generate` draws noise ahead, or the generator cannot be read
OTHER_MODES = {  # fields of a config that select another way of generating
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "prompt_lookup_num_tokens": "prompt lookup",
    "assistant_early_exit": "early exit",
    "use_mtp": "multi-token prediction heads",
    "speculation_type": "a kind of draft that transformers makes itself",
    "assistant_ensemble_weight": "a mixture of draft and target",
    "constraints": "decoding under constraints",
    "force_words_ids": "decoding with forced words",
}
DRAFTS_INSTEAD = {"prompt_lookup_num_tokens": "SuffixDraft", "assistant_early_exit": "EarlyExitDraft"}


@refusal
def other_mode(config: GenerationConfig) -> str | None:
    for name, mode in OTHER_MODES.items():
        value = getattr(config, name, None)
        if value is None or value is False:
            continue
        remedy = "leave it out, also of model.generation_config."
        if name in DRAFTS_INSTEAD:
            ours = f"SpeculativeDecoding({DRAFTS_INSTEAD[name]}({value}))"
            return f"{name}={value!r} selects {mode}, a draft here: use {ours} and {remedy}"
        return f"{name}={value!r} selects {mode}, which is not supported; for greedy decoding or sampling {remedy}"
    return None


@refusal
def beam_search(config: GenerationConfig) -> str | None:
    for name in ("num_beams", "num_beam_groups"):
        value = getattr(config, name, None)
        if value not in (None, 1):
            return f"{name}={value} is beam search, which is not supported; set {name}=1 for greedy text or sampling."
    return None


@refusal
def static_past(past: Any) -> str | None:
    if not isinstance(past, StaticCache):
        return None
    return f"past_key_values is a {type(past).__name__}, and rejected tokens cannot be taken out; pass a DynamicCache."


@refusal
def noise_that_cannot_be_redrawn(device: torch.device, verification: str) -> str | None:
    if verification != "coupled" or device.type in NOISE_DEVICES:
        return None
    return (
        f"verification='coupled' cannot redraw the noise of plain sampling on device type {device.type!r}; pass "
        "verification='token' or 'block' there."
    )


def check_noise(device: torch.device, verification: str) -> None:
    """Check that the random numbers of a call can be drawn where its text is.

    Args:
        device: of `input_ids`.
        verification: as chosen; "greedy" without `do_sample`, which draws none.
    """
    told = "sampling draws numbers of 64 bits, which device type 'mps' does not have; use do_sample=False or the CPU."
    require(verification == "greedy" or device.type != "mps", told)
    noise_that_cannot_be_redrawn(device, verification)


def check_call(
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    streamer: Any,
) -> None:
    """Check what one call of `generate` asks for, besides its text.

    Args:
        input_ids: [B, L] int64.
        generation_config, model_kwargs: as `generate` prepared them.
        streamer: of the strategy.
    """
    beam_search(generation_config)
    other_mode(generation_config)
    cache, rows = generation_config.cache_implementation, len(input_ids)
    require(
        model_kwargs.get("use_cache") is not False,
        "use_cache=False cannot be honoured: judging candidates needs a cache; pass use_cache=True.",
    )
    require(
        cache in (None, "dynamic"),
        f"cache_implementation={cache!r} cannot be honoured: speculative decoding keeps a cache of its own; pass "
        "cache_implementation='dynamic'.",
    )
    static_past(model_kwargs.get("past_key_values"))
    require(
        streamer is None or rows == 1 or (hasattr(streamer, "put_row") and hasattr(streamer, "end_row")),
        f"{kind(streamer)} takes one row, and the batch has {rows}; use hf_specx.BatchStreamer, or leave "
        "the streamer out.",
    )


@refusal
def check_past(layout: str) -> str | None:
    """Check that the layout asked for can continue a cache that does not have the keys of all its tokens."""
    if layout == "auto":
        return None
    return (
        f"layout={layout!r} needs the keys of all tokens, and past_key_values= does not have them (a window drops "
        "some); use layout='auto' or leave past_key_values out."
    )
