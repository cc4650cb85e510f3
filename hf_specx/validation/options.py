"""Checks of what a strategy is made of, whatever model it will serve."""

import difflib
import numbers
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator

from hf_specx.common.errors import refusal
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.layouts.choose import LAYOUTS


VERIFICATIONS = ("token", "block", "coupled")
STREAM_BY = ("token", "run")
SCHEDULES = ("constant", "heuristic", "heuristic_transient")


def similar(name: str, known: Iterable[str]) -> str:
    """A question after the option that was meant, if there is one."""
    near = difflib.get_close_matches(name, list(known), 1, 0.75)
    return f"did you mean {near[0]!r}? " if near else ""


@refusal
def draft_by_name(draft_model: Any) -> str | None:
    if not isinstance(draft_model, str | Path):
        return None
    return (
        f"draft_model={str(draft_model)!r} is a name; load it first with AutoModelForCausalLM.from_pretrained, or a "
        "target with its draft by DraftTargetPair.from_pretrained."
    )


@refusal
def draft_of_no_kind(draft_model: Any) -> str | None:
    proposes = callable(getattr(draft_model, "propose", None))
    if proposes or isinstance(draft_model, PreTrainedModel | CandidateGenerator):
        return None
    return f"draft_model is a {type(draft_model).__name__}; give a model, a CandidateGenerator or a Drafter."


@refusal
def draft_without_head(draft_model: Any) -> str | None:
    if not isinstance(draft_model, PreTrainedModel) or draft_model.can_generate():
        return None
    return (
        f"draft_model is a {type(draft_model).__name__}, which scores no next token; load it with "
        "AutoModelForCausalLM or another class that can generate."
    )


@refusal
def generator_of_one_text(draft_model: Any) -> str | None:
    if not isinstance(draft_model, AssistedCandidateGenerator | SampledCandidateGenerator):
        return None
    return f"draft_model is a {type(draft_model).__name__}, made for one text; give its model instead."


@refusal
def generator_that_reads_outputs(draft_model: Any) -> str | None:
    if not getattr(draft_model, "requires_model_outputs", False):
        return None
    return (
        f"draft_model is a {type(draft_model).__name__}, which reads the target's outputs; give a model, or a "
        "CandidateGenerator that goes by the text alone."
    )


@refusal
def generator_to_time(draft_model: Any) -> str | None:
    if isinstance(draft_model, PreTrainedModel):
        return None
    return "a CandidateGenerator has no forward to time; give num_draft_tokens as a number."


@refusal
def unknown_option(unknown: dict[str, Any], known: Iterable[str]) -> str | None:
    if not unknown:
        return None
    name, names = min(unknown), list(known)
    return f"unknown option {name!r}; {similar(name, names)}known: {', '.join(names)}."


@refusal
def number_of_drafts_is_none(num_draft_tokens: Any) -> str | None:
    if num_draft_tokens == "auto" or _is_int(num_draft_tokens):
        return None
    return f"num_draft_tokens={num_draft_tokens!r} is not a number; give an int of 1 or more, or 'auto'."


@refusal
def number_of_drafts_below_1(num_draft_tokens: Any) -> str | None:
    if not _is_int(num_draft_tokens) or num_draft_tokens >= 1:
        return None
    return f"num_draft_tokens={num_draft_tokens} is below 1; give 1 or more, or 'auto'."


@refusal
def unknown_verification(verification: Any) -> str | None:
    if verification is None or verification in VERIFICATIONS:
        return None
    return f"verification={verification!r} is unknown; choose one of {', '.join(VERIFICATIONS)}."


@refusal
def unknown_layout(layout: Any) -> str | None:
    if layout in LAYOUTS:
        return None
    return f"layout={layout!r} is unknown; choose one of {', '.join(LAYOUTS)}."


@refusal
def unknown_stream_by(stream_by: Any) -> str | None:
    if stream_by in STREAM_BY:
        return None
    return f"stream_by={stream_by!r} is unknown; choose one of {', '.join(STREAM_BY)}."


@refusal
def compile_of_no_kind(compile: Any) -> str | None:
    if isinstance(compile, bool):
        return None
    return f"compile={compile!r} is not a bool; use True or False."


@refusal
def streamer_without_methods(streamer: Any) -> str | None:
    return _without("streamer", streamer, ("put", "end"), "pass a TextStreamer or another BaseStreamer")


@refusal
def tokenizer_without_methods(name: str, tokenizer: Any) -> str | None:
    return _without(name, tokenizer, ("get_vocab",), "pass what AutoTokenizer.from_pretrained gives")


@refusal
def costs_without_methods(costs: Any) -> str | None:
    return _without("costs", costs, ("table", "best_num_draft_tokens"), "pass strategy.costs of an earlier strategy")


def _without(name: str, value: Any, needed: tuple[str, ...], remedy: str) -> str | None:
    if value is None or all(hasattr(value, method) for method in needed):
        return None
    return f"{name} is a {type(value).__name__} without {' and '.join(needed)}; {remedy}, or leave it out."


@refusal
def assistant_tokens_below_1(number: Any) -> str | None:
    if number is None or (_is_int(number) and number >= 1):
        return None
    return f"num_assistant_tokens={number!r} is not an int of 1 or more; give one, or leave it out for 'auto'."


@refusal
def unknown_schedule(schedule: Any) -> str | None:
    if schedule is None or schedule in SCHEDULES:
        return None
    return f"num_assistant_tokens_schedule={schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}."


@refusal
def threshold_that_is_no_probability(threshold: Any) -> str | None:
    if threshold is None or (isinstance(threshold, float | int) and 0 <= threshold <= 1):
        return None
    return f"assistant_confidence_threshold={threshold!r} is no probability; give a number from 0 (never stop) to 1."


def check_options(options: dict[str, Any], unknown: dict[str, Any], draft_model: Any) -> None:
    """The options of a strategy, whatever model it will serve."""
    check_draft(draft_model)
    unknown_option(unknown, options)
    check_choices(options["num_draft_tokens"], options["verification"], options["layout"])
    unknown_stream_by(options["stream_by"])
    compile_of_no_kind(options["compile"])
    streamer_without_methods(options["streamer"])
    for name in ("tokenizer", "draft_tokenizer"):
        tokenizer_without_methods(name, options[name])
    costs_without_methods(options["costs"])


def check_draft(draft_model: Any) -> None:
    """Whether something can draft, for any target."""
    draft_by_name(draft_model)
    draft_of_no_kind(draft_model)
    draft_without_head(draft_model)
    generator_of_one_text(draft_model)
    generator_that_reads_outputs(draft_model)


def check_choices(num_draft_tokens: Any, verification: Any, layout: Any = "auto") -> None:
    """The options that are chosen from a few values."""
    number_of_drafts_is_none(num_draft_tokens)
    number_of_drafts_below_1(num_draft_tokens)
    unknown_verification(verification)
    unknown_layout(layout)


def check_assistant_settings(num_assistant_tokens: Any, schedule: Any, threshold: Any) -> None:
    """What transformers calls the number of candidates, its schedule, and the threshold; None is unset."""
    assistant_tokens_below_1(num_assistant_tokens)
    unknown_schedule(schedule)
    threshold_that_is_no_probability(threshold)


def check_calibration(draft_model: Any) -> None:
    """Whether the forwards of a draft can be timed."""
    generator_to_time(draft_model)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
