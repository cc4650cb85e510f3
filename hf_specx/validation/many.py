"""Checks of a call with many requests."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specx.common.errors import is_int, require


OF_ONE_REQUEST: tuple[str, ...] = (
    "inputs",
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "position_ids",
    "past_key_values",
)
OF_ONE_REQUEST += ("seeds", "streamer", "num_return_sequences", "return_dict_in_generate", "custom_generate")
OF_ONE_REQUEST += ("synced_gpus", "assistant_model", "negative_prompt_ids")


def check_queue(layout: str, draft_layout: str, reason: str, compiled: bool, stateful: Sequence[str] = ()) -> None:
    """Check that prompts can be read in the places of rows that have ended.

    Args:
        layout, draft_layout, reason, compiled: how the call is decoded.
        stateful: names of processors and criteria that keep state from token to token.
    """
    told = (
        f"{', '.join(stateful)} follows the rows of one batch, and cannot begin again in a row that is filled again; "
        "give prefix_allowed_tokens_fn=, or call generate for each batch with a new processor."
    )
    require(not stateful, told)
    require(not compiled, "compile=True does not fill rows again; use compile=False, or call generate for each batch.")
    told = (
        f"rows can be filled again in the ragged layout alone, and this call has {layout!r} for the target "
        f"({reason}) and {draft_layout!r} for the draft; call generate for each batch instead."
    )
    require({layout, draft_layout} == {"ragged"}, told)


def check_many(
    model: PreTrainedModel,
    batch_size: int,
    max_batch_tokens: int | None,
    streamer: BaseStreamer | None,
    kwargs: dict[str, Any],
) -> None:
    """Check the arguments of `generate_many`."""
    require(is_int(batch_size) and batch_size >= 1, f"batch_size={batch_size!r} is no number of rows; give 1 or more.")
    ok = max_batch_tokens is None or (is_int(max_batch_tokens) and max_batch_tokens >= 1)
    require(ok, f"max_batch_tokens={max_batch_tokens!r} is no number of tokens; give 1 or more, or None.")
    for name in OF_ONE_REQUEST:
        told = f"{name}= belongs to one call of generate; requests carry their own prompts, seeds and limits."
        require(kwargs.get(name) is None, told)
    require(streamer is None, "a streamer shows one batch; iterate over the completions instead.")
    told = f"{type(model).__name__} has an encoder, and its rows cannot be filled again; call generate for each batch."
    require(not model.config.is_encoder_decoder, told)
