"""Which layout a model is decoded in: the best one that has been shown to be exact for its architecture."""

import transformers
from transformers import PreTrainedModel

from hf_specx.common.architectures import BY_MASK, INEXACT, LATER, LAYOUTS_OF, MASKED, REFUSED, SINCE, UNKNOWN
from hf_specx.common.errors import require

from .compiled import CompiledRunner
from .lockstep import LockstepRunner
from .packed import PackedRunner
from .prompts import PreparedInputs
from .ragged import RaggedRunner
from .runner import ModelRunner
from .transformers_cache import PaddedRunner


RUNNERS: dict[str, type[ModelRunner]] = {
    "ragged": RaggedRunner,
    "padded": PaddedRunner,
    "packed": PackedRunner,
    "lockstep": LockstepRunner,
}
LAYOUTS = ("auto", *RUNNERS)
REASONS = {
    "ragged": "{0} takes positions and a 4D mask by position under {1}",
    "padded": "{0} takes its positions from a 2D mask or from distances, under {1}",
    "packed": "{0} takes positions and a 4D mask by position under {1}, so that all rows can be one",
    "lockstep": "no other layout has been shown to be exact for {0} under {1}",
}


def why_no_layout(model: PreTrainedModel, drafts: bool = False) -> str:
    """Why no layout has been shown to be exact for a model, and what to do; empty if one has.

    One that `drafts` may be inexact: verification corrects any distribution of its tokens.
    """
    config, name = model.config.get_text_config(decoder=True), model.config.model_type
    refused = REFUSED if drafts else REFUSED | INEXACT
    role = "a draft" if drafts else "a target"
    for kind in (name, config.model_type):
        if kind in refused:
            return f"model type {kind!r} cannot be {role} of speculative decoding: {refused[kind]}; choose another"
    version = transformers.__version__
    if not drafts and name in LATER and tuple(map(int, version.split(".")[:2])) < SINCE:
        since = f"transformers {SINCE[0]}.{SINCE[1]} and later"
        return f"model type {name!r} has been shown to be exact on {since}, not on {version}; upgrade transformers"
    if not _layouts(model, drafts):
        attention = config._attn_implementation
        return (
            f"model type {name!r} is exact with a mask by position only, which attn_implementation={attention!r} "
            "cannot take; load it with attn_implementation='sdpa'"
        )
    return ""


def _layouts(model: PreTrainedModel, drafts: bool = False) -> list[str]:
    """The layouts of the table that the attention of a model can take, best first."""
    config = model.config.get_text_config(decoder=True)
    # Falcon makes its linear biases (alibi) from a 2D mask, and takes no other
    takes_masks = config._attn_implementation in MASKED and not getattr(config, "alibi", False)
    untested = UNKNOWN[-1:] if drafts else UNKNOWN  # whether a draft is right is not measured
    layouts = LAYOUTS_OF.get(model.config.model_type, untested)
    return [layout for layout in layouts if takes_masks or layout not in BY_MASK]


def layouts_of(model: PreTrainedModel, drafts: bool = False) -> list[str]:
    """The layouts that have been shown to be exact for a model, best first; raises ValueError if there is none.

    Of a target that is in no table these are the ones to be measured.
    """
    why = why_no_layout(model, drafts)
    require(not why, f"{why}.")
    return _layouts(model, drafts)


def choose_layout(model: PreTrainedModel, layout: str = "auto") -> tuple[str, str]:
    """The layout for a target and the reason in words; raises ValueError if it is not exact in this one, or in any."""
    exact = layouts_of(model)
    config = model.config.get_text_config(decoder=True)
    name, attention = config.model_type, config._attn_implementation
    require(
        layout in ("auto", *exact),
        f"layout={layout!r} has not been shown to be exact for model type {name!r} under "
        f"attn_implementation={attention!r}; use {', '.join(map(repr, exact))} or 'auto'.",
    )
    chosen = exact[0] if layout == "auto" else layout
    how = "chosen" if layout == "auto" else "asked for"
    return chosen, f"{how}: {REASONS[chosen].format(name, attention)}"


def make_runner(
    layout: str, prompt: PreparedInputs, draft_vocab_size: int | None = None, compiled: bool = False
) -> ModelRunner:
    """The runner of a layout for one model, which has not read its prompts yet; `compiled` ones are ragged."""
    return (CompiledRunner if compiled else RUNNERS[layout])(prompt, draft_vocab_size)
