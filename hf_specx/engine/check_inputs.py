"""Inputs of a call that are refused before any forward: texts, masks, positions, caches, seeds, ways of generating."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import GENERATION_MODES_MAPPING

from hf_specx.common.errors import is_int, require
from hf_specx.models.prompts import PreparedInputs, position_table
from hf_specx.models.slots import num_cached_tokens


MAX_SEED = 2**63
ASSISTANT_FIELDS = {  # fields of a config that say what transformers does with a draft model of its own
    "speculation_type": "a kind of draft that transformers makes itself",
    "assistant_ensemble_weight": "a mixture of draft and target",
}


def check_mode(prompt: PreparedInputs, streamer: Any) -> None:
    """Raise ValueError for a way of generating that a decoding method cannot reach, and for an unfit streamer."""
    config, rows, size = prompt.generation_config, len(prompt.input_ids), prompt.generation_config.prefill_chunk_size
    for name, mode in ASSISTANT_FIELDS.items():
        value = getattr(config, name, None)
        message = (
            f"{name}={value!r} selects {mode}; for greedy decoding or sampling leave it out, also of "
            "model.generation_config."
        )
        require(value is None, message)
    method = decoding_method_of(prompt)
    message = (
        f"this call selects {method} of the Hub (by penalty_alpha, dola_layers or the like); leave it out, also of "
        "model.generation_config, or call generate without a strategy."
    )
    require("/" not in method, message)
    message = f"prefill_chunk_size={size!r} is no number of tokens; give an int of 1 or more, or leave it out."
    require(size is None or (is_int(size) and size >= 1), message)
    message = f"num_beams={config.num_beams} has no text before its end, which a streamer could get; leave one out."
    require(streamer is None or method != "_beam_search", message)
    tags_rows = hasattr(streamer, "put_row") and hasattr(streamer, "end_row")
    message = f"a {type(streamer).__name__} takes one row, and the batch has {rows}; use hf_specx.BatchStreamer."
    require(streamer is None or rows == 1 or tags_rows, message)


def decoding_method_of(prompt: PreparedInputs) -> str:
    """The name of the method by which `generate` would decode; a repository of the Hub where the method is there."""
    return GENERATION_MODES_MAPPING[prompt.generation_config.get_generation_mode()]


def check_token_ids(model: PreTrainedModel, input_ids: torch.Tensor, encoded: bool = False) -> None:
    """Raise ValueError if a model, or its encoder if `encoded`, has no embedding for one of these ids."""
    config, embedding = model.config, _embedding(model, encoded)
    if embedding is None or not input_ids.numel():
        return
    if not encoded and config.get_text_config(decoder=True) is not config:
        return  # higher ids may be something other than text
    # a table may be spread over devices
    size = max(embedding.num_embeddings, 0 if encoded else getattr(config, "vocab_size", 0))
    lowest, highest = torch.stack(torch.aminmax(input_ids)).tolist()
    message = (
        f"input_ids has the token id {lowest if lowest < 0 else highest}, and {type(model).__name__} embeds 0 to "
        f"{size - 1}; use its own tokenizer, or resize_token_embeddings."
    )
    require(lowest >= 0 and highest < size, message)


def _embedding(model: PreTrainedModel, encoded: bool = False) -> torch.nn.Embedding | None:
    """The embedding of a decoder-only model's text, or of what an encoder reads; None if it is not a plain table."""
    if model.config.is_encoder_decoder != encoded:
        return None
    reads: Any = model.get_encoder() if encoded else model
    embedding = (reads if hasattr(reads, "get_input_embeddings") else model).get_input_embeddings()  # FSMT's has none
    return embedding if isinstance(embedding, torch.nn.Embedding) else None


def check_inputs(prompt: PreparedInputs) -> None:
    """Raise ValueError if the text of a call is no batch of tokens or embeddings that the model has."""
    model, input_ids, kwargs = prompt.model, prompt.input_ids, prompt.kwargs
    is_encoded = "encoder_outputs" in kwargs
    embeds = None if is_encoded else kwargs.get("inputs_embeds")
    shape, dtype = tuple(input_ids.shape), input_ids.dtype
    require(len(shape) == 2, f"input_ids of shape {shape} is no batch of texts; pass [rows, tokens].")
    is_integer = not (dtype.is_floating_point or dtype == torch.bool)
    require(is_integer, f"input_ids has dtype {dtype}; pass integers, for example input_ids.long().")
    message = f"the prompt is empty (input_ids of shape {shape}); pass at least one token a row."
    require(bool(input_ids.numel()) or embeds is not None, message)
    if embeds is None:
        check_token_ids(model, input_ids)
    elif (embedding := _embedding(model)) is not None:
        message = (
            f"inputs_embeds of width {embeds.shape[-1]} cannot be read by the target, which embeds in "
            f"{embedding.embedding_dim}; make them with model.get_input_embeddings()."
        )
        require(embeds.shape[-1] == embedding.embedding_dim, message)
    _check_past_and_mask(prompt, embeds, "decoder_attention_mask" if is_encoded else "attention_mask")


def _check_past_and_mask(prompt: PreparedInputs, embeds: torch.Tensor | None, name: str) -> None:
    """Raise ValueError if mask, positions or a cache are not those of the text, which may be given as embeddings."""
    (rows, width), kwargs = prompt.input_ids.shape, prompt.kwargs
    is_encoded, mask = name != "attention_mask", kwargs.get(name)
    cached = 0 if prompt.past is None else num_cached_tokens(prompt.past)
    width = width if embeds is None else max(width, embeds.shape[1])
    fits = mask is None or (mask.ndim == 2 and len(mask) == rows)
    message = (
        f"{name} of shape {None if mask is None else tuple(mask.shape)} is no 2D mask of {rows} rows; pass the one "
        "that came with input_ids, 1 for a token and 0 for a pad."
    )
    require(fits, message)
    positions = None if is_encoded else kwargs.get("position_ids")
    if positions is not None and positions.ndim <= 2:  # models with several kinds of positions check their own
        new = width - cached
        fits = positions.ndim == 2 and positions.shape[0] in (1, rows) and positions.shape[1] >= new
        message = (
            f"position_ids of shape {tuple(positions.shape)} has no position for each token of the prompt of shape "
            f"{(rows, new)}; pass one a token, or leave it out."
        )
        require(fits, message)


def text_width(prompt: PreparedInputs) -> int:
    """Columns of the text before its first new token; it may be in embeddings, or partly in a cache."""
    width, mask = prompt.input_ids.shape[1], prompt.kwargs.get("attention_mask")
    if prompt.model.config.is_encoder_decoder:
        return width
    return getattr(prompt.generation_config, "_mask_length", width) if mask is None else mask.shape[-1]


def check_length(prompt: PreparedInputs, new_tokens: int) -> None:
    """Raise ValueError if a text of so many new tokens is longer than a table of positions."""
    model, width = prompt.model, text_width(prompt)
    num_positions = position_table(model)
    if num_positions is None:
        return
    positions = None if model.config.is_encoder_decoder else prompt.kwargs.get("position_ids")
    if positions is not None and positions.ndim == 2:  # pads have none
        width = int(positions.max()) + 1
    if width + new_tokens - 1 <= num_positions:  # the last one is not fed
        return
    room = num_positions + 1 - width
    shorter = f"shorten the prompt to {num_positions} tokens or fewer"
    remedy = f"set max_new_tokens={room} or less" if room > 0 else shorter
    message = (
        f"the prompt has {width} tokens and may get {new_tokens} new ones, and {type(model).__name__} has a table of "
        f"{num_positions} positions, beyond which plain generate fails; {remedy}."
    )
    raise ValueError(message)


def check_encoder_positions(model: PreTrainedModel, prompt_tokens: int) -> None:
    """Raise ValueError if the encoder of a model lacks a position for a token of a prompt."""
    num_positions = position_table(model, encoder=True)
    message = (
        f"the prompt has {prompt_tokens} tokens, and the encoder of {type(model).__name__} has a table of "
        f"{num_positions} positions; shorten the prompt."
    )
    require(num_positions is None or prompt_tokens <= num_positions, message)


def as_list(seeds: Any) -> Any:
    """Seeds as a list of ints, if that is what a list, tuple, range, tensor or array holds; else what was given."""
    seeds = seeds.tolist() if hasattr(seeds, "tolist") else seeds
    if not isinstance(seeds, list | tuple | range):
        return seeds
    return [seed.tolist() if hasattr(seed, "tolist") else seed for seed in seeds]


def check_seeds(
    seeds: Any, rows: int, verification: str, lockstep: bool, of_requests: bool = False, by_windows: bool = False
) -> None:
    """Raise ValueError if `seeds`, of a call or of its requests, cannot make each row independent of the others.

    `by_windows` says that the call may be one of several, of which later ones have fewer rows.
    """
    ints = isinstance(seeds, list) and all(map(is_int, seeds))
    require(ints, f"seeds={seeds!r} is not a list of ints; give one int a row.")
    message = f"there are {len(seeds)} seeds for {rows} rows (num_return_sequences included); give one a row."
    if by_windows:
        message += " If you did, Whisper goes on to another window with fewer rows: call generate for each sound."
    require(len(seeds) == rows, message)
    for seed in seeds:
        message = f"the seed {seed} is outside of what torch takes; give ints from 0 to 2**63 - 1."
        require(0 <= seed < MAX_SEED, message)
    message = "requests have seeds of their own, which cannot" if of_requests else "seeds= cannot"
    message += (
        f" make rows independent with verification={verification!r} and layout='lockstep', where all rows advance "
    )
    message += "as far as the slowest; use verification='coupled', or another layout if the model takes one."
    require(rows == 1 or not lockstep or verification not in ("token", "block"), message)
