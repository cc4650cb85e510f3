"""Checks of a call with many requests."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specx.common.architectures import WHOLE
from hf_specx.common.errors import is_int, kind, require, similar

from .check_entry import check_entry, known_arguments


OF_ONE_REQUEST = (
    "inputs",
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "position_ids",
    "past_key_values",
    "seeds",
    "streamer",
    "num_return_sequences",
    "return_dict_in_generate",
    "custom_generate",
    "synced_gpus",
    "assistant_model",
    "negative_prompt_ids",
)


def why_whole(models: Sequence[PreTrainedModel], layout: str, draft_layout: str) -> str | None:
    """Why prompts cannot be read in the places of rows that have ended; None if they can."""
    for model in models:
        if model.config.is_encoder_decoder:
            return f"{type(model).__name__} has an encoder"
    if {layout, draft_layout} != {"ragged"}:
        return f"the layout is {layout!r}" + (f", that of the draft {draft_layout!r}" * (layout != draft_layout))
    return None


def why_uncached(model: PreTrainedModel) -> str:
    """Why the cache of a model cannot be used, so that transformers' own sampler has to; empty if it can."""
    return f"{type(model).__name__} is exact without a cache only" if model.config.model_type in WHOLE else ""


def check_many(
    model: Any,
    requests: Any,
    batch_size: int,
    max_batch_tokens: int | None,
    streamer: BaseStreamer | None,
    kwargs: dict[str, Any],
) -> None:
    """Check the arguments of `generate_many`."""
    check_entry(model, None)
    check_requests(requests)
    require(is_int(batch_size) and batch_size >= 1, f"batch_size={batch_size!r} is no number of rows; give 1 or more.")
    ok = max_batch_tokens is None or (is_int(max_batch_tokens) and max_batch_tokens >= 1)
    require(ok, f"max_batch_tokens={max_batch_tokens!r} is no number of tokens; give 1 or more, or None.")
    for name in OF_ONE_REQUEST:
        told = f"{name}= belongs to one call of generate; requests carry their own prompts, seeds and limits."
        require(kwargs.get(name) is None, told)
    known = known_arguments(model) | {"tokenizer"}
    name = min(kwargs.keys() - known, default="")
    told = f"unknown argument {name!r}; {similar(name, known)}generate_many takes those of generate, and"
    require(not name, f"{told} SpeculativeDecoding(...) the options of the strategy.")
    require(streamer is None, "a streamer shows one batch; iterate over the completions instead.")


def check_requests(requests: Any) -> None:
    """Check that prompts can be taken one by one; what each of them is, is seen when it is taken."""
    told = "give a list of prompts, each a list of token ids, as tokenizer(texts).input_ids."
    is_iterable = isinstance(requests, Iterable) and not isinstance(requests, str | bytes | Mapping)
    require(is_iterable, f"requests is {kind(requests)}; {told}")
    alone = isinstance(requests, list | tuple) and requests and is_int(requests[0])
    dimensions = getattr(requests, "ndim", None)
    require(not alone and dimensions != 1, f"requests is a single prompt; {told}")
    padded = f"requests is {kind(requests)} of {dimensions} dimensions, whose rows may hold pads; {told}"
    require(dimensions is None, padded)
