"""Refusals: what cannot be done exactly is said before any forward, with the value and the remedy."""

import numbers
from types import FrameType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator

from .abilities import ENCODERS
from .candidates import SampledCandidateGenerator
from .decoders import vocabulary
from .layouts import LAYOUTS


VERIFICATIONS = ("token", "block", "coupled")
STOCK_NOISE_DEVICES = ("cpu", "cuda")  # elsewhere stock draws ahead, or its generator cannot be read
UNSUPPORTED_MODES = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "prompt_lookup_num_tokens": "prompt lookup",
    "assistant_early_exit": "early exit",
    "use_mtp": "multi-token prediction heads",
    "assistant_ensemble_weight": "a mixture of draft and target",
    "constraints": "constrained decoding",
    "force_words_ids": "constrained decoding",
}
WITHHELD = {
    "streamer": "use SpeculativeDecoding(streamer=...) or hf_specx.generate(streamer=...)",
    "assistant_model": "the strategy has its draft already, so leave it out or use hf_specx.generate",
    "synced_gpus": "it is not available in this version, so leave it out",
    "tokenizer": "use SpeculativeDecoding(tokenizer=...) or, for stop strings, hf_specx.generate(tokenizer=...)",
    "assistant_tokenizer": "use SpeculativeDecoding(draft_tokenizer=...)",
}
NEEDED_METHODS = {
    "streamer": ("put", "end"),
    "tokenizer": ("get_vocab",),
    "draft_tokenizer": ("get_vocab",),
    "costs": ("table", "best_num_draft_tokens"),
}
UNSUPPORTED_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def check_options(options: dict[str, Any], unknown: dict[str, Any], draft_model: Any) -> None:
    """The options of a strategy, whatever model it will serve."""
    if not isinstance(draft_model, PreTrainedModel | CandidateGenerator):
        raise ValueError(f"draft_model is a {type(draft_model).__name__}; give a model or a CandidateGenerator.")
    if isinstance(draft_model, CandidateGenerator):
        _check_generator(draft_model, options["verification"])
    if unknown:
        raise ValueError(f"unknown option {min(unknown)!r}; known: {', '.join(options)}.")
    check_choices(options["num_draft_tokens"], options["verification"], options["layout"])
    if options["compile"] is not False:
        raise ValueError(f"compile={options['compile']!r} is not available in this version; use compile=False.")
    for name, needed in NEEDED_METHODS.items():
        value = options[name]
        if value is not None and not all(hasattr(value, method) for method in needed):
            raise ValueError(f"{name} is a {type(value).__name__} without {' and '.join(needed)}; leave it out.")


def check_choices(num_draft_tokens: Any, verification: Any, layout: Any = "auto") -> None:
    """The options that are chosen from a few values."""
    if num_draft_tokens != "auto":
        if not isinstance(num_draft_tokens, numbers.Integral) or isinstance(num_draft_tokens, bool):
            raise ValueError(
                f"num_draft_tokens={num_draft_tokens!r} is not a number; give an int of 1 or more, or 'auto'."
            )
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens={num_draft_tokens} is below 1; give 1 or more, or 'auto'.")
    if verification is not None and verification not in VERIFICATIONS:
        raise ValueError(f"verification={verification!r} is unknown; choose one of {', '.join(VERIFICATIONS)}.")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(LAYOUTS)}.")


def _check_generator(generator: CandidateGenerator, verification: str | None) -> None:
    if isinstance(generator, (AssistedCandidateGenerator, SampledCandidateGenerator)):
        raise ValueError(f"draft_model is a {type(generator).__name__}, made for one text; give its model instead.")
    if generator.requires_model_outputs:
        raise ValueError(
            f"draft_model is a {type(generator).__name__}, which reads the target's outputs; that is not available in "
            "this version."
        )
    if verification in ("token", "block"):
        raise ValueError(
            f"verification={verification!r} needs the law that candidates were drawn from, which a "
            "CandidateGenerator does not vouch for; use verification='coupled', exact for any candidates."
        )


def check_target(model: PreTrainedModel, max_length: int) -> None:
    """Whether the target can be decoded exactly, whatever the draft."""
    if model.training:
        raise ValueError("the target is in training mode, where dropout makes its text random; call target.eval().")
    _check_loaded("target", model)
    config = model.config.get_text_config(decoder=True)
    if config.model_type in ENCODERS and not config.is_decoder:
        raise ValueError(
            f"{type(model).__name__} attends in both directions (config.is_decoder=False), so that a candidate would "
            "change the law of the tokens before it; set is_decoder=True in its config."
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(p for p in parameters.values() if isinstance(p, dict))]:
        kind, limit = rope.get("rope_type", "default"), getattr(config, "max_position_embeddings", None)
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings", limit)
        if kind in ("dynamic", "longrope") and limit is not None and max_length > limit:
            raise ValueError(
                f"rope_type={kind!r} changes its frequencies behind position {limit}, which candidates would reach "
                f"too early; keep prompt and new tokens within {limit} (they may be {max_length})."
            )


def _check_loaded(name: str, model: PreTrainedModel) -> None:
    if any(p.is_meta for p in model.parameters()) and not any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise ValueError(
            f"the {name} model has parameters on the meta device and no offload hook to load them; "
            "load its weights first, for example with from_pretrained(..., device_map='auto')."
        )


def check_pair(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Whether the draft can run, and its token ids mean what the target's mean."""
    _check_loaded("draft", draft)
    if draft.training:
        raise ValueError("the draft is in training mode, where dropout draws random numbers; call draft.eval().")
    if draft.config.is_encoder_decoder and not target.config.is_encoder_decoder:
        raise ValueError(
            f"the draft {type(draft).__name__} is an encoder-decoder, the target {type(target).__name__} is "
            "decoder-only; choose a decoder-only draft with the target's tokenizer."
        )
    if tokenizer is not None and draft_tokenizer is not None:
        tokens, draft_tokens = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
        if tokens != draft_tokens:
            token, number = min(tokens.items() ^ draft_tokens.items())
            raise ValueError(
                f"the two tokenizers differ, for instance in {token!r} with id {number}; speculative decoding needs a "
                "draft with the target's own vocabulary."
            )
        return
    sizes = [vocabulary(model) for model in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the target has {sizes[0]} tokens and the draft {sizes[1]}; if both have the same tokenizer and differ "
            "only by padding, pass tokenizer= and draft_tokenizer= so that this can be checked."
        )


def check_call(
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    verification: str,
    streams: bool,
) -> None:
    """What one call of `generate` asks for."""
    _check_mode(generation_config)
    if verification == "coupled" and input_ids.device.type not in STOCK_NOISE_DEVICES:
        raise ValueError(
            f"verification='coupled' cannot redraw stock's noise on device type {input_ids.device.type!r}; use "
            "'block' there."
        )
    if model_kwargs.get("use_cache") is False:
        raise ValueError("use_cache=False cannot be honoured: judging candidates needs a cache; leave it out.")
    if generation_config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={generation_config.cache_implementation!r} cannot be honoured: speculative "
            "decoding keeps a cache of its own; leave it out."
        )
    if generation_config.prefill_chunk_size is not None:
        raise ValueError(
            f"prefill_chunk_size={generation_config.prefill_chunk_size} is not available with speculative decoding in "
            "this version; leave it out."
        )
    if input_ids.numel() == 0 and model_kwargs.get("inputs_embeds") is None:
        raise ValueError(
            f"the prompt is empty (input_ids of shape {tuple(input_ids.shape)}); pass at least one token a row, for "
            "example the bos token."
        )
    if streams and len(input_ids) > 1:
        raise ValueError(f"a streamer takes one row, and the batch has {len(input_ids)}; leave the streamer out.")
    if "encoder_outputs" in model_kwargs:
        _check_mask(model_kwargs.get("decoder_attention_mask"))
    else:
        _check_mask(model_kwargs.get("attention_mask"))


def _check_mode(config: GenerationConfig) -> None:
    if config.num_beams not in (None, 1):
        raise ValueError(f"num_beams={config.num_beams} is beam search; set num_beams=1 for greedy or sampling.")
    if config.num_beam_groups not in (None, 1):
        raise ValueError(f"num_beam_groups={config.num_beam_groups} is beam search; leave it out.")
    for name, mode in UNSUPPORTED_MODES.items():
        value = getattr(config, name, None)
        if value is not None and value is not False:
            raise ValueError(f"{name}={value!r} selects {mode}; leave it out for greedy decoding or sampling.")
    for name in UNSUPPORTED_OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name):
            raise ValueError(f"{name}=True is not available with speculative decoding in this version; leave it out.")


def _check_mask(mask: torch.Tensor | None) -> None:
    if mask is None:
        return
    if not mask.any(-1).all():
        row = int((~mask.any(-1)).nonzero()[0])
        raise ValueError(f"the prompt of row {row} is empty (attention_mask is all 0); pass at least one token a row.")
    if not mask[:, -1].all():
        row = int((mask[:, -1] == 0).nonzero()[0])
        raise ValueError(
            f"row {row} of attention_mask ends in 0: prompts must be padded on the left; set "
            "tokenizer.padding_side='left'. If you passed no attention_mask, transformers took the pad id for "
            "padding; pass the mask."
        )
    seen = mask.bool()
    if not (seen.cummax(-1).values == seen).all():
        raise ValueError("attention_mask has zeros between tokens of a row; only padding on the left is supported.")


def check_withheld(frame: FrameType | None) -> None:
    """Refuse what transformers drops on its way to a callable, read from the frame of `GenerationMixin.generate`.

    A streamer was given the prompt already by then; it is ended, so that nobody waits for it.
    """
    if frame is None or frame.f_code.co_name != "generate" or "custom_generate" not in frame.f_locals:
        return
    given = {name: frame.f_locals.get(name) for name in WITHHELD}
    outer = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None  # generate pops it from its own
    for name in ("tokenizer", "assistant_tokenizer"):
        given[name] = outer.get(name) if isinstance(outer, dict) else None
    for name, value in given.items():
        if value is not None and value is not False:
            if name == "streamer":
                value.end()
            raise ValueError(f"transformers does not pass {name}= on to a strategy object; {WITHHELD[name]}.")


def check_lifted(model: PreTrainedModel) -> None:
    """Refuse a call by string in which Whisper's own `generate` has seen a draft, and has changed the law for it."""
    if model.config.model_type == "whisper":
        raise ValueError(
            f"{type(model).__name__} drops begin_suppress_tokens where it is given assistant_model=, so that the text "
            "would not be the same; pass the draft as draft_model=."
        )
