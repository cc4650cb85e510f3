"""Checks of a target, and of a draft for it."""

import inspect
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.architectures import ENCODERS, vocabulary
from hf_specx.common.errors import refusal, require
from hf_specx.common.tokenizers import same_tokens, vocabulary_of
from hf_specx.layouts.choose import layouts_of

from .vocabularies import compare_vocabularies


OWN_TEXT_LAYOUTS = ("ragged", "padded")  # of a draft with other tokens, whose rows grow each by its own number
OF_OTHER_HEADS = ("summary", "classifier")  # of no language model


@refusal
def random_in_training(role: str, model: PreTrainedModel) -> str | None:
    names = list(_active_dropout(model))
    if not names:
        return None
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"the {role} is in training mode, where its text is random or its statistics change ({shown}); call "
        f"{role}.eval(), or set these probabilities to 0."
    )


@refusal
def trained_without_a_cache(role: str, model: PreTrainedModel) -> str | None:
    if not any(module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return None
    return (
        f"the {role} is in training mode with gradient checkpointing, which turns its cache off; call {role}.eval() "
        "or gradient_checkpointing_disable() while it generates."
    )


@refusal
def weights_not_loaded(role: str, model: PreTrainedModel) -> str | None:
    empty = any(p.is_meta for p in model.parameters())
    if not empty or any(hasattr(module, "_hf_hook") for module in model.modules()):
        return None
    return (
        f"the {role} model has parameters on the meta device and no offload hook to load them; load its weights "
        "first, for example with from_pretrained(..., device_map='auto')."
    )


@refusal
def attends_in_both_directions(target: PreTrainedModel) -> str | None:
    config = target.config.get_text_config(decoder=True)
    if config.model_type not in ENCODERS or config.is_decoder:
        return None
    return (
        f"{type(target).__name__} attends in both directions (config.is_decoder=False), so that a candidate would "
        "change the distribution of the tokens before it; set is_decoder=True in its config."
    )


@refusal
def frequencies_that_change(target: PreTrainedModel, max_length: int) -> str | None:
    config = target.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(p for p in parameters.values() if isinstance(p, dict))]:
        kind, limit = rope.get("rope_type", "default"), getattr(config, "max_position_embeddings", None)
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings", limit)
        if kind in ("dynamic", "longrope") and limit is not None and max_length > limit:
            return (
                f"rope_type={kind!r} changes its frequencies after position {limit}, which candidates would reach "
                f"too early; keep prompt and new tokens within {limit} (they may be {max_length})."
            )
    return None


@refusal
def draft_with_an_encoder(target: PreTrainedModel, draft: PreTrainedModel) -> str | None:
    if target.config.is_encoder_decoder or not draft.config.is_encoder_decoder:
        return None
    return (
        f"the draft {type(draft).__name__} is an encoder-decoder, the target {type(target).__name__} is decoder-only; "
        "choose a decoder-only draft with the target's tokenizer."
    )


@refusal
def draft_that_hears(target: PreTrainedModel, draft: PreTrainedModel) -> str | None:
    names = target.main_input_name, draft.main_input_name
    if not _has_own_encoder(target, draft) or names[0] != "input_ids" or names[1] == "input_ids":
        return None
    return (
        f"the target {type(target).__name__} reads {names[0]} and the draft {type(draft).__name__} {names[1]}; choose "
        "a draft that reads what the target reads."
    )


@refusal
def other_mel_bins(target: PreTrainedModel, draft: PreTrainedModel) -> str | None:
    bins = [getattr(model.config, "num_mel_bins", None) for model in (target, draft)]
    if not _has_own_encoder(target, draft) or None in bins or bins[0] == bins[1]:
        return None
    return (
        f"the target hears {bins[0]} mel bins and the draft {bins[1]}, so they cannot read the same features; choose "
        f"a draft with num_mel_bins={bins[0]}."
    )


@refusal
def other_encoder_width(target: PreTrainedModel, draft: PreTrainedModel) -> str | None:
    shares = "encoder_outputs" in inspect.signature(draft.forward).parameters and not draft.config.is_encoder_decoder
    widths = [getattr(model.config, "d_model", None) for model in (target, draft)]
    if not (shares and target.config.is_encoder_decoder) or None in widths or widths[0] == widths[1]:
        return None
    return (
        f"the draft {type(draft).__name__} reads encoder outputs of width {widths[1]}, and the target's have "
        f"{widths[0]}; choose a draft with its own encoder, or with d_model={widths[0]}."
    )


def _has_own_encoder(target: PreTrainedModel, draft: PreTrainedModel) -> bool:
    both = target.config.is_encoder_decoder and draft.config.is_encoder_decoder
    return both and draft.get_encoder() is not target.get_encoder()


@refusal
def tokens_of_another_meaning(
    tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase
) -> str | None:
    if same_tokens(tokenizer, draft_tokenizer):
        return None
    token, number = min(tokenizer.get_vocab().items() ^ draft_tokenizer.get_vocab().items())
    return (
        f"the two tokenizers differ, for instance in {token!r} with id {number}; choose a draft with the "
        "target's tokenizer, or have SpeculativeDecoding match the tokens of a draft that it is given as a model."
    )


@refusal
def vocabularies_of_other_sizes(target: PreTrainedModel, draft: PreTrainedModel) -> str | None:
    sizes = [vocabulary(model) for model in (target, draft)]
    if sizes[0] == sizes[1]:
        return None
    return (
        f"the target scores {sizes[0]} tokens and the draft {sizes[1]}; pass tokenizer= and draft_tokenizer= to "
        "SpeculativeDecoding, which then compares them, and matches their tokens where they differ."
    )


@refusal
def own_text_with_an_encoder(draft: PreTrainedModel) -> str | None:
    if not draft.config.is_encoder_decoder:
        return None
    return (
        f"the draft {type(draft).__name__} has an encoder and another tokenizer than the target, so it cannot read "
        "what the target's encoder reads; choose a decoder-only draft, or one with the target's tokenizer."
    )


@refusal
def own_text_in_lockstep(draft: PreTrainedModel) -> str | None:
    if not set(layouts_of(draft, drafts=True)).isdisjoint(OWN_TEXT_LAYOUTS):
        return None
    return (
        f"the draft {type(draft).__name__} has another tokenizer than the target, so that rows of its text grow by "
        "unequal numbers of tokens, which it can only take one row at a time; choose a draft with attention alone, or "
        "one with the target's tokenizer."
    )


@refusal
def own_text_without_ids(draft: PreTrainedModel, width: int) -> str | None:
    if width:
        return None
    return (
        f"the draft {type(draft).__name__} has another tokenizer than the target and cannot read inputs_embeds; pass "
        "input_ids= as well."
    )


@refusal
def tokenizer_of_another_model(role: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str | None:
    added, size = tokenizer.added_tokens_decoder, vocabulary(model)
    ids = tokenizer.get_vocab() if vocabulary_of(tokenizer).largest >= size else {}
    beyond = {number: token for token, number in ids.items() if number >= size}
    plain = sorted(beyond.keys() - added.keys())
    told = f"the {role}'s tokenizer is not that of {type(model).__name__}:"
    if plain:
        return f"{told} {beyond[plain[0]]!r} has id {plain[0]}, and the model scores {size} tokens; pass its own."
    ends = getattr(model.generation_config, "eos_token_id", None)
    for number in [] if ends is None else ends if isinstance(ends, list) else [ends]:
        special = number in added or number in tokenizer.all_special_ids
        if number < size and not special and (text := tokenizer.convert_ids_to_tokens(number)) is not None:
            return f"{told} the model's texts end at id {number}, which means {text!r} there; pass its own."
    return None


@refusal
def check_lifted(model: PreTrainedModel) -> str | None:
    """Refuse a call by string in which Whisper's own `generate` has seen a draft, and so changes the distribution."""
    if model.config.model_type != "whisper":
        return None
    return (
        f"{type(model).__name__} drops begin_suppress_tokens where it is given assistant_model=, so that the text "
        "would not be the same; pass the draft as draft_model=."
    )


def _active_dropout(model: PreTrainedModel) -> Iterator[str]:
    """The modules of a model that draw random numbers or change in a forward, and what they are set to."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            yield name
        of_config = {} if (config := getattr(module, "config", None)) is None else vars(config)
        for key, value in (of_config | vars(module)).items():
            is_rate = isinstance(value, float) and value > 0
            if is_rate and ("drop" in key or "jitter" in key) and not key.startswith(OF_OTHER_HEADS):
                yield f"{name}.{key}={value}".removeprefix(".")
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            yield f"{name}.p={module.p}"


def check_target(model: PreTrainedModel, max_length: int) -> None:
    """Check that the target can be decoded exactly, whatever the draft."""
    check_adapter(model)
    random_in_training("target", model)
    trained_without_a_cache("target", model)
    weights_not_loaded("target", model)
    attends_in_both_directions(model)
    frequencies_that_change(model, max_length)


def check_adapter(inner: PreTrainedModel) -> None:
    """Check a target that PEFT's `generate` hands over: a learned prompt is no part of it, as learned weights are."""
    wrapper = getattr(inner.prepare_inputs_for_generation, "__self__", None)  # put there while PEFT's `generate` runs
    config = getattr(wrapper, "active_peft_config", None)
    told = f"the target has a learned prompt ({type(config).__name__}), which PEFT's own generate alone puts before "
    require(not getattr(config, "is_prompt_learning", False), f"{told}the text; use adapters in the weights, as LoRA.")


def check_own_text(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
    width: int,
) -> None:
    """Check that a draft with another tokenizer can run; `width` is the columns of the target's prompts in ids."""
    own_text_with_an_encoder(draft)
    own_text_in_lockstep(draft)
    own_text_without_ids(draft, width)
    _check_draft(draft)
    for role, model, own in (("target", target, tokenizer), ("draft", draft, draft_tokenizer)):
        if own is not None:
            tokenizer_of_another_model(role, model, own)


def _check_draft(draft: PreTrainedModel) -> None:
    weights_not_loaded("draft", draft)
    random_in_training("draft", draft)
    trained_without_a_cache("draft", draft)


def check_pair(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Check that the draft can run, and that its token ids mean what the target's mean."""
    _check_draft(draft)
    draft_with_an_encoder(target, draft)
    draft_that_hears(target, draft)
    other_mel_bins(target, draft)
    other_encoder_width(target, draft)
    if tokenizer is not None and draft_tokenizer is not None:
        tokens_of_another_meaning(tokenizer, draft_tokenizer)
    else:
        vocabularies_of_other_sizes(target, draft)
    if None in (tokenizer, draft_tokenizer) or draft_tokenizer is tokenizer:
        compare_vocabularies(target, draft, tokenizer, draft_tokenizer)
