"""What one call asks for, and how it is decoded: its verification and its layouts."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.streamers import BaseStreamer

from hf_specx.cache.slots import has_columns
from hf_specx.common.architectures import WHOLE, vocabulary
from hf_specx.common.errors import require
from hf_specx.common.round import Round
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.row_by_row import ROW_BY_ROW
from hf_specx.layouts.choose import choose_layout, layouts_of
from hf_specx.layouts.compiled import check_compile
from hf_specx.layouts.position_tables import position_table
from hf_specx.layouts.prompts import Prompt
from hf_specx.scheduling.schedule import Drafting, choose_drafting
from hf_specx.validation.calls import check_call, check_noise, check_past
from hf_specx.validation.inputs import check_inputs, check_positions
from hf_specx.validation.models import check_own_text, check_pair, check_target
from hf_specx.validation.options import check_assistant_settings
from hf_specx.validation.rows import check_fixed, check_guidance, check_seeds, check_synced

from .ranks import is_synced, shares_rows
from .report import PLAIN


LOCKSTEP_COST = (
    "in this batch all rows advance by as many tokens as the row that accepted the fewest, so that larger batches "
    "gain less: no other layout has been shown to be exact for these models and inputs. Pass layout='lockstep' to "
    "silence this warning."
)


OWN_TEXT_LAYOUTS = ("ragged", "padded")  # of a draft with other tokens, whose rows grow each by its own number


class Listener(Protocol):
    """An object that wants to know what became of each round."""

    def observe(self, done: Round) -> None:
        """Called after each round, once the text has grown."""


@dataclass(frozen=True)
class Call:
    """What one call was asked for, by the options of its strategy and by its own arguments.

    Attributes:
        verification, layout, compile, streamer, stream_by: options of `SpeculativeDecoding`.
        drafting: how many candidates to draft in a round.
        seeds: one for each row; None for the default generator.
        synced: whether other ranks have to run the same forwards, each for rows of its own.
        shared: whether other ranks decode the same rows, with other parts of the models.
        listeners: told of each round.
    """

    verification: str | None
    layout: str
    compile: bool
    streamer: BaseStreamer | None
    stream_by: str
    drafting: Drafting
    seeds: list[int] | None = None
    synced: bool = False
    shared: bool = False
    listeners: tuple[Listener, ...] = ()


class Options(Protocol):
    """The options of a strategy that a call goes by; see `SpeculativeDecoding`."""

    verification: str | None
    layout: str
    compile: bool
    streamer: BaseStreamer | None
    stream_by: str
    num_draft_tokens: str | int
    listeners: tuple[Listener, ...]


@dataclass(frozen=True)
class Withheld:
    """What `hf_specx.generate` knows of a call, and transformers does not pass on to a strategy.

    Attributes:
        drafting: arguments of the call that say how many candidates to draft; None if that is not known.
        synced_gpus: as it was given.
        adds_reports: whether the report goes on from that of the last call, as Whisper calls once for each window.
    """

    drafting: dict[str, Any] | None = None
    synced_gpus: bool | None = None
    adds_reports: bool = False


class Plan(NamedTuple):
    """What was chosen for a call.

    Attributes:
        verification: "greedy", "token", "block" or "coupled".
        layout: the target's; `reason` says why.
        draft_layout: the draft's.
        states: whether one of the models takes lockstep only, where a rollback may have to feed tokens again.
        compiled: whether forwards after the prompts are compiled.
    """

    verification: str
    layout: str
    reason: str
    draft_layout: str
    states: bool
    compiled: bool = False

    @property
    def lockstep(self) -> bool:
        """Whether all rows must advance alike."""
        return "lockstep" in (self.layout, self.draft_layout)


def make_call(
    options: Options, withheld: Withheld, prompt: Prompt, drafter: Drafter, seeds: list[int] | None = None
) -> Call:
    """What one call asks for.

    Args:
        options: of the strategy.
        withheld: what else is known of the call.
        prompt: the target's.
        drafter: who proposes.
        seeds: one for each row.
    """
    models = [prompt.model] if drafter.model is None else [prompt.model, drafter.model]
    return Call(
        verification=options.verification,
        layout=options.layout,
        compile=options.compile,
        streamer=options.streamer,
        stream_by=options.stream_by,
        drafting=choose_drafting(options.num_draft_tokens, withheld.drafting, prompt.generation_config, drafter.model),
        seeds=seeds,
        synced=is_synced(withheld.synced_gpus, *models),
        shared=shares_rows(*models),
        listeners=options.listeners,
    )


def make_plan(call: Call, prompt: Prompt, drafter: Drafter) -> Plan:
    """Choose how a call is decoded.

    Args:
        call: what was asked for.
        prompt: the target's.
        drafter: who proposes.

    Raises:
        ValueError: if what was asked for cannot be done exactly.
    """
    able, sampled = layouts_of(prompt.model), prompt.generation_config.do_sample
    chosen, reason = _layout(prompt, call.layout)
    verification = call.verification if sampled else "greedy"
    draft_layout, states = chosen, able[0] == "lockstep"
    if drafter.model is not None:
        draft_able = layouts_of(drafter.model, drafts=True)
        if drafter.own_text:
            draft_able = [layout for layout in draft_able if layout in OWN_TEXT_LAYOUTS] or [ROW_BY_ROW]
        draft_layout = chosen if chosen in draft_able else draft_able[0]
        states = states or draft_able[0] == "lockstep"
    if verification is None:
        # where all rows advance alike, only the text of "coupled" is that of a row alone
        tied = call.seeds is not None and "lockstep" in (chosen, draft_layout)
        verification = "coupled" if tied or not drafter.has_probs else "block"
    if call.compile:
        told = f"{type(drafter).__name__} reads hidden states, which compiled forwards do not give; use compile=False."
        require(not drafter.needs_hidden, told)
        ranks = call.synced or call.shared
        check_compile(prompt.model, chosen, reason, prompt.generation_config, ranks)
        if drafter.model is not None and not drafter.own_text:  # whose queries have any length
            why = "its best for a draft"
            check_compile(drafter.model, draft_layout, why, prompt.generation_config, ranks)
    plan = Plan(verification, chosen, reason, draft_layout, states, call.compile)
    _check(plan, call, prompt.input_ids, drafter)
    return plan


def check_asked(
    call: Call,
    prompt: Prompt,
    processors: Sequence[LogitsProcessor],
    drafter: Drafter,
    longest: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Raise a `ValueError` if the models, or what was given to `generate`, cannot be served exactly.

    Args:
        call: what was asked for.
        prompt: the target's.
        processors: as `generate` prepared them.
        drafter: who proposes.
        longest: tokens that a row can come to hold; None is what the prompt says.
        tokenizer, draft_tokenizer: of the models, where they are known.
    """
    model, config = prompt.model, prompt.generation_config
    check_target(model, _width(prompt) + prompt.max_new_tokens if longest is None else longest)
    check_call(prompt.input_ids, config, prompt.kwargs, call.streamer)
    check_inputs(model, prompt.input_ids, config, prompt.kwargs)
    if longest is None:
        check_positions(model, _positions(prompt), prompt.max_new_tokens)
    for processor in processors:
        if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            check_guidance(processor, model, len(prompt.input_ids))
    drafter.meet(vocabulary(model), tokenizer)
    if drafter.model is not None and drafter.own_text:
        check_own_text(model, drafter.model, tokenizer, draft_tokenizer, prompt.input_ids.shape[1])
    elif drafter.model is not None:
        check_pair(model, drafter.model, tokenizer, draft_tokenizer)


def _width(prompt: Prompt) -> int:
    """Columns of the text so far, also if it is passed as embeddings, or only what a cache does not hold."""
    if prompt.model.config.is_encoder_decoder:
        return prompt.input_ids.shape[1]
    mask = prompt.kwargs.get("attention_mask")
    known = getattr(prompt.generation_config, "_mask_length", prompt.input_ids.shape[1])
    return known if mask is None else mask.shape[-1]


def _positions(prompt: Prompt) -> int:
    """Positions of the text so far, of its longest row; pads have none, unless positions are those of columns."""
    positions = None if prompt.model.config.is_encoder_decoder else prompt.kwargs.get("position_ids")
    if positions is None or positions.ndim != 2 or position_table(prompt.model) is None:
        return _width(prompt)
    return int(positions.max()) + 1


def _layout(prompt: Prompt, layout: str) -> tuple[str, str]:
    chosen, reason = choose_layout(prompt.model, layout)
    past: Any = prompt.kwargs.get("past_key_values")
    if chosen == "lockstep" or past is None or has_columns(past):
        return chosen, reason
    check_past(layout)
    return "lockstep", "chosen: past_key_values= does not have the keys of all tokens"


def _check(plan: Plan, call: Call, input_ids: torch.Tensor, drafter: Drafter) -> None:
    """Raise a `ValueError` if a call asks for something that does not go with its plan."""
    drafting = call.drafting
    check_assistant_settings(drafting.number, drafting.schedule, drafting.threshold)
    check_noise(input_ids.device, plan.verification)
    if call.seeds is not None:
        check_seeds(call.seeds, len(input_ids), plan.verification, "lockstep" if plan.lockstep else plan.layout)
    if call.synced:
        check_fixed(drafting.schedule, drafting.threshold)
        check_synced(plan.states, several=bool(drafter.parts))
        told = (
            "the draft has another tokenizer, so that ranks would run different forwards; give one with the target's."
        )
        require(not drafter.own_text, told)


def why_plain(prompt: Prompt, stateful: list[str]) -> str:
    """Why a call cannot be speculated exactly; empty if it can.

    Args:
        prompt: the target's.
        stateful: names of processors and criteria that keep state, or may.
    """
    if stateful:
        return (
            f"{', '.join(stateful)} may keep state, and must be shown each token once, in order (set its attribute "
            "stateless = True if it keeps none)"
        )
    config = prompt.generation_config
    names = ("output_attentions", "output_hidden_states")
    asked = [name for name in names if config.return_dict_in_generate and getattr(config, name)]
    if asked:
        return f"{asked[0]}=True wants what the model gives for each token alone"
    kind = prompt.model.config.model_type
    return f"{type(prompt.model).__name__} is exact without a cache only" if kind in WHOLE else ""


def warn_of_lockstep(plan: Plan, asked: str, rows: int, said: set[str]) -> None:
    """Warn of a layout that is slow, unless it was asked for or that was said before."""
    if plan.lockstep and rows > 1 and asked == "auto" and LOCKSTEP_COST not in said:
        said.add(LOCKSTEP_COST)
        warnings.warn(LOCKSTEP_COST, UserWarning, stacklevel=2)


def warn_of_plain(reason: str, said: set[str]) -> None:
    """Say once that a call has no speed-up, and why."""
    if PLAIN not in said:
        said.add(PLAIN)
        told = f"transformers' own sampler decodes this call, with the same text and without any speed-up: {reason}."
        warnings.warn(told, UserWarning, stacklevel=2)
