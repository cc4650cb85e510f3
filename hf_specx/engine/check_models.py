"""Checks of a target, and of a draft for it."""

import inspect
from collections.abc import Iterator

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specx.common.architectures import ENCODERS, vocabulary
from hf_specx.common.errors import require
from hf_specx.common.tokenizers import same_tokens, vocabulary_of
from hf_specx.models.choose import layouts_of

from .check_vocabularies import compare_vocabularies


OWN_TEXT_LAYOUTS = ("ragged", "padded")  # of a draft with other tokens, whose rows grow each by its own number
OF_OTHER_HEADS = ("summary", "classifier")  # of no language model


def check_target(model: PreTrainedModel, max_length: int) -> None:
    """Check that the target can be decoded exactly, whatever the draft; `max_length` is the most tokens of a row."""
    check_adapter(model)
    _check_ready("target", model)
    config = model.config.get_text_config(decoder=True)
    require(
        config.model_type not in ENCODERS or config.is_decoder,
        f"{type(model).__name__} attends in both directions (config.is_decoder=False), so that a candidate would "
        "change the distribution of the tokens before it; set is_decoder=True in its config.",
    )
    frequencies_that_change(model, max_length)


def frequencies_that_change(target: PreTrainedModel, max_length: int) -> None:
    """Check that rotary frequencies stay the same up to this length."""
    config = target.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(p for p in parameters.values() if isinstance(p, dict))]:
        kind, limit = rope.get("rope_type", "default"), getattr(config, "max_position_embeddings", None)
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings", limit)
        require(
            kind not in ("dynamic", "longrope") or limit is None or max_length <= limit,
            f"rope_type={kind!r} changes its frequencies after position {limit}, which candidates would reach too "
            f"early; keep prompt and new tokens within {limit} (they may be {max_length}).",
        )


def check_adapter(inner: PreTrainedModel) -> None:
    """Check a target that PEFT's `generate` hands over: a learned prompt is no part of it, as learned weights are."""
    wrapper = getattr(inner.prepare_inputs_for_generation, "__self__", None)  # put there while PEFT's `generate` runs
    config = getattr(wrapper, "active_peft_config", None)
    told = f"the target has a learned prompt ({type(config).__name__}), which PEFT's own generate alone puts before "
    require(not getattr(config, "is_prompt_learning", False), f"{told}the text; use adapters in the weights, as LoRA.")


def check_lifted(model: PreTrainedModel) -> None:
    """Refuse a call by string in which Whisper's own `generate` has seen a draft, and so changes the distribution."""
    require(
        model.config.model_type != "whisper",
        f"{type(model).__name__} drops begin_suppress_tokens where it is given assistant_model=, so that the text "
        "would not be the same; pass the draft as draft_model=.",
    )


def check_pair(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Check that the draft can run, and that its token ids mean what the target's mean."""
    _check_ready("draft", draft)
    _check_encoder(target, draft)
    if tokenizer is None or draft_tokenizer is None:
        vocabularies_of_other_sizes(target, draft)
    elif not same_tokens(tokenizer, draft_tokenizer):
        token, number = min(tokenizer.get_vocab().items() ^ draft_tokenizer.get_vocab().items())
        told = f"the two tokenizers differ, for instance in {token!r} with id {number}; choose a draft with the "
        told += (
            "target's tokenizer, or have SpeculativeDecoding match the tokens of a draft that it is given as a model."
        )
        raise ValueError(told)
    if None in (tokenizer, draft_tokenizer) or draft_tokenizer is tokenizer:
        compare_vocabularies(target, draft, tokenizer, draft_tokenizer)


def vocabularies_of_other_sizes(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Check that both score equally many tokens."""
    sizes = [vocabulary(model) for model in (target, draft)]
    require(
        sizes[0] == sizes[1],
        f"the target scores {sizes[0]} tokens and the draft {sizes[1]}; pass tokenizer= and draft_tokenizer= to "
        "SpeculativeDecoding, which then compares them, and matches their tokens where they differ.",
    )


def check_own_text(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
    width: int,
) -> None:
    """Check that a draft with another tokenizer can run; `width` is the columns of the target's prompts in ids."""
    name = type(draft).__name__
    require(
        not draft.config.is_encoder_decoder,
        f"the draft {name} has an encoder and another tokenizer than the target, so it cannot read what the target's "
        "encoder reads; choose a decoder-only draft, or one with the target's tokenizer.",
    )
    require(
        not set(layouts_of(draft, drafts=True)).isdisjoint(OWN_TEXT_LAYOUTS),
        f"the draft {name} has another tokenizer than the target, so that rows of its text grow by unequal numbers of "
        "tokens, which it can only take one row at a time; choose a draft with attention alone, or one with the "
        "target's tokenizer.",
    )
    told = f"the draft {name} has another tokenizer than the target and cannot read inputs_embeds; pass input_ids= as "
    require(width > 0, f"{told}well.")
    _check_ready("draft", draft)
    for role, model, own in (("target", target, tokenizer), ("draft", draft, draft_tokenizer)):
        if own is not None:
            _check_tokenizer(role, model, own)


def _check_ready(role: str, model: PreTrainedModel) -> None:
    """Check that a model has its weights, and that nothing in it is random or without a cache."""
    empty = [parameter for parameter in model.parameters() if parameter.is_meta]
    training = [module for module in model.modules() if module.training]
    require(
        not empty or any(hasattr(module, "_hf_hook") for module in model.modules()),
        f"the {role} model has parameters on the meta device and no offload hook to load them; load its weights "
        "first, for example with from_pretrained(..., device_map='auto').",
    )
    names = list(_active_dropout(model))
    shown = ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
    require(
        not names,
        f"the {role} is in training mode, where its text is random or its statistics change ({shown}); call "
        f"{role}.eval(), or set these probabilities to 0.",
    )
    require(
        not any(getattr(module, "gradient_checkpointing", False) for module in training),
        f"the {role} is in training mode with gradient checkpointing, which turns its cache off; call {role}.eval() "
        "or gradient_checkpointing_disable() while it generates.",
    )


def _active_dropout(model: PreTrainedModel) -> Iterator[str]:
    """The modules of a model that draw random numbers or change in a forward, and what they are set to."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, _BatchNorm):
            yield name
        of_config = {} if (config := getattr(module, "config", None)) is None else vars(config)
        for key, value in (of_config | vars(module)).items():
            is_rate = isinstance(value, float) and value > 0
            if is_rate and ("drop" in key or "jitter" in key) and not key.startswith(OF_OTHER_HEADS):
                yield f"{name}.{key}={value}".removeprefix(".")
        if isinstance(module, _DropoutNd) and module.p > 0:
            yield f"{name}.p={module.p}"


def _check_encoder(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Check that a draft can read what the target's encoder reads, or gives."""
    name, encodes = type(draft).__name__, target.config.is_encoder_decoder
    require(
        encodes or not draft.config.is_encoder_decoder,
        f"the draft {name} is an encoder-decoder, the target {type(target).__name__} is decoder-only; choose a "
        "decoder-only draft with the target's tokenizer.",
    )
    if encodes and draft.config.is_encoder_decoder and draft.get_encoder() is not target.get_encoder():
        reads = [model.main_input_name for model in (target, draft)]
        bins = [getattr(model.config, "num_mel_bins", None) for model in (target, draft)]
        require(
            reads[0] != "input_ids" or reads[1] == "input_ids",
            f"the target {type(target).__name__} reads {reads[0]} and the draft {name} {reads[1]}; choose a draft "
            "that reads what the target reads.",
        )
        require(
            None in bins or bins[0] == bins[1],
            f"the target hears {bins[0]} mel bins and the draft {bins[1]}, so they cannot read the same features; "
            f"choose a draft with num_mel_bins={bins[0]}.",
        )
    shares = "encoder_outputs" in inspect.signature(draft.forward).parameters and not draft.config.is_encoder_decoder
    widths = [getattr(model.config, "d_model", None) for model in (target, draft)]
    require(
        not (shares and encodes) or None in widths or widths[0] == widths[1],
        f"the draft {name} reads encoder outputs of width {widths[1]}, and the target's have {widths[0]}; choose a "
        f"draft with its own encoder, or with d_model={widths[0]}.",
    )


def _check_tokenizer(role: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer is that of a model, as far as one can tell."""
    added, size = tokenizer.added_tokens_decoder, vocabulary(model)
    ids = tokenizer.get_vocab() if vocabulary_of(tokenizer).largest >= size else {}
    beyond = {number: token for token, number in ids.items() if number >= size}
    plain = sorted(beyond.keys() - added.keys())
    told = f"the {role}'s tokenizer is not that of {type(model).__name__}:"
    if plain:
        shown = f"{beyond[plain[0]]!r} has id {plain[0]}"
        raise ValueError(f"{told} {shown}, and the model scores {size} tokens; pass its own.")
    ends = getattr(model.generation_config, "eos_token_id", None)
    for number in [] if ends is None else ends if isinstance(ends, list) else [ends]:
        special = number in added or number in tokenizer.all_special_ids
        text = None if number >= size or special else tokenizer.convert_ids_to_tokens(number)
        require(
            text is None, f"{told} the model's texts end at id {number}, which means {text!r} there; pass its own."
        )
