"""Checks of the text that a call gives: token ids, embeddings, masks and positions."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specx.common.errors import require
from hf_specx.models.prompts import position_table


WITHOUT_HOLES = ("led",)  # its decoder takes a mask, but sees what it hides


def unknown_token(model: PreTrainedModel, input_ids: torch.Tensor, encoded: bool = False) -> None:
    """Check that a model knows all tokens; `encoded` asks its encoder."""
    size = _known_tokens(model, encoded)
    if size is None or not input_ids.numel():
        return
    lowest, highest = torch.stack(torch.aminmax(input_ids)).tolist()
    require(
        lowest >= 0 and highest < size,
        f"input_ids has the token id {lowest if lowest < 0 else highest}, and {type(model).__name__} embeds 0 to "
        f"{size - 1}; use the model's own tokenizer, or model.resize_token_embeddings for tokens added to it.",
    )


def check_inputs(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    """Check the text that one call of `generate` is given.

    Args:
        model: the target.
        input_ids: [B, L] int64, as `generate` prepared them; for an encoder-decoder what its decoder starts with.
        generation_config, model_kwargs: as `generate` prepared them.
    """
    decodes = "encoder_outputs" in model_kwargs
    embeds = None if decodes else model_kwargs.get("inputs_embeds")
    shape, dtype = tuple(input_ids.shape), input_ids.dtype
    require(len(shape) == 2, f"input_ids of shape {shape} is no batch of texts; pass [rows, tokens].")
    is_integer = not (dtype.is_floating_point or dtype == torch.bool)
    require(is_integer, f"input_ids has dtype {dtype}; pass integers, for example input_ids.long().")
    require(
        bool(input_ids.numel()) or embeds is not None,
        f"the prompt is empty (input_ids of shape {shape}); pass at least one token a row, for example the bos token.",
    )
    if embeds is None:
        unknown_token(model, input_ids)
    else:
        embedding = _embedding(model)
        require(
            embedding is None or embeds.shape[-1] == embedding.embedding_dim,
            f"inputs_embeds of width {embeds.shape[-1]} cannot be read by the target {type(model).__name__}, which "
            f"embeds in {getattr(embedding, 'embedding_dim', '')}; make them with model.get_input_embeddings().",
        )
    _check_past_and_mask(model, input_ids, embeds, generation_config, model_kwargs)


def _check_past_and_mask(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    embeds: torch.Tensor | None,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Check that mask, positions and a cache are those of the text, which may be given as embeddings."""
    shape, decodes = input_ids.shape, "encoder_outputs" in model_kwargs
    past = model_kwargs.get("past_key_values")
    held = 0 if past is None else past.get_seq_length()
    widths = {shape[1]} if embeds is None else {shape[1], embeds.shape[1]} - {0}
    name = "decoder_attention_mask" if decodes else "attention_mask"
    mask, in_all = model_kwargs.get(name), widths | {width + held for width in widths}
    known = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[-1]  # drops all ones
    if held and embeds is None and not decodes and known == shape[1]:  # `generate` then takes it for the whole text
        require(
            held < known,
            f"past_key_values holds {held} tokens, and the whole text has {known}; pass the text with at least one "
            "token more than the cache holds, or the new tokens alone with a mask for all.",
        )
    if mask is not None:
        check_mask(model, name, mask, len(input_ids), in_all)
    elif known is not None:
        _check_width(name, known, in_all)
    positions = None if decodes else model_kwargs.get("position_ids")
    if positions is not None:
        rows, width = len(input_ids), max(widths) - held
        fits = positions.ndim > 1 and positions.shape[-2] in (1, rows) and positions.shape[-1] >= width
        require(
            fits or positions.ndim > 2,  # models with several kinds of positions check their own
            f"position_ids of shape {tuple(positions.shape)} has no position for each token of the prompt of shape "
            f"{(rows, width)}; pass one a token, or leave it out.",
        )


def check_positions(model: PreTrainedModel, prompt_tokens: int, new_tokens: int) -> None:
    """Check that a table of positions, if the model has one, is long enough; plain `generate` fails beyond its end.

    Args:
        model: the target.
        prompt_tokens: positions of the prompt, of its longest row; for an encoder-decoder of what its decoder reads.
        new_tokens: the most that may follow; the last one of them is not fed.
    """
    table = position_table(model)
    if table is None or prompt_tokens + new_tokens - 1 <= table:
        return
    room = table + 1 - prompt_tokens
    less = f"set max_new_tokens={room} or less, or shorten the prompt"
    require(
        False,
        f"the prompt has {prompt_tokens} tokens and may get {new_tokens} new ones, and {type(model).__name__} has a "
        f"table of {table} positions, beyond which plain generate fails; "
        f"{less if room > 0 else f'shorten the prompt to {table} tokens or fewer'}.",
    )


def check_encoder_positions(model: PreTrainedModel, prompt_tokens: int) -> None:
    """Check that the encoder of a model has a position for each token of a prompt."""
    table = position_table(model, encoder=True)
    require(
        table is None or prompt_tokens <= table,
        f"the prompt has {prompt_tokens} tokens, and the encoder of {type(model).__name__} has a table of {table} "
        "positions; shorten the prompt.",
    )


def check_mask(model: PreTrainedModel, name: str, mask: torch.Tensor, rows: int, widths: set[int]) -> None:
    """Check a mask of the text, which may have any of these widths."""
    shape, kind = tuple(mask.shape), type(model).__name__
    is_flat = len(shape) == 2
    require(is_flat, f"{name} of shape {shape} is no 2D mask; pass [rows, tokens], 1 for a token and 0 for a pad.")
    told = f"{name} has {len(mask)} rows and the batch {rows}; pass the mask that came with input_ids."
    require(len(mask) == rows, told)
    _check_width(name, mask.shape[1], widths)
    mask = mask.cpu()  # so that all that follow wait for the device once
    seen = mask.bool()
    strange = mask[(mask != 0) & (mask != 1)][:1].tolist()
    require(not strange, f"{name} has the value {(strange or [0])[0]}; pass 1 for a token and 0 for a pad.")
    unset = f"If you passed no mask, transformers took the pad id for padding; pass {name} with a 1 for each token."
    empty, ends_in_pad = _first(~seen.any(-1)), _first(~seen[:, -1])
    told = f"the prompt of row {empty} is empty ({name} is all 0); pass at least one token a row."
    require(empty is None, f"{told} {unset}")
    told = f"row {ends_in_pad} of {name} ends in 0: prompts must be padded on the left; set "
    require(ends_in_pad is None, f"{told}tokenizer.padding_side='left'. {unset}")
    no_holes = model.config.model_type not in WITHOUT_HOLES or (seen.cummax(-1).values == seen).all()
    told = f"{name} has zeros between tokens of a row, which {kind} ignores; pad its rows on the left only."
    require(bool(no_holes), told)


def _check_width(name: str, width: int, widths: set[int]) -> None:
    wanted = " or ".join(map(str, sorted(widths)))
    require(
        width in widths,
        f"{name} has {width} columns, and the text {wanted}; pass the mask that came with input_ids, with columns for "
        "the tokens of past_key_values before them if there are any.",
    )


def _first(rows: torch.Tensor) -> int | None:
    """The number of the first row [B] that is True; None if there is none."""
    return rows.int().argmax().item() if rows.any() else None  # type: ignore[return-value]


def _embedding(model: PreTrainedModel, encoded: bool = False) -> torch.nn.Embedding | None:
    """The embedding of a decoder-only model's text, or of what an encoder reads; None if it is not a plain table."""
    if model.config.is_encoder_decoder != encoded:
        return None
    reads: Any = model.get_encoder() if encoded else model
    embedding = (reads if hasattr(reads, "get_input_embeddings") else model).get_input_embeddings()  # FSMT's has none
    return embedding if isinstance(embedding, torch.nn.Embedding) else None


def _known_tokens(model: PreTrainedModel, encoded: bool) -> int | None:
    """How many token ids can be read; None if a model may use higher ids for something other than text."""
    config, embedding = model.config, _embedding(model, encoded)
    if embedding is not None and encoded:
        return embedding.num_embeddings
    if embedding is None or config.get_text_config(decoder=True) is not config:
        return None
    return max(embedding.num_embeddings, getattr(config, "vocab_size", 0))  # a table may be spread over devices
