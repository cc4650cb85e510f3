"""One call: what was asked for, with the checks and choices that say how it is decoded; none of it changes later."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from hf_specx.common.architectures import vocabulary
from hf_specx.common.errors import require
from hf_specx.common.round import Listener
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.schedule import Drafting, choose_drafting
from hf_specx.models.choose import choose_layout, layouts_of
from hf_specx.models.compiled import check_compile
from hf_specx.models.guidance import is_guidance
from hf_specx.models.prompts import UNLIMITED, Prompt
from hf_specx.models.slots import has_columns
from hf_specx.sampling.processors import Processor, can_look_ahead
from hf_specx.sampling.rewindable import masked
from hf_specx.sampling.stopping import Stopping

from .check_calls import check_asked, check_noise, check_past
from .check_many import why_uncached, why_whole
from .check_models import OWN_TEXT_LAYOUTS
from .check_options import check_assistant_settings
from .check_rows import check_seeds, check_synced
from .queue import RequestQueue
from .ranks import is_synced, shares_rows
from .report import PLAINLY
from .requests import Prepared


LOCKSTEP_COST = (
    "in this batch all rows advance by as many tokens as the row that accepted the fewest, so that larger batches "
    "gain less: no other layout has been shown to be exact for these models and inputs. Pass layout='lockstep' to "
    "silence this warning."
)


class Options(Protocol):
    """The options of a strategy that a call goes by; see `SpeculativeDecoding`."""

    verification: str | None
    layout: str
    compile: bool
    streamer: BaseStreamer | None
    stream_by: str
    num_draft_tokens: str | int
    tokenizer: PreTrainedTokenizerBase | None
    draft_tokenizer: PreTrainedTokenizerBase | None
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


NONE_WITHHELD = Withheld()


@dataclass(frozen=True)
class Layout:
    """How rows of unequal length share the batch.

    Attributes:
        target, draft: that of each model; `reason` says why the target's.
        states: whether one of the models takes lockstep only, where a rollback may have to feed tokens again.
        refills: whether prompts can be read in the places of rows that have ended.
    """

    target: str
    draft: str
    reason: str
    states: bool = False
    refills: bool = True

    @property
    def lockstep(self) -> bool:
        """Whether all rows must advance alike."""
        return "lockstep" in (self.target, self.draft)


@dataclass(frozen=True)
class Call:
    """One call of `generate`, or one batch of a queue.

    Attributes:
        options: of the strategy.
        prompt: the target's, made of what `generate` has given.
        processors: those given, with masks of grammars in place of some; `stopping`: made of its criteria.
        drafter: who proposes; `drafting`: how many candidates in a round.
        verification: "greedy", "token", "block" or "coupled".
        layout: how rows share the batch.
        plain: why transformers' own sampler decodes this call; empty if it is speculated.
        seeds: one for each row; None for the default generator.
        synced: whether other ranks have to run the same forwards, each for rows of its own.
        shared: whether other ranks decode the same rows, with other parts of the models.
        queue: what follows in the places of rows that end; None for a call of its own.
    """

    options: Options
    prompt: Prompt
    given: Prepared
    processors: Sequence[Processor]
    stopping: Stopping
    drafter: Drafter
    drafting: Drafting
    verification: str
    layout: Layout
    plain: str = ""
    seeds: list[int] | None = None
    synced: bool = False
    shared: bool = False
    queue: RequestQueue | None = None


def make_call(
    options: Options,
    given: Prepared,
    drafter: Drafter,
    withheld: Withheld = NONE_WITHHELD,
    seeds: list[int] | None = None,
    queue: RequestQueue | None = None,
) -> Call:
    """What one call asks for, and how it is decoded.

    Args:
        options: of the strategy.
        given: what `generate` has prepared.
        drafter: who proposes.
        withheld: what else is known of the call.
        seeds: one for each row.
        queue: that has begun a batch of requests; None for a call of its own.

    Raises:
        ValueError: if what was asked for cannot be done exactly.
    """
    models = [given.model] if drafter.model is None else [given.model, drafter.model]
    synced, shared = is_synced(withheld.synced_gpus, *models), shares_rows(*models)
    stopping = given.stopping if queue is None else queue.stopping
    prompt = _prompt(given, drafter, stopping, synced, queue)
    check_asked(prompt, given.processors, drafter, options, None if queue is None else queue.longest)
    processors, stateful = _with_own_masks(given.processors, prompt, stopping, queue)
    plain, sampled = why_plain(prompt, stateful), given.config.do_sample
    layout = Layout(PLAINLY, PLAINLY, plain) if plain else _layout(options, prompt, drafter)
    if queue is not None and (whole := why_whole(models, layout.target, layout.draft)):
        layout = replace(layout, refills=False, reason=f"{layout.reason}; whole batches, since {whole}")
    elif queue is not None:
        prompt = replace(prompt, max_new_tokens=UNLIMITED)
    call = Call(
        copy.copy(options),  # which may change later
        prompt,
        given,
        processors,
        stopping,
        drafter,
        drafting=choose_drafting(options.num_draft_tokens, withheld.drafting, given.config, drafter.model),
        verification=_verification(options, layout, drafter, seeds) if sampled else "greedy",
        layout=layout,
        plain=plain,
        seeds=seeds,
        synced=synced,
        shared=shared,
        queue=queue,
    )
    return _checked(call)


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
    return why_uncached(prompt.model)


def warn_once(call: Call, asked: str, said: set[str]) -> None:
    """Warn of a call without speed-up, and of a slow layout that was not asked for; of each once."""
    if call.plain and PLAINLY not in said:
        said.add(PLAINLY)
        told = "transformers' own sampler decodes this call, with the same text and without any speed-up: "
        warnings.warn(f"{told}{call.plain}.", UserWarning, stacklevel=3)
    slow = call.layout.lockstep and len(call.prompt.input_ids) > 1
    if slow and asked == "auto" and LOCKSTEP_COST not in said:
        said.add(LOCKSTEP_COST)
        warnings.warn(LOCKSTEP_COST, UserWarning, stacklevel=3)


def _prompt(given: Prepared, drafter: Drafter, stopping: Stopping, synced: bool, queue: RequestQueue | None) -> Prompt:
    keeps = given.config.return_dict_in_generate or getattr(given.past, "_is_user_defined", False)
    return Prompt(
        given.model,
        given.input_ids,
        given.config,
        given.kwargs,
        stopping.max_new_tokens,
        keeps_past=bool(keeps) and not synced,  # it may take forwards that other ranks do not run
        gives_hidden=drafter.needs_hidden,
        limits=None if queue is None else [entry.limit for entry in queue.entries],
    )


def _with_own_masks(
    given: LogitsProcessorList, prompt: Prompt, stopping: Stopping, queue: RequestQueue | None
) -> tuple[Sequence[Processor], list[str]]:
    """Processors with `TokenMasks` in place of some, and names of what must be shown each token once, in order.

    Requests have their own, and those that need such an order are decoded as calls of their own.
    """
    if queue is not None:
        return given, []
    ours = masked(given, prompt.input_ids, vocabulary(prompt.model), stopping)
    unknown = [p for p in ours if not (can_look_ahead(p) or is_guidance(p, prompt))]
    return ours, [type(p).__name__ for p in unknown] + stopping.stateful


def _layout(options: Options, prompt: Prompt, drafter: Drafter) -> Layout:
    """How rows share the batch: as was asked for, or the best that is exact for both models and the cache given."""
    able = layouts_of(prompt.model)
    chosen, reason = choose_layout(prompt.model, options.layout)
    past: Any = prompt.kwargs.get("past_key_values")
    if chosen != "lockstep" and past is not None and not has_columns(past):
        check_past(options.layout)
        chosen, reason = "lockstep", "chosen: past_key_values= does not have the keys of all tokens"
    if drafter.model is None:
        return Layout(chosen, chosen, reason, able[0] == "lockstep")
    of_draft = layouts_of(drafter.model, drafts=True)
    if drafter.own_text:
        of_draft = [layout for layout in of_draft if layout in OWN_TEXT_LAYOUTS]
    states = "lockstep" in (able[0], of_draft[0])
    return Layout(chosen, chosen if chosen in of_draft else of_draft[0], reason, states)


def _verification(options: Options, layout: Layout, drafter: Drafter, seeds: list[int] | None) -> str:
    if options.verification is not None:
        return options.verification
    tied = seeds is not None and layout.lockstep  # then only the text of "coupled" is that of a row alone
    return "coupled" if tied or not drafter.has_probs else "block"


def _checked(call: Call) -> Call:
    """The call itself; raises a `ValueError` if it asks for something that does not go with how it is decoded."""
    drafting, drafter, ids, ranks = call.drafting, call.drafter, call.prompt.input_ids, call.synced or call.shared
    check_assistant_settings(drafting.number, drafting.schedule, drafting.threshold)
    if call.seeds is not None:
        layout = "lockstep" if call.layout.lockstep else call.layout.target
        check_seeds(call.seeds, len(ids), call.verification, layout)
    if call.plain:
        return call
    check_noise(ids.device, call.verification)
    if call.options.compile:
        told = f"{type(drafter).__name__} reads hidden states, which compiled forwards do not give; use compile=False."
        require(not drafter.needs_hidden, told)
        check_compile(call.prompt.model, call.layout.target, call.layout.reason, ranks)
        if drafter.model is not None and not drafter.own_text:  # whose queries have any length
            check_compile(drafter.model, call.layout.draft, "its best for a draft", ranks)
    if call.synced:
        check_synced(call.layout.states, drafting.schedule, drafting.threshold, drafter)
    return call
