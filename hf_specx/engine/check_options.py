"""Checks of the options of a strategy, whatever model it will serve."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator

from hf_specx.common.errors import is_int, kind, one_of, require, similar
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.drafting.other_tokenizer import MATCHES
from hf_specx.drafting.several import has_forwards
from hf_specx.models.choose import LAYOUTS

from .check_choices import check_choices


STREAM_BY = ("token", "run")
SCHEDULES = ("constant", "heuristic", "heuristic_transient")
DUCK_TYPED = {  # option: (attributes that are needed, remedy)
    "streamer": (("put", "end"), "pass a TextStreamer or another BaseStreamer"),
    "tokenizer": (("get_vocab",), "pass what AutoTokenizer.from_pretrained gives"),
    "draft_tokenizer": (("get_vocab",), "pass what AutoTokenizer.from_pretrained gives"),
    "costs": (("table", "best_num_draft_tokens"), "pass strategy.costs of an earlier strategy"),
}


def check_options(options: dict[str, Any], unknown: dict[str, Any], draft_model: Any, misplaced: int = 0) -> None:
    """The options of a strategy, whatever model it will serve.

    Args:
        options: all that a strategy has, by name.
        unknown: other keyword arguments that were given.
        draft_model: the draft.
        misplaced: arguments that were given after it without a name, as `generate` gives them to a class.
    """
    told = (
        "SpeculativeDecoding takes one draft (or a list of them), and its options by name. If custom_generate= was "
        "given this class, give it an object: custom_generate=SpeculativeDecoding(draft_model)."
    )
    require(not misplaced, told)
    check_draft(draft_model)
    name = min(unknown, default="")
    require(not unknown, f"unknown option {name!r}; {similar(name, options)}known: {', '.join(options)}.")
    check_choices(options["num_draft_tokens"], options["verification"])
    one_of("layout", options["layout"], LAYOUTS)
    told = "tokenizer_match='text' is no more, since it was slower than plain decoding; leave it out, or choose a "
    require(options["tokenizer_match"] != "text", told + "draft with the target's own tokenizer.")
    one_of("tokenizer_match", options["tokenizer_match"], MATCHES)
    one_of("stream_by", options["stream_by"], STREAM_BY)
    compile = options["compile"]
    require(isinstance(compile, bool), f"compile={compile!r} is not a bool; use True or False.")
    for name, (needed, remedy) in DUCK_TYPED.items():
        value = options[name]
        require(
            value is None or all(hasattr(value, each) for each in needed),
            f"{name} is {kind(value)} without {' and '.join(needed)}; {remedy}, or leave it out.",
        )


def check_draft(draft_model: Any) -> None:
    """Whether something can draft, for any target; of a list, whether each of it can, and all of them together."""
    if isinstance(draft_model, list | tuple):
        require(len(draft_model) > 0, "draft_model=[] has no draft; give a model, a SuffixDraft or both.")
        for part in draft_model:
            told = "draft_model has a list inside its list; give all drafts in one."
            require(not isinstance(part, list | tuple), told)
            check_draft(part)
        check_together(draft_model)
        return
    path = repr(str(draft_model)) if isinstance(draft_model, str | Path) else None
    require(
        path is None,
        f"draft_model={path} is a name; load it first with AutoModelForCausalLM.from_pretrained, or a target with "
        "its draft by DraftTargetPair.from_pretrained.",
    )
    is_class = isinstance(draft_model, type)
    told = "draft_model is the class {}; give an object of it, as from_pretrained or its constructor makes it."
    require(not is_class, told.format(getattr(draft_model, "__name__", "")))
    given = f"draft_model is {kind(draft_model)}"
    proposes = callable(getattr(draft_model, "propose", None))
    known = proposes or isinstance(draft_model, PreTrainedModel | CandidateGenerator)
    told = "give a model, a CandidateGenerator or Drafter of yours, or a draft without a model, as SuffixDraft()."
    require(known, f"{'draft_model is None' if draft_model is None else given}; {told}")
    require(
        not isinstance(draft_model, PreTrainedModel) or draft_model.can_generate(),
        f"{given}, which scores no next token; load it with AutoModelForCausalLM or another class that can generate.",
    )
    of_one_text = isinstance(draft_model, AssistedCandidateGenerator | SampledCandidateGenerator)
    require(not of_one_text, f"{given}, made for one text; give its model instead.")
    require(
        not getattr(draft_model, "requires_model_outputs", False),
        f"{given}, which reads the target's outputs; give a model, or a CandidateGenerator that goes by the text "
        "alone.",
    )


def check_together(drafts: Sequence[Any]) -> None:
    """Whether drafts can take turns."""
    kinds = [type(draft).__name__ for draft in drafts]
    twice = [kind for n, kind in enumerate(kinds) if any(drafts[n] is other for other in drafts[:n])]
    require(not twice, f"draft_model has the same {min(twice, default='')} twice; give each draft once.")
    costly = [isinstance(draft, PreTrainedModel) or has_forwards(draft) for draft in drafts]
    models = [kind for kind, is_costly in zip(kinds, costly, strict=True) if is_costly]
    told = f"draft_model has {len(models)} drafts that run forwards ({', '.join(models)}); give at most one of them."
    require(len(models) <= 1, told)


def check_assistant_settings(num_assistant_tokens: Any, schedule: Any, threshold: Any) -> None:
    """What transformers calls the number of candidates, its schedule, and the threshold; None is unset."""
    number = num_assistant_tokens
    require(
        number is None or (is_int(number) and number >= 1),
        f"num_assistant_tokens={number!r} is not an int of 1 or more; give one, or leave it out for 'auto'.",
    )
    if schedule is not None:
        one_of("num_assistant_tokens_schedule", schedule, SCHEDULES)
    require(
        threshold is None or (isinstance(threshold, float | int) and 0 <= threshold <= 1),
        f"assistant_confidence_threshold={threshold!r} is no probability; give a number from 0 (never stop) to 1.",
    )
