"""How we are called: what `generate` hands over, and arguments that it would drop, misread or fail on."""

import copy
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from hf_specx.common.errors import is_int, kind, require, similar
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.drafting.several import has_forwards
from hf_specx.sampling.stopping import Stopping


WITHHELD = {  # what transformers takes from a call and does not pass on to a strategy object, and the remedy
    "streamer": "use SpeculativeDecoding(streamer=...) or hf_specx.generate(streamer=...)",
    "assistant_model": "the strategy has its draft already, so leave it out or use hf_specx.generate",
    "synced_gpus": "use hf_specx.generate(synced_gpus=...)",
    "tokenizer": "use SpeculativeDecoding(tokenizer=...) or, for stop strings, hf_specx.generate(tokenizer=...)",
    "assistant_tokenizer": "use SpeculativeDecoding(draft_tokenizer=...)",
}
GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
OF_ONE_REQUEST = """
    inputs input_ids attention_mask inputs_embeds position_ids past_key_values seeds streamer num_return_sequences
    return_dict_in_generate custom_generate synced_gpus assistant_model negative_prompt_ids
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Prepared:
    """What `generate` has prepared for a call.

    Attributes:
        model: the target.
        input_ids: [B, L] int64, for an encoder-decoder what its decoder starts with.
        processors, criteria, config: as they are given to a decoding method.
        kwargs: inputs of the model's forward, the cache among them.
        inputs_tensor: what an encoder reads, before rows were repeated; None without one.
    """

    model: PreTrainedModel
    input_ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    kwargs: dict[str, Any]
    inputs_tensor: torch.Tensor | None = None

    @cached_property
    def stopping(self) -> Stopping:
        """When rows end."""
        return Stopping(self.criteria, self.input_ids.shape[1], self.config.max_length)

    @property
    def past(self) -> Any:
        """The cache, which Mamba calls by another name."""
        return self.kwargs.get("past_key_values", self.kwargs.get("cache_params"))


def check_entry(model: Any, custom_generate: Any = None) -> None:
    """Whether a target can be called at all, and by the method that was given with it, if one was."""
    given = f"model is {kind(model)}"
    require(hasattr(model, "can_generate"), f"{given}; give the target itself, as from_pretrained loads it.")
    remedy = "load it with AutoModelForCausalLM or another class that can generate."
    require(model.can_generate(), f"{given}, which scores no next token; {remedy}")
    told = "custom_generate is a class; make a strategy of it first, as in custom_generate="
    require(not isinstance(custom_generate, type), f"{told}SpeculativeDecoding(draft_model).")
    told = f"custom_generate={custom_generate!r} is a Path, which transformers ignores; pass it as a str."
    require(not isinstance(custom_generate, Path), told)


def check_arguments(inputs: Any, model: Any, kwargs: dict[str, Any], options: Collection[str]) -> None:
    """Check the arguments of `generate`; `options` are names of those that we know and transformers does not."""
    remedy = "pass a tensor of token ids, as in generate(**tokenizer(texts, return_tensors='pt', padding=True), ...)."
    for name, value in {"inputs": inputs, "input_ids": kwargs.get("input_ids")}.items():
        require(value is None or isinstance(value, torch.Tensor), f"{name} is {kind(value)}; {remedy}")
    check_values({"inputs": inputs} | kwargs)
    config = kwargs.get("generation_config")
    told = f"generation_config is {kind(config)}; pass GenerationConfig(...), or its fields as arguments."
    require(config is None or isinstance(config, GenerationConfig), told)
    for name in ("logits_processor", "stopping_criteria"):
        value = kwargs.get(name)
        told = f"{name} is {kind(value)}; pass a list of such objects, [{type(value).__name__}(...)]."
        require(value is None or isinstance(value, list | tuple), told)
    told = "cache_implementation='paged' turns generate into continuous batching, which takes no strategy; "
    paged = kwargs.get("cache_implementation") == "paged"
    require(not paged, f"{told}leave it out, or call generate_batch without a draft.")
    for name in sorted(kwargs.keys() - set(options) - _known_arguments(model)):
        question = similar(name, options)
        require(not question, f"unknown argument {name!r}; {question.strip()}")


def _known_arguments(model: Any) -> set[str]:
    """Names of what `generate` takes for a model: its own arguments, fields of a config, inputs of the model."""
    callables = [GenerationMixin.generate, type(model).generate, model.forward, model.prepare_inputs_for_generation]
    if model.config.is_encoder_decoder:
        callables += [part.forward for part in (model.get_encoder(), model.get_decoder()) if part is not None]
    taken = {name for function in callables for name in inspect.signature(function).parameters}
    return taken | vars(GenerationConfig()).keys()


def check_values(given: dict[str, Any]) -> None:
    """Check that the tensors among the arguments of a call have values."""
    for name, value in given.items():
        told = f"{name} is on the meta device, which has shapes and no values; make it on the device of the model."
        require(not isinstance(value, torch.Tensor) or value.device.type != "meta", told)


def check_draft(draft_model: Any) -> None:
    """Whether something can draft, for any target; of a list, whether each of it can, and all of them together."""
    if isinstance(draft_model, list | tuple):
        _check_drafts(draft_model)
        return
    told = f"draft_model={str(draft_model)!r} is a name; load it first with AutoModelForCausalLM.from_pretrained, or "
    told += "a target with its draft by DraftTargetPair.from_pretrained."
    require(not isinstance(draft_model, str | Path), told)
    told = f"draft_model is the class {getattr(draft_model, '__name__', '')}; give an object of it, as "
    require(not isinstance(draft_model, type), f"{told}from_pretrained or its constructor makes it.")
    given = f"draft_model is {kind(draft_model)}"
    drafts = all(callable(getattr(draft_model, name, None)) for name in ("of", "propose"))
    is_model = isinstance(draft_model, PreTrainedModel) and not drafts
    known = is_model or isinstance(draft_model, CandidateGenerator) or drafts
    told = "give a model, a CandidateGenerator, a Drafter of yours (inherit from hf_specx.Drafter), or a draft "
    told += "without a model, as SuffixDraft()."
    require(known, f"{'draft_model is None' if draft_model is None else given}; {told}")
    remedy = "load it with AutoModelForCausalLM or another class that can generate."
    require(not is_model or draft_model.can_generate(), f"{given}, which scores no next token; {remedy}")
    of_one_text = isinstance(draft_model, AssistedCandidateGenerator | SampledCandidateGenerator)
    require(not of_one_text, f"{given}, made for one text; give its model instead.")
    told = "which reads the target's outputs; give a model, or a CandidateGenerator that goes by the text alone."
    require(not getattr(draft_model, "requires_model_outputs", False), f"{given}, {told}")


def _check_drafts(drafts: Sequence[Any]) -> None:
    """Whether drafts can take turns."""
    require(len(drafts) > 0, "draft_model=[] has no draft; give a model, a SuffixDraft or both.")
    for draft in drafts:
        is_list = isinstance(draft, list | tuple)
        require(not is_list, "draft_model has a list inside its list; give all drafts in one.")
        check_draft(draft)
    kinds = [type(draft).__name__ for draft in drafts]
    twice = [kind for n, kind in enumerate(kinds) if any(drafts[n] is other for other in drafts[:n])]
    require(not twice, f"draft_model has the same {min(twice, default='')} twice; give each draft once.")
    costly = [isinstance(draft, PreTrainedModel) or has_forwards(draft) for draft in drafts]
    models = [kind for kind, is_costly in zip(kinds, costly, strict=True) if is_costly]
    told = f"draft_model has {len(models)} drafts that run forwards ({', '.join(models)}); give at most one of them."
    require(len(models) <= 1, told)


def check_pair_call(kwargs: dict[str, Any]) -> None:
    """Check that a call of a pair does not ask for something that the pair brings itself, and can be read."""
    for name in ("custom_generate", "draft_model", "assistant_model", "model"):
        told = f"{name}= has no place in the call of a pair, which has its own; use hf_specx.generate for that."
        require(kwargs.get(name) is None, told)
    check_values(kwargs)


def check_lifted(model: PreTrainedModel) -> None:
    """Refuse a call by string in which Whisper's own `generate` has seen a draft, and so changes the distribution."""
    told = f"{type(model).__name__} drops begin_suppress_tokens where it is given assistant_model=, so that the text "
    told += "would not be the same; pass the draft as draft_model=."
    require(model.config.model_type != "whisper", told)


def check_many(
    model: Any, requests: Any, batch_size: int, most: int | None, streamer: Any, kwargs: dict[str, Any]
) -> None:
    """Check the arguments of `generate_many`; `most` is its `max_batch_tokens`."""
    check_entry(model)
    told = "give a list of prompts, each a list of token ids, as tokenizer(texts).input_ids."
    is_iterable = isinstance(requests, Iterable) and not isinstance(requests, str | bytes | Mapping)
    require(is_iterable, f"requests is {kind(requests)}; {told}")
    single = isinstance(requests, list | tuple) and requests and is_int(requests[0])
    dimensions = getattr(requests, "ndim", None)
    require(not single and dimensions != 1, f"requests is a single prompt; {told}")
    padded = f"requests is {kind(requests)} of {dimensions} dimensions, whose rows may hold pads; {told}"
    require(dimensions is None, padded)
    require(is_int(batch_size) and batch_size >= 1, f"batch_size={batch_size!r} is no number of rows; give 1 or more.")
    told = f"max_batch_tokens={most!r} is no number of tokens; give 1 or more, or None."
    require(most is None or (is_int(most) and most >= 1), told)
    for name in OF_ONE_REQUEST:
        told = f"{name}= belongs to one call of generate; requests carry their own prompts, seeds and limits."
        require(kwargs.get(name) is None, told)
    known = _known_arguments(model) | {"tokenizer"}
    name = min(kwargs.keys() - known, default="")
    told = f"unknown argument {name!r}; {similar(name, known)}generate_many takes those of generate, and"
    require(not name, f"{told} SpeculativeDecoding(...) the options of the strategy.")
    require(streamer is None, "a streamer shows one batch; iterate over the completions instead.")


def check_withheld(frame: FrameType | None) -> None:
    """Refuse what transformers drops on its way to a callable, read from the frame of `GenerationMixin.generate`.

    That frame is below the given one, whatever wraps the call. A streamer was given the prompt already by then; it is
    ended, so that nobody waits for it.
    """
    while frame is not None and frame.f_code is not GENERATE:
        frame = frame.f_back
    if frame is None:
        return
    outer = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None  # generate pops it from its own
    outer = outer if isinstance(outer, dict) else {}
    for name, remedy in WITHHELD.items():
        value = outer.get(name) if "tokenizer" in name else frame.f_locals.get(name)
        if value is None or value is False:
            continue
        if frame.f_locals.get("streamer") is not None:
            frame.f_locals["streamer"].end()
        raise ValueError(f"transformers does not pass {name}= on to a strategy object; {remedy}.")


class AskedSignature:
    """The signature of an object that can be called.

    transformers asks for it before it prepares anything, which is the first that a strategy hears of a call.
    """

    def __get__(self, strategy: Any, kind: type | None = None) -> inspect.Signature:
        if strategy is None:
            raise AttributeError("__signature__")  # of the class it is that of its constructor
        check_unprepared(sys._getframe(1))
        return inspect.signature(strategy.__call__)


def check_unprepared(frame: FrameType | None) -> None:
    """Refuse what transformers fails on in puzzling words, when it asks for the signature of a strategy object.

    Tensors without values it cannot prepare. Of stop strings it has dropped the tokenizer by then, and would say next
    that the tokenizer is missing, even where it was given.
    Below the given frame is that of `GenerationMixin._extract_generation_mode_kwargs`, which has what was given.
    """
    while frame is not None and frame.f_code.co_name != "_extract_generation_mode_kwargs":
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return
    model, kwargs, call = frame.f_locals.get("self"), frame.f_locals.get("kwargs", {}), frame.f_back.f_locals
    check_values({"inputs": call.get("inputs")} | kwargs)
    strings = setting("stop_strings", model, kwargs | {"generation_config": call.get("generation_config")})
    told = f"stop_strings={strings!r} do not work with a strategy object, since transformers drops the tokenizer; use "
    told += "hf_specx.generate(..., model=model, draft_model=draft, stop_strings=..., tokenizer=tokenizer), or pass "
    told += "stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)] in place of them."
    require(strings is None, told)


def setting(name: str, model: Any, kwargs: dict[str, Any]) -> Any:
    """A field of the config as the user has set it: in the call, in its config or in the model's; else None."""
    if name in kwargs:
        return kwargs[name]
    value = getattr(kwargs.get("generation_config"), name, None)
    return getattr(getattr(model, "generation_config", None), name, None) if value is None else value


def unset(name: str, model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Take what `setting` has found out of a call: out of its config, which stays as it is, and out of the model's.

    transformers warns of a keyword beside a config, so there is none where the model's has nothing that it must hide.
    """
    kwargs.pop(name, None)
    if getattr(kwargs.get("generation_config"), name, None) is not None:
        kwargs["generation_config"] = copy.copy(kwargs["generation_config"])
        setattr(kwargs["generation_config"], name, None)
    if getattr(model.generation_config, name, None) is not None:
        kwargs[name] = None


def bind_stop_strings(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    kwargs: dict[str, Any],
    make: Callable[[Any, Any], StopStringCriteria] = StopStringCriteria,
) -> None:
    """Turn stop strings among the arguments of `generate`, which are changed, into a criterion.

    `generate` does not pass a tokenizer on to a strategy; `make` has it and a string, or a tuple of strings.

    Raises:
        ValueError: if there are strings and no tokenizer, or they are no strings.
    """
    strings = setting("stop_strings", model, kwargs)
    if strings is None:
        return
    known = all(isinstance(each, str) for each in (strings if isinstance(strings, list | tuple) else [strings]))
    require(known, f"stop_strings={strings!r} is no str and no list of str; pass one of these.")
    require(tokenizer is not None, f"stop_strings={strings!r} needs the tokenizer; pass tokenizer=.")
    criteria = list(kwargs.get("stopping_criteria") or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # a user's own replaces it
        criteria.append(make(tokenizer, strings if isinstance(strings, str) else tuple(strings)))
    kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
    unset("stop_strings", model, kwargs)
