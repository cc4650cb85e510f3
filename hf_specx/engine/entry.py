"""How we are called: what `generate` hands over, and arguments that it would drop, misread or fail on."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GENERATION_MODES_MAPPING

from hf_specx.common.errors import check_names, is_int, kind, require
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.drafting.several import has_forwards
from hf_specx.models.prompts import PreparedInputs


OF_DRAFTS = {  # arguments of `generate` that a strategy object has its own of, and the remedy
    "assistant_model": "the strategy has its draft already, so leave it out or use hf_specx.generate",
    "assistant_tokenizer": "use SpeculativeDecoding(draft_tokenizer=...)",
}
OF_STRATEGIES: tuple[str, ...] = ("draft_model", "num_draft_tokens", "verification", "layout", "compile", "costs")
OF_STRATEGIES += ("stream_by", "draft_tokenizer", "tokenizer_match")
NO_HEAD = "which scores no next token; load it with AutoModelForCausalLM or another class that can generate."
GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
OF_ONE_REQUEST = """
    inputs input_ids attention_mask inputs_embeds position_ids cache past_key_values seeds streamer
    num_return_sequences return_dict_in_generate custom_generate synced_gpus assistant_model negative_prompt_ids
""".split()  # noqa: SIM905


def prepared(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    inputs_tensor: torch.Tensor | None = None,
    seeds: Any = None,
    tokenizer: Any = None,
    **inputs: Any,
) -> PreparedInputs:
    """What `generate` hands to a decoding method, and an argument of ours, `seeds`.

    It has used the tokenizer for stop strings, which are criteria by now, and to heal the ends of prompts.
    """
    criteria = stopping_criteria
    if len(input_ids) == 1:  # then lm-eval's criterion depends on the text of this row alone
        is_of_row = [type(criterion).__name__ == "MultiTokenEOSCriteria" for criterion in criteria]
        pairs = zip(criteria, is_of_row, strict=True)
        criteria = StoppingCriteriaList(OneStop(criterion) if flag else criterion for criterion, flag in pairs)
    return PreparedInputs(
        model,
        input_ids,
        generation_config,
        inputs,
        processors=logits_processor,
        criteria=criteria,
        inputs_tensor=inputs_tensor,
        seeds=seeds,
    )


class OneStop(StoppingCriteria):
    """lm-eval's criterion for a stop sequence: it keeps which rows have it, and one row ends there anyway."""

    stateless = True

    def __init__(self, criterion: Any):
        self.criterion = criterion

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether each of several texts [R, L] that the row may have ends: [R] bool."""
        stops = []
        for text in input_ids:
            self.criterion.done_tracker = [False]
            stops.append(self.criterion(text[None], scores, **kwargs))
        return torch.tensor(stops, device=input_ids.device)


def check_entry(model: Any, custom_generate: Any = None) -> None:
    """Raise ValueError if a target cannot be called, or not by the `custom_generate` of the call."""
    description = f"model is {kind(model)}"
    require(hasattr(model, "can_generate"), f"{description}; give the target itself, as from_pretrained loads it.")
    require(model.can_generate(), f"{description}, {NO_HEAD}")
    message = "custom_generate is a class; make a strategy of it first: SpeculativeDecoding(draft_model)."
    require(not isinstance(custom_generate, type), message)
    message = f"custom_generate={custom_generate!r} is a Path, which transformers ignores; pass it as a str."
    require(not isinstance(custom_generate, Path), message)


def known_arguments(model: Any) -> set[str]:
    """Names of what `generate` takes for a model: its own arguments, fields of a config, inputs of the model."""
    callables = [GenerationMixin.generate, type(model).generate, model.forward, model.prepare_inputs_for_generation]
    if model.config.is_encoder_decoder:
        callables += [part.forward for part in (model.get_encoder(), model.get_decoder()) if part is not None]
    taken = {name for function in callables for name in inspect.signature(function).parameters}
    return taken | vars(GenerationConfig()).keys()


def check_values(arguments: dict[str, Any]) -> None:
    """Raise ValueError if a tensor among the arguments of a call has no values."""
    for name, value in arguments.items():
        message = f"{name} is on the meta device, which has shapes and no values; make it on the device of the model."
        require(not isinstance(value, torch.Tensor) or value.device.type != "meta", message)


def check_draft(draft_model: Any) -> None:
    """Raise ValueError for what cannot draft for any target; of a list, each alone and all of them together."""
    drafts = draft_model if isinstance(draft_model, list | tuple) else [draft_model]
    require(len(drafts) > 0, "draft_model=[] has no draft; give a model, a SuffixDraft or both.")
    for number, draft in enumerate(drafts):
        is_list = isinstance(draft, list | tuple)
        require(not is_list, "draft_model has a list inside its list; give all drafts in one.")
        if not isinstance(draft, str | Path):  # what it names is checked once it is loaded
            _check_one(draft)
        is_new = not any(draft is other for other in drafts[:number])
        require(is_new, f"draft_model has the same {type(draft).__name__} twice; give each draft once.")
    named = (PreTrainedModel, str, Path)
    models = [type(draft).__name__ for draft in drafts if isinstance(draft, named) or has_forwards(draft)]
    message = (
        f"draft_model has {len(models)} drafts that run forwards ({', '.join(models)}); give at most one of them."
    )
    require(len(models) <= 1, message)


def _check_one(draft: Any) -> None:
    """Raise ValueError for an object that cannot draft."""
    message = f"draft_model is the class {getattr(draft, '__name__', '')}; give an object of it."
    require(not isinstance(draft, type), message)
    description = "draft_model is None" if draft is None else f"draft_model is {kind(draft)}"
    drafts = all(callable(getattr(draft, name, None)) for name in ("bind", "propose"))
    is_model = isinstance(draft, PreTrainedModel) and not drafts
    message = "give a model, its name, a CandidateGenerator, a Drafter (inherit from hf_specx.Drafter), or a draft "
    can_draft = is_model or isinstance(draft, CandidateGenerator) or drafts
    require(can_draft, f"{description}; {message}without a model, as SuffixDraft().")
    require(not is_model or draft.can_generate(), f"{description}, {NO_HEAD}")
    of_one_text = isinstance(draft, AssistedCandidateGenerator | SampledCandidateGenerator)
    require(not of_one_text, f"{description}, made for one text; give its model instead.")
    message = "which reads the target's outputs; give a model, or a CandidateGenerator that goes by the text alone."
    require(not getattr(draft, "requires_model_outputs", False), f"{description}, {message}")


def check_pair_call(kwargs: dict[str, Any]) -> None:
    """Raise ValueError if a call of a pair asks for what the pair brings itself, or has tensors without values."""
    for name in ("custom_generate", "draft_model", "assistant_model", "model"):
        message = f"{name}= has no place in the call of a pair, which has its own; use hf_specx.generate for that."
        require(kwargs.get(name) is None, message)
    check_values(kwargs)


def check_lifted(model: PreTrainedModel) -> None:
    """Raise ValueError where Whisper's own `generate` has seen the draft of a call by string.

    It then changes the distribution.
    """
    message = (
        f"{type(model).__name__} drops begin_suppress_tokens where it is given assistant_model=; pass the draft as "
    )
    require(model.config.model_type != "whisper", f"{message}draft_model=.")


def check_many(
    model: Any, requests: Any, batch_size: int, most: int | None, streamer: Any, kwargs: dict[str, Any]
) -> None:
    """Check the arguments of `generate_many`; `most` is its `max_batch_tokens`."""
    check_entry(model)
    single = isinstance(requests, list | tuple) and requests and is_int(requests[0])
    several = isinstance(requests, Iterable) and not isinstance(requests, str | bytes | Mapping)
    given = "a single prompt" if single else kind(requests)
    message = "give a list of prompts, each a list of token ids without pads, as tokenizer(texts).input_ids."
    require(several and not single and not hasattr(requests, "ndim"), f"requests is {given}; {message}")
    require(is_int(batch_size) and batch_size >= 1, f"batch_size={batch_size!r} is no number of rows; give 1 or more.")
    message = f"max_batch_tokens={most!r} is no number of tokens; give 1 or more, or None."
    require(most is None or (is_int(most) and most >= 1), message)
    for name in OF_ONE_REQUEST:
        message = f"{name}= belongs to one call of generate; requests carry their own prompts, seeds and limits."
        require(kwargs.get(name) is None, message)
    number = setting("num_return_sequences", model, kwargs)
    message = (
        f"num_return_sequences={number!r} of a generation config is for one call of generate; set it to 1 there, and "
    )
    require(number in (None, 1), f"{message}give the prompt as several requests.")
    message = "pass arguments of generate here, and options of the strategy to SpeculativeDecoding(...), or to a pair."
    check_names("generate", kwargs, known_arguments(model) | {"tokenizer"}, message)
    require(streamer is None, "a streamer shows one batch; iterate over the completions instead.")


def repository_of(model: Any, generation_config: GenerationConfig | None = None, **kwargs: Any) -> str:
    """The repository on the Hub by which `generate` would decode a call; empty if it would do so itself."""
    config, _ = model._prepare_generation_config(generation_config, **kwargs)
    method = GENERATION_MODES_MAPPING[config.get_generation_mode(kwargs.get("assistant_model"))]
    return method if "/" in method else ""


class AskedSignature:
    """The signature of an object that can be called.

    transformers asks for it before it prepares anything, which is the first that a strategy hears of a call.
    """

    def __get__(self, strategy: Any, kind: type | None = None) -> inspect.Signature:
        if strategy is None:
            raise AttributeError("__signature__")  # of the class it is that of its constructor
        frame = frame_of_generate(sys._getframe(1))
        if frame is not None:
            check_call(frame, strategy.streamer)
        return inspect.signature(prepared)


def frame_of_generate(frame: FrameType | None) -> FrameType | None:
    """The frame of `GenerationMixin.generate` below the given one, whatever wraps the call; None if there is none.

    transformers keeps from a callable what it has taken for itself: streamer, synced_gpus, tokenizer.
    """
    while frame is not None and frame.f_code is not GENERATE:
        frame = frame.f_back
    return frame


def withheld(frame: FrameType) -> dict[str, Any]:
    """What `generate`, below the given frame, has kept for itself, and a decoding method needs."""
    generate_frame = frame_of_generate(frame)
    arguments = {} if generate_frame is None else generate_frame.f_locals
    return {"streamer": arguments.get("streamer"), "synced_gpus": arguments.get("synced_gpus")}


def check_call(frame: FrameType, own_streamer: Any) -> None:
    """Raise ValueError for what `generate` drops, or fails on in puzzling words; and have it pass its tokenizer on.

    It cannot prepare tensors without values. A streamer, or that of the strategy, is ended after an error, so that
    nobody waits for it.
    """
    arguments, caller = frame.f_locals, frame.f_back
    kwargs: dict[str, Any] = arguments.get("kwargs", {})
    outer = caller.f_locals.get("kwargs") if caller is not None else None  # generate pops it from its own
    outer = outer if isinstance(outer, dict) else {}
    streamers = [each for each in (arguments.get("streamer"), own_streamer) if each is not None]
    try:
        check_values({"inputs": arguments.get("inputs")} | kwargs)
        for name in OF_STRATEGIES:
            remedy = f"give it to SpeculativeDecoding({name}=...), or call hf_specx.generate without custom_generate=."
            require(name not in kwargs, f"{name}= is an option of the strategy, which was made already; {remedy}")
        for name, remedy in OF_DRAFTS.items():
            value = outer.get(name) if "tokenizer" in name else arguments.get(name)
            require(value is None, f"{name}= is of no use beside a strategy object; {remedy}.")
        message = "the strategy and the call have a streamer each; leave one of them out."
        require(len(streamers) < 2, message)
        named = kwargs | {"generation_config": arguments["generation_config"]}
        strings = setting("stop_strings", arguments["self"], named)
        message = f"stop_strings={strings!r} needs the tokenizer; pass tokenizer=."
        require(strings is None or outer.get("tokenizer") is not None, message)
    except ValueError:
        for streamer in streamers:
            streamer.end()
        raise
    if outer.get("tokenizer") is not None:
        kwargs.setdefault("tokenizer", outer["tokenizer"])  # where it looks for arguments of `prepared`


def setting(name: str, model: Any, kwargs: dict[str, Any]) -> Any:
    """A field of the config as the user has set it: in the call, in its config or in the model's; else None."""
    value = getattr(kwargs.get("generation_config"), name, None)
    of_model = getattr(getattr(model, "generation_config", None), name, None)
    return kwargs.get(name, of_model if value is None else value)


def unset(name: str, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Take what `setting` returns out of a call: out of its config, which stays as it is, and out of the model's.

    transformers warns of a keyword beside a config, so there is none where the model's has nothing that it must hide.
    """
    kwargs.pop(name, None)
    if getattr(kwargs.get("generation_config"), name, None) is not None:
        kwargs["generation_config"] = copy.copy(kwargs["generation_config"])
        setattr(kwargs["generation_config"], name, None)
    if getattr(model.generation_config, name, None) is not None:
        kwargs[name] = None


def bind_stop_strings(
    model: PreTrainedModel, tokenizer: Any, kwargs: dict[str, Any], make: Callable[..., Any] = StopStringCriteria
) -> None:
    """Turn stop strings among the arguments of `generate`, which are changed, into a criterion.

    `generate` does not pass a tokenizer on to a strategy; `make` has it and a string, or a tuple of strings.
    """
    strings = setting("stop_strings", model, kwargs)
    if strings is None:
        return
    as_list = strings if isinstance(strings, list | tuple) else [strings]
    are_strings = all(isinstance(string, str) for string in as_list)
    require(are_strings, f"stop_strings={strings!r} is no str and no list of str; pass one of these.")
    require(tokenizer is not None, f"stop_strings={strings!r} needs the tokenizer; pass tokenizer=.")
    criteria = list(kwargs.get("stopping_criteria") or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # a user's own replaces it
        criteria.append(make(tokenizer, strings if isinstance(strings, str) else tuple(strings)))
    kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
    unset("stop_strings", model, kwargs)
