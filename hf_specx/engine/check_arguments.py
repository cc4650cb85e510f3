"""Checks of what users give to `generate`, to a pair and to `generate_many`, before anything is prepared."""

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator
from transformers.generation.utils import GENERATION_MODES_MAPPING

from hf_specx.common.errors import check_names, is_int, kind, require
from hf_specx.common.wrappers import reads_text
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.drafting.several import has_forwards

from .entry import setting


NO_HEAD = "which scores no next token; load it with AutoModelForCausalLM or another class that can generate."
SINGLE_CALL_ARGUMENTS = """
    inputs input_ids attention_mask inputs_embeds position_ids cache past_key_values seeds streamer
    num_return_sequences return_dict_in_generate custom_generate synced_gpus assistant_model negative_prompt_ids
""".split()  # noqa: SIM905


def check_entry(model: Any, custom_generate: Any = None) -> None:
    """Raise ValueError if a model cannot be the target of a call with this `custom_generate`."""
    description = f"model is {kind(model)}"
    require(hasattr(model, "can_generate"), f"{description}; give the target itself, as from_pretrained loads it.")
    require(model.can_generate(), f"{description}, {NO_HEAD}")
    message = "custom_generate is a class; make a strategy of it first: SpeculativeDecoding(draft_model)."
    require(not isinstance(custom_generate, type), message)
    message = f"custom_generate={custom_generate!r} is a Path, which transformers ignores; pass it as a str."
    require(not isinstance(custom_generate, Path), message)


def known_arguments(model: Any) -> set[str]:
    """The names of what `generate` takes for a model: its own arguments, fields of a config, inputs of the model."""
    callables = [GenerationMixin.generate, type(model).generate, model.forward, model.prepare_inputs_for_generation]
    if model.config.is_encoder_decoder:
        callables += [part.forward for part in (model.get_encoder(), model.get_decoder()) if part is not None]
    taken = {name for function in callables for name in inspect.signature(function).parameters}
    return taken | vars(GenerationConfig()).keys()


def check_values(arguments: dict[str, Any]) -> None:
    """Raise ValueError if a tensor among the arguments of a call is on the meta device."""
    for name, value in arguments.items():
        message = f"{name} is on the meta device, which has shapes and no values; make it on the device of the model."
        require(not isinstance(value, torch.Tensor) or value.device.type != "meta", message)


def check_draft(draft_model: Any) -> None:
    """Raise ValueError if a draft, or a list of drafts, cannot serve any target."""
    drafts = draft_model if isinstance(draft_model, list | tuple) else [draft_model]
    require(len(drafts) > 0, "draft_model=[] has no draft; give a model, a SuffixDraft or both.")
    for number, draft in enumerate(drafts):
        is_list = isinstance(draft, list | tuple)
        require(not is_list, "draft_model has a list inside its list; give all drafts in one.")
        if not isinstance(draft, str | Path):  # what it names is checked once it is loaded
            _check_one_draft(draft)
        is_new = not any(draft is other for other in drafts[:number])
        require(is_new, f"draft_model has the same {type(draft).__name__} twice; give each draft once.")
    named = (PreTrainedModel, str, Path)
    models = [type(draft).__name__ for draft in drafts if isinstance(draft, named) or has_forwards(draft)]
    message = (
        f"draft_model has {len(models)} drafts that run forwards ({', '.join(models)}); give at most one of them."
    )
    require(len(models) <= 1, message)


def _check_one_draft(draft: Any) -> None:
    """Raise ValueError for an object that cannot draft."""
    message = f"draft_model is the class {getattr(draft, '__name__', '')}; give an object of it."
    require(not isinstance(draft, type), message)
    description = "draft_model is None" if draft is None else f"draft_model is {kind(draft)}"
    drafts = all(callable(getattr(draft, name, None)) for name in ("bind", "propose"))
    is_model = isinstance(draft, PreTrainedModel) and not drafts
    message = (
        f"{description}; give a model, its name, a CandidateGenerator, a Drafter (inherit from hf_specx.Drafter), or "
        "a draft without a model, as SuffixDraft()."
    )
    require(is_model or isinstance(draft, CandidateGenerator) or drafts, message)
    require(not is_model or draft.can_generate(), f"{description}, {NO_HEAD}")
    of_one_text = isinstance(draft, AssistedCandidateGenerator | SampledCandidateGenerator)
    require(not of_one_text, f"{description}, made for one text; give its model instead.")
    message = (
        f"{description}, which reads the target's outputs; give a model, or a CandidateGenerator that goes by the "
        "text alone."
    )
    require(not getattr(draft, "requires_model_outputs", False), message)


def check_pair_call(kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a call of a pair asks for what the pair brings itself, or has tensors without values."""
    for name in ("custom_generate", "draft_model", "assistant_model", "model"):
        message = f"{name}= has no place in the call of a pair, which has its own; use hf_specx.generate for that."
        require(kwargs.get(name) is None, message)
    check_values(kwargs)


def check_assistant_model(model: PreTrainedModel) -> None:
    """Raise ValueError if a call by string has its draft in `assistant_model=` and the target is a Whisper.

    Its own `generate` sees the argument too, and then changes the distribution.
    """
    message = (
        f"{type(model).__name__} drops begin_suppress_tokens where it is given assistant_model=; pass the draft as "
        "draft_model=."
    )
    require(model.config.model_type != "whisper", message)


def check_generate_many(
    model: Any, requests: Any, batch_size: int, max_batch_tokens: int | None, streamer: Any, kwargs: dict[str, Any]
) -> None:
    """Raise ValueError if `generate_many` cannot be called with these arguments."""
    check_entry(model)
    require(
        reads_text(model),
        f"{type(model).__name__} reads {model.main_input_name}, and requests are texts; "
        f"call generate with a batch of {model.main_input_name}.",
    )
    is_single = isinstance(requests, list | tuple) and requests and is_int(requests[0])
    is_iterable = isinstance(requests, Iterable) and not isinstance(requests, str | bytes | Mapping)
    message = (
        f"requests is {'a single prompt' if is_single else kind(requests)}; give a list of prompts, each a list of "
        "token ids without pads, as tokenizer(texts).input_ids."
    )
    require(is_iterable and not is_single and not hasattr(requests, "ndim"), message)
    require(is_int(batch_size) and batch_size >= 1, f"batch_size={batch_size!r} is no number of rows; give 1 or more.")
    message = f"max_batch_tokens={max_batch_tokens!r} is no number of tokens; give 1 or more, or None."
    require(max_batch_tokens is None or (is_int(max_batch_tokens) and max_batch_tokens >= 1), message)
    for name in SINGLE_CALL_ARGUMENTS:
        message = f"{name}= belongs to one call of generate; requests carry their own prompts, seeds and limits."
        require(kwargs.get(name) is None, message)
    number = setting("num_return_sequences", model, kwargs)
    message = (
        f"num_return_sequences={number!r} of a generation config is for one call of generate; set it to 1 there, and "
        "give the prompt as several requests."
    )
    require(number in (None, 1), message)
    message = "pass arguments of generate here, and options of the strategy to SpeculativeDecoding(...), or to a pair."
    check_names("generate", kwargs, known_arguments(model) | {"tokenizer"}, message)
    require(streamer is None, "a streamer shows one batch; iterate over the completions instead.")


def repository_of(model: Any, generation_config: GenerationConfig | None = None, **kwargs: Any) -> str:
    """The repository on the Hub whose code would decode a call of `generate`; empty if transformers decodes it."""
    config, _ = model._prepare_generation_config(generation_config, **kwargs)
    method = GENERATION_MODES_MAPPING[config.get_generation_mode(kwargs.get("assistant_model"))]
    return method if "/" in method else ""
