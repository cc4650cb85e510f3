"""Whether what a call gives can be decoded: its text, masks, positions, cache, seeds, and ways of generating."""

from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_specx.common.errors import is_int, require
from hf_specx.models.prompts import Prompt, position_table
from hf_specx.models.slots import CACHE, tokens_held


WITHOUT_HOLES = ("led",)  # its decoder takes a mask, but sees what it hides
NOISE_DEVICES = ("cpu", "cuda")  # on others `generate` draws noise ahead, or the generator cannot be read
MAX_SEED = 2**63
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
DRAFTS_INSTEAD = {"prompt_lookup_num_tokens": "SuffixDraft({})", "assistant_early_exit": "EarlyExitDraft({})"}
DRAFTS_INSTEAD |= {"use_mtp": "MtpDraft()"}


def check_mode(prompt: Prompt, streamer: Any) -> None:
    """Check that a call asks for greedy decoding or sampling, with a cache and a stream that can be kept."""
    given, config, rows = prompt.kwargs, prompt.generation_config, len(prompt.input_ids)
    for name in ("num_beams", "num_beam_groups"):
        value = getattr(config, name, None)
        require(value in (None, 1), f"{name}={value} is beam search, which is not supported; set {name}=1.")
    for name, mode in OTHER_MODES.items():
        value = getattr(config, name, None)
        draft, instead = DRAFTS_INSTEAD.get(name, "").format(value), "for greedy decoding or sampling"
        if draft:
            instead = f"give SpeculativeDecoding({draft}), or a list of it and other drafts, and"
        told = f"{name}={value!r} selects {mode}; {instead} leave it out, also of model.generation_config."
        require(value is None or value is False, told)
    cache, past, size = config.cache_implementation, given.get(CACHE), config.prefill_chunk_size
    told = "use_cache=False cannot be honoured: candidates need a cache; pass use_cache=True."
    require(given.get("use_cache") is not False, told)
    require(cache in (None, "dynamic"), f"cache_implementation={cache!r} cannot be honoured; leave it out.")
    told = f"prefill_chunk_size={size!r} is no number of tokens; give an int of 1 or more, or leave it out."
    require(size is None or (is_int(size) and size >= 1), told)
    told = f"{CACHE} is a {type(past).__name__}, and rejected tokens cannot be taken out; pass a DynamicCache."
    require(not isinstance(past, StaticCache), told)
    tags_rows = hasattr(streamer, "put_row") and hasattr(streamer, "end_row")
    told = f"a {type(streamer).__name__} takes one row, and the batch has {rows}; use hf_specx.BatchStreamer."
    require(streamer is None or rows == 1 or tags_rows, told)


def check_noise(device: torch.device, verification: str) -> None:
    """Check that the random numbers of a call can be drawn where its text is; "greedy" draws none."""
    told = "sampling draws numbers of 64 bits, which device type 'mps' does not have; use do_sample=False or the CPU."
    require(verification == "greedy" or device.type != "mps", told)
    told = f"'coupled' cannot redraw the noise of sampling on {device.type!r}; use verification='token' or 'block'."
    require(verification != "coupled" or device.type in NOISE_DEVICES, told)


def unknown_token(model: PreTrainedModel, input_ids: torch.Tensor, encoded: bool = False) -> None:
    """Check that a model knows all tokens; `encoded` asks its encoder."""
    config, embedding = model.config, _embedding(model, encoded)
    if embedding is None or not input_ids.numel():
        return
    if not encoded and config.get_text_config(decoder=True) is not config:
        return  # higher ids may be something other than text
    # a table may be spread over devices
    size = max(embedding.num_embeddings, 0 if encoded else getattr(config, "vocab_size", 0))
    lowest, highest = torch.stack(torch.aminmax(input_ids)).tolist()
    told = f"input_ids has the token id {lowest if lowest < 0 else highest}, and {type(model).__name__} embeds 0 to "
    require(lowest >= 0 and highest < size, f"{told}{size - 1}; use its own tokenizer, or resize_token_embeddings.")


def _embedding(model: PreTrainedModel, encoded: bool = False) -> torch.nn.Embedding | None:
    """The embedding of a decoder-only model's text, or of what an encoder reads; None if it is not a plain table."""
    if model.config.is_encoder_decoder != encoded:
        return None
    reads: Any = model.get_encoder() if encoded else model
    embedding = (reads if hasattr(reads, "get_input_embeddings") else model).get_input_embeddings()  # FSMT's has none
    return embedding if isinstance(embedding, torch.nn.Embedding) else None


def check_inputs(prompt: Prompt) -> None:
    """Check the text that one call of `generate` is given, as `generate` has prepared it."""
    model, input_ids, kwargs = prompt.model, prompt.input_ids, prompt.kwargs
    decodes = "encoder_outputs" in kwargs
    embeds = None if decodes else kwargs.get("inputs_embeds")
    shape, dtype = tuple(input_ids.shape), input_ids.dtype
    require(len(shape) == 2, f"input_ids of shape {shape} is no batch of texts; pass [rows, tokens].")
    is_integer = not (dtype.is_floating_point or dtype == torch.bool)
    require(is_integer, f"input_ids has dtype {dtype}; pass integers, for example input_ids.long().")
    told = f"the prompt is empty (input_ids of shape {shape}); pass at least one token a row."
    require(bool(input_ids.numel()) or embeds is not None, told)
    if embeds is None:
        unknown_token(model, input_ids)
    elif (embedding := _embedding(model)) is not None:
        told = f"inputs_embeds of width {embeds.shape[-1]} cannot be read by the target, which embeds in "
        told += f"{embedding.embedding_dim}; make them with model.get_input_embeddings()."
        require(embeds.shape[-1] == embedding.embedding_dim, told)
    _check_past_and_mask(prompt, embeds, "decoder_attention_mask" if decodes else "attention_mask")


def _check_past_and_mask(prompt: Prompt, embeds: torch.Tensor | None, name: str) -> None:
    """Check that mask, positions and a cache are those of the text, which may be given as embeddings."""
    (rows, width), kwargs = prompt.input_ids.shape, prompt.kwargs
    past, decodes = kwargs.get(CACHE), name != "attention_mask"
    held = 0 if past is None else tokens_held(past)
    widths = {width} if embeds is None else {width, embeds.shape[1]} - {0}
    mask = kwargs.get(name)
    known = getattr(prompt.generation_config, "_mask_length", None) if mask is None else mask.shape[-1]  # if all ones
    if held and embeds is None and not decodes and known == width:  # `generate` then takes it for the whole text
        told = f"{CACHE} holds {held} tokens, and the whole text has {known}; pass the text with at least one "
        require(held < known, f"{told}token more than the cache holds, or the new tokens alone with a mask for all.")
    fits = mask is None or (mask.ndim == 2 and len(mask) == rows)
    told = f"{name} of shape {None if mask is None else tuple(mask.shape)} is no 2D mask of {rows} rows; pass the one "
    require(fits, f"{told}that came with input_ids, 1 for a token and 0 for a pad.")
    told = f"{name} has {known} columns, and the text {' or '.join(map(str, sorted(widths)))}; pass the mask that "
    told += f"came with input_ids, with columns before them for the {held} tokens of {CACHE}."
    require(known is None or known in widths or known - held in widths, told)
    positions = None if decodes else kwargs.get("position_ids")
    if positions is not None and positions.ndim <= 2:  # models with several kinds of positions check their own
        new = max(widths) - held
        fits = positions.ndim == 2 and positions.shape[0] in (1, rows) and positions.shape[1] >= new
        told = f"position_ids of shape {tuple(positions.shape)} has no position for each token of the prompt of shape "
        require(fits, f"{told}{(rows, new)}; pass one a token, or leave it out.")
    if mask is None:
        return
    mask = mask.cpu()  # so that all that follow wait for the device once
    seen = mask.bool()
    strange = mask[(mask != 0) & (mask != 1)][:1].tolist()
    require(not strange, f"{name} has the value {(strange or [0])[0]}; pass 1 for a token and 0 for a pad.")
    unset = f"If you passed no mask, transformers took the pad id for padding; pass {name} with a 1 for each token."
    for row, (filled, last) in enumerate(zip(seen.any(-1).tolist(), seen[:, -1].tolist(), strict=True)):
        require(filled, f"the prompt of row {row} is empty ({name} is all 0); pass at least one token a row. {unset}")
        told = f"row {row} of {name} ends in 0: pad prompts on the left, set tokenizer.padding_side='left'. {unset}"
        require(last, told)
    no_holes = prompt.model.config.model_type not in WITHOUT_HOLES or (seen.cummax(-1).values == seen).all()
    told = f"{name} has zeros between tokens of a row, which {type(prompt.model).__name__} ignores; pad on the left "
    require(bool(no_holes), f"{told}only.")


def check_length(prompt: Prompt, new_tokens: int) -> None:
    """Check that a text can get so many new tokens: by its rotary frequencies, or by its table of positions."""
    model, width, mask = prompt.model, prompt.input_ids.shape[1], prompt.kwargs.get("attention_mask")
    if not model.config.is_encoder_decoder:  # the text may be passed as embeddings, or without what a cache holds
        width = getattr(prompt.generation_config, "_mask_length", width) if mask is None else mask.shape[-1]
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):  # one for each kind of layer, in some models
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        limit = getattr(config, "max_position_embeddings", None)
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings", limit)
        told = f"rope_type={kind!r} changes its frequencies after position {limit}, which candidates reach too early; "
        told += f"keep prompt and new tokens within {limit} (they may be {width + new_tokens})."
        require(kind not in ("dynamic", "longrope") or limit is None or width + new_tokens <= limit, told)
    kept = getattr(config, "keep_window_size", None)
    told = f"{type(model).__name__} leaves tokens out of texts longer than keep_window_size={kept}, and of equal ones "
    told += f"rounding decides, in plain generate too; keep within it (there may be {width + new_tokens} tokens)."
    require(kept is None or width + new_tokens <= kept, told)
    table = position_table(model)
    if table is None:
        return
    positions = None if model.config.is_encoder_decoder else prompt.kwargs.get("position_ids")
    if positions is not None and positions.ndim == 2:  # pads have none
        width = int(positions.max()) + 1
    if width + new_tokens - 1 <= table:  # the last one is not fed
        return
    room = table + 1 - width
    remedy = f"set max_new_tokens={room} or less" if room > 0 else f"shorten the prompt to {table} tokens or fewer"
    told = f"the prompt has {width} tokens and may get {new_tokens} new ones, and {type(model).__name__} has a table "
    raise ValueError(f"{told}of {table} positions, beyond which plain generate fails; {remedy}.")


def check_encoder_positions(model: PreTrainedModel, prompt_tokens: int) -> None:
    """Check that the encoder of a model has a position for each token of a prompt."""
    table = position_table(model, encoder=True)
    told = f"the prompt has {prompt_tokens} tokens, and the encoder of {type(model).__name__} has a table of {table} "
    require(table is None or prompt_tokens <= table, f"{told}positions; shorten the prompt.")


def as_list(seeds: Any) -> Any:
    """Seeds as a list of ints, if that is what a list, tuple, range, tensor or array holds; else what was given."""
    seeds = seeds.tolist() if hasattr(seeds, "tolist") else seeds
    if not isinstance(seeds, list | tuple | range):
        return seeds
    return [seed.tolist() if hasattr(seed, "tolist") else seed for seed in seeds]


def check_seeds(seeds: Any, rows: int, verification: str, lockstep: bool, of_requests: bool = False) -> None:
    """Check that `seeds`, of a call or of its requests, can make each of so many rows independent of the others."""
    ints = isinstance(seeds, list) and all(map(is_int, seeds))
    require(ints, f"seeds={seeds!r} is not a list of ints; give one int a row.")
    told = f"there are {len(seeds)} seeds for {rows} rows (num_return_sequences included); give one a row."
    require(len(seeds) == rows, told)
    for seed in seeds:
        told = f"the seed {seed} is outside of what torch takes; give ints from 0 to 2**63 - 1."
        require(0 <= seed < MAX_SEED, told)
    told = "requests have seeds of their own, which cannot" if of_requests else "seeds= cannot"
    told += f" make rows independent with verification={verification!r} and layout='lockstep', where all rows advance "
    told += "as far as the slowest; use verification='coupled', or another layout if the model takes one."
    require(rows == 1 or not lockstep or verification not in ("token", "block"), told)


def check_guidance(
    processor: UnbatchedClassifierFreeGuidanceLogitsProcessor, model: PreTrainedModel, rows: int
) -> None:
    """Check that a model can be guided by negative prompts, and that these fit a batch of so many rows."""
    told = f"guidance_scale= works for decoder-only models, and {type(model).__name__} has an encoder; leave it out."
    require(not model.config.is_encoder_decoder, told)
    context: dict[str, Any] = processor.unconditional_context
    ids, mask = context["input_ids"], context["attention_mask"]
    if ids is None or not context["first_pass"]:
        return
    told = f"negative_prompt_ids has {len(ids)} rows and the batch {rows} (num_return_sequences included); give one "
    require(len(ids) == rows, f"{told}negative prompt a row.")
    if mask is not None:
        told = f"negative_prompt_attention_mask of shape {tuple(mask.shape)} does not fit negative_prompt_ids of "
        require(mask.shape == ids.shape, f"{told}shape {tuple(ids.shape)}; pass both as the tokenizer gives them.")
        for row, last in enumerate(mask[:, -1].tolist()):
            told = f"row {row} of negative_prompt_attention_mask ends in 0: set tokenizer.padding_side='left'."
            require(bool(last), told)
