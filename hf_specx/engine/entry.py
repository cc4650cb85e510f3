"""How `generate` calls a strategy: what it hands over, and arguments that it would drop, misread or fail on.

`generate(custom_generate=strategy)` does two things with a strategy. First it asks for its signature, to learn which
arguments it may pass on: `CheckingSignature` checks the call there. Then it prepares inputs, processors and criteria,
and calls the strategy with them: `prepared_inputs` takes them.
"""

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
from hf_specx.common.wrappers import reads_text
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.drafting.several import has_forwards
from hf_specx.models.prompts import PreparedInputs


DRAFT_ARGUMENTS = {  # arguments of `generate` for which a strategy object has options, and the remedy
    "assistant_model": "the strategy has its draft already, so leave it out or use hf_specx.generate",
    "assistant_tokenizer": "use SpeculativeDecoding(draft_tokenizer=...)",
}
STRATEGY_ARGUMENTS: tuple[str, ...] = ("draft_model", "num_draft_tokens", "verification", "layout", "compile", "costs")
STRATEGY_ARGUMENTS += ("tree", "stream_by", "draft_tokenizer", "tokenizer_match")
NO_HEAD = "which scores no next token; load it with AutoModelForCausalLM or another class that can generate."
GENERATE_CODE = inspect.unwrap(GenerationMixin.generate).__code__
SINGLE_CALL_ARGUMENTS = """
    inputs input_ids attention_mask inputs_embeds position_ids cache past_key_values seeds streamer
    num_return_sequences return_dict_in_generate custom_generate synced_gpus assistant_model negative_prompt_ids
""".split()  # noqa: SIM905


def prepared_inputs(
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
    """What `generate` hands to a decoding method, with an argument of ours, `seeds`.

    Its parameters are what `generate` may pass on. The `tokenizer` is not used any more: stop strings have become
    criteria, and the ends of prompts were healed.
    """
    criteria = StoppingCriteriaList()
    for criterion in stopping_criteria:
        # with one row the criterion of lm-eval depends on the text of this row alone
        is_of_lm_eval = len(input_ids) == 1 and type(criterion).__name__ == "MultiTokenEOSCriteria"
        criteria.append(StopOfOneRow(criterion) if is_of_lm_eval else criterion)
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


class StopOfOneRow(StoppingCriteria):
    """lm-eval's criterion for a stop sequence, in a batch of one row.

    It remembers which rows have the sequence; one row ends there anyway, so that this may be forgotten at each call.
    """

    stateless = True

    def __init__(self, criterion: Any):
        self.criterion = criterion

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether each of several texts [R, L] that the row may have ends: [R] bool."""
        stops = []
        for row_ids in input_ids:
            self.criterion.done_tracker = [False]
            stops.append(self.criterion(row_ids[None], scores, **kwargs))
        return torch.tensor(stops, device=input_ids.device)


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


def check_assistant_model(model: PreTrainedModel) -> None:
    """Raise ValueError if a call by string has its draft in `assistant_model=` and the target is a Whisper.

    Its own `generate` sees the argument too, and then changes the distribution.
    """
    message = (
        f"{type(model).__name__} drops begin_suppress_tokens where it is given assistant_model=; pass the draft as "
    )
    require(model.config.model_type != "whisper", f"{message}draft_model=.")


def check_generate_many(
    model: Any, requests: Any, batch_size: int, max_batch_tokens: int | None, streamer: Any, kwargs: dict[str, Any]
) -> None:
    """Raise ValueError if `generate_many` cannot be called with these arguments."""
    check_entry(model)
    reads = model.main_input_name
    message = f"{type(model).__name__} reads {reads}, and requests are texts; call generate with a batch of {reads}."
    require(reads_text(model), message)
    is_single = isinstance(requests, list | tuple) and requests and is_int(requests[0])
    is_iterable = isinstance(requests, Iterable) and not isinstance(requests, str | bytes | Mapping)
    description = "a single prompt" if is_single else kind(requests)
    message = "give a list of prompts, each a list of token ids without pads, as tokenizer(texts).input_ids."
    require(is_iterable and not is_single and not hasattr(requests, "ndim"), f"requests is {description}; {message}")
    require(is_int(batch_size) and batch_size >= 1, f"batch_size={batch_size!r} is no number of rows; give 1 or more.")
    message = f"max_batch_tokens={max_batch_tokens!r} is no number of tokens; give 1 or more, or None."
    require(max_batch_tokens is None or (is_int(max_batch_tokens) and max_batch_tokens >= 1), message)
    for name in SINGLE_CALL_ARGUMENTS:
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
    """The repository on the Hub whose code would decode a call of `generate`; empty if transformers decodes it."""
    config, _ = model._prepare_generation_config(generation_config, **kwargs)
    method = GENERATION_MODES_MAPPING[config.get_generation_mode(kwargs.get("assistant_model"))]
    return method if "/" in method else ""


class CheckingSignature:
    """A strategy's `__signature__`: that of `prepared_inputs`, after a check of the `generate` that asks for it.

    `generate` calls `inspect.signature(strategy)` before it prepares anything. Nothing of a strategy runs earlier, and
    `generate` hands over neither the streamer nor what it would drop, so that its arguments are read from its frame.
    """

    def __get__(self, strategy: Any, owner: type | None = None) -> inspect.Signature:
        """The signature of an object; a class has none of this name, so that `inspect` shows its constructor's.

        Raises:
            ValueError: if `generate` has arguments that do not go with a strategy.
        """
        if strategy is None:
            raise AttributeError("__signature__")
        frame = frame_of_generate(sys._getframe(1))
        if frame is not None:
            check_call(frame, strategy.streamer)
        return inspect.signature(prepared_inputs)


def frame_of_generate(frame: FrameType | None) -> FrameType | None:
    """The frame of `GenerationMixin.generate` among the callers of the given one; None if there is none."""
    while frame is not None and frame.f_code is not GENERATE_CODE:
        frame = frame.f_back
    return frame


def withheld_arguments(frame: FrameType) -> dict[str, Any]:
    """`streamer` and `synced_gpus` of the `generate` that calls: it keeps them to itself, and decoding needs them."""
    generate_frame = frame_of_generate(frame)
    arguments = {} if generate_frame is None else generate_frame.f_locals
    return {"streamer": arguments.get("streamer"), "synced_gpus": arguments.get("synced_gpus")}


def check_call(frame: FrameType, strategy_streamer: Any) -> None:
    """Raise ValueError for what `generate` drops, or fails on in puzzling words; and have it pass its tokenizer on.

    Args:
        frame: of `generate`.
        strategy_streamer: the option of the strategy. After an error it is ended, as the streamer of the call is, so
            that nobody waits for it.
    """
    arguments, caller = frame.f_locals, frame.f_back
    kwargs: dict[str, Any] = arguments.get("kwargs", {})
    # what wraps `generate` has the arguments that it pops from its own, the tokenizer among them
    outer = caller.f_locals.get("kwargs") if caller is not None else None
    outer = outer if isinstance(outer, dict) else {}
    streamers = [each for each in (arguments.get("streamer"), strategy_streamer) if each is not None]
    try:
        check_values({"inputs": arguments.get("inputs")} | kwargs)
        for name in STRATEGY_ARGUMENTS:
            remedy = f"give it to SpeculativeDecoding({name}=...), or call hf_specx.generate without custom_generate=."
            require(name not in kwargs, f"{name}= is an option of the strategy, which was made already; {remedy}")
        for name, remedy in DRAFT_ARGUMENTS.items():
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
        kwargs.setdefault("tokenizer", outer["tokenizer"])  # where it looks for arguments of `prepared_inputs`


def setting(name: str, model: Any, kwargs: dict[str, Any]) -> Any:
    """A field of the generation config as a user has set it: by keyword, in the call's config or in the model's.

    None if it is set nowhere.
    """
    of_call = getattr(kwargs.get("generation_config"), name, None)
    of_model = getattr(getattr(model, "generation_config", None), name, None)
    return kwargs.get(name, of_model if of_call is None else of_call)


def unset(name: str, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Remove what `setting` returns from `kwargs`, the arguments of a call; no config of the user is changed.

    Where the model's config has a value, it is hidden by a keyword, and only there: transformers warns of a keyword
    beside a config.
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
    """Replace stop strings in `kwargs`, the arguments of `generate`, by a criterion.

    Args:
        tokenizer: of the target; None if the call has none.
        make: makes the criterion of the tokenizer and a string, or a tuple of strings.

    Raises:
        ValueError: if there are stop strings that are no strings, or no tokenizer.
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
