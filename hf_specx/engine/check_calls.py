"""Checks of what a call asks for: a way of generating, a cache, a stream."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StaticCache
from transformers.generation.logits_process import LogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_specx.common.architectures import vocabulary
from hf_specx.common.errors import kind, require
from hf_specx.drafting.drafter import Drafter
from hf_specx.models.prompts import Prompt, position_table

from .check_inputs import check_inputs, check_positions
from .check_models import check_own_text, check_pair, check_target
from .check_rows import check_guidance


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


def check_noise(device: torch.device, verification: str) -> None:
    """Check that the random numbers of a call can be drawn where its text is.

    Args:
        device: of `input_ids`.
        verification: as chosen; "greedy" without `do_sample`, which draws none.
    """
    told = "sampling draws numbers of 64 bits, which device type 'mps' does not have; use do_sample=False or the CPU."
    require(verification == "greedy" or device.type != "mps", told)
    require(
        verification != "coupled" or device.type in NOISE_DEVICES,
        f"verification='coupled' cannot redraw the noise of plain sampling on device type {device.type!r}; pass "
        "verification='token' or 'block' there.",
    )


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
    _check_mode(generation_config)
    cache, rows, past = generation_config.cache_implementation, len(input_ids), model_kwargs.get("past_key_values")
    require(
        model_kwargs.get("use_cache") is not False,
        "use_cache=False cannot be honoured: judging candidates needs a cache; pass use_cache=True.",
    )
    require(
        cache in (None, "dynamic"),
        f"cache_implementation={cache!r} cannot be honoured: speculative decoding keeps a cache of its own; pass "
        "cache_implementation='dynamic'.",
    )
    told = f"past_key_values is a {type(past).__name__}, and rejected tokens cannot be taken out; pass a DynamicCache."
    require(not isinstance(past, StaticCache), told)
    require(
        streamer is None or rows == 1 or (hasattr(streamer, "put_row") and hasattr(streamer, "end_row")),
        f"{kind(streamer)} takes one row, and the batch has {rows}; use hf_specx.BatchStreamer, or leave "
        "the streamer out.",
    )


def _check_mode(config: GenerationConfig) -> None:
    """Check that a call asks for greedy decoding or sampling."""
    for name in ("num_beams", "num_beam_groups"):
        value = getattr(config, name, None)
        told = f"{name}={value} is beam search, which is not supported; set {name}=1 for greedy text or sampling."
        require(value in (None, 1), told)
    for name, mode in OTHER_MODES.items():
        value, remedy = getattr(config, name, None), "leave it out, also of model.generation_config."
        told = f"{name}={value!r} selects {mode}, which is not supported; for greedy decoding or sampling {remedy}"
        if name in DRAFTS_INSTEAD:
            ours = f"SpeculativeDecoding({DRAFTS_INSTEAD[name]}({value}))"
            told = f"{name}={value!r} selects {mode}, a draft here: use {ours} and {remedy}"
        require(value is None or value is False, told)


def check_past(layout: str) -> None:
    """Check that the layout asked for can continue a cache that does not have the keys of all its tokens."""
    require(
        layout == "auto",
        f"layout={layout!r} needs the keys of all tokens, and past_key_values= does not have them (a window drops "
        "some); use layout='auto' or leave past_key_values out.",
    )


def check_asked(
    prompt: Prompt,
    processors: Sequence[LogitsProcessor],
    drafter: Drafter,
    options: Any,
    longest: int | None = None,
) -> None:
    """Check that the models can be served exactly, and what was given to `generate`.

    Args:
        prompt: the target's; `processors`: as `generate` prepared them.
        drafter: who proposes.
        options: of the strategy.
        longest: tokens that a row can come to hold; None is what the prompt says.
    """
    model, config, tokenizers = prompt.model, prompt.generation_config, (options.tokenizer, options.draft_tokenizer)
    check_target(model, _width(prompt) + prompt.max_new_tokens if longest is None else longest)
    check_call(prompt.input_ids, config, prompt.kwargs, options.streamer)
    check_inputs(model, prompt.input_ids, config, prompt.kwargs)
    if longest is None:
        check_positions(model, _positions(prompt), prompt.max_new_tokens)
    for processor in processors:
        if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            check_guidance(processor, model, len(prompt.input_ids))
    drafter.meet(vocabulary(model), options.tokenizer)
    if drafter.model is not None and drafter.own_text:
        check_own_text(model, drafter.model, *tokenizers, prompt.input_ids.shape[1])
    elif drafter.model is not None:
        check_pair(model, drafter.model, *tokenizers)


def _width(prompt: Prompt) -> int:
    """Columns of the text so far, also if it is passed as embeddings, or only what a cache does not hold."""
    if prompt.model.config.is_encoder_decoder:
        return prompt.input_ids.shape[1]
    mask = prompt.kwargs.get("attention_mask")
    known = getattr(prompt.generation_config, "_mask_length", prompt.input_ids.shape[1])
    return known if mask is None else mask.shape[-1]


def _positions(prompt: Prompt) -> int:
    """Positions of the text so far, of its longest row; pads have none, unless positions are those of columns."""
    positions = None if prompt.model.config.is_encoder_decoder else prompt.kwargs.get("position_ids")
    if positions is None or positions.ndim != 2 or position_table(prompt.model) is None:
        return _width(prompt)
    return int(positions.max()) + 1
