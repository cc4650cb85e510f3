"""One call: what was asked for, with the checks and choices that say how it is decoded; none of it changes later."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from hf_specx.common.architectures import LAYOUTS_OF, READS_WHOLE
from hf_specx.common.devices import world_size
from hf_specx.common.errors import is_int, one_of, require
from hf_specx.common.wrappers import vocabulary
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.schedule import Drafting, choose_drafting
from hf_specx.models.choose import choose_layout, layouts_of
from hf_specx.models.compiled import check_compile
from hf_specx.models.prompts import UNLIMITED, Prompt
from hf_specx.models.ragged import why_no_prefix_reuse
from hf_specx.models.slots import CACHE, has_columns, num_cached_tokens
from hf_specx.sampling.processors import WARPERS, Processor, can_look_ahead
from hf_specx.sampling.rewindable import masked
from hf_specx.sampling.stopping import Stopping

from .check_inputs import as_list, check_inputs, check_length, check_mode, check_seeds, why_no_noise
from .check_models import OWN_TEXT_LAYOUTS, check_own_text, check_pair, check_target, warn_of_larger_draft
from .queue import RequestQueue
from .ranks import check_synced, shares_rows, synced_by_default, why_out_of_step
from .reasons import RARE_PROCESSORS, reasons_of
from .report import PLAINLY


LOCKSTEP_COST = (
    "in this batch all rows advance by as many tokens as the row that accepted the fewest, so that larger batches "
    "gain less: no other layout has been shown to be exact for these models and inputs. Pass layout='lockstep' to "
    "silence this warning."
)
SCHEDULES = ("constant", "heuristic", "heuristic_transient")
SWITCHED_OFF = "num_draft_tokens=0, given or of a pair whose draft was slower; pass 'auto' to draft nevertheless"
DOES_NOT_PAY = "by earlier calls its draft would not pay; it is tried again now and then"


@dataclass(frozen=True)
class Layout:
    """How rows of unequal length share the batch.

    Attributes:
        target, draft: that of each model; `reason` says why the target's.
        refills: whether prompts can be read in the places of rows that have ended.
    """

    target: str
    draft: str
    reason: str
    refills: bool = True

    @property
    def lockstep(self) -> bool:
        """Whether all rows must advance alike."""
        return "lockstep" in (self.target, self.draft)


@dataclass(frozen=True)
class Call:
    """One call of `generate`, or one batch of a queue.

    Attributes:
        options: a copy of the `SpeculativeDecoding`.
        prompt: what `generate` has prepared, with what the models are to keep and hand over.
        processors: those of the prompt, with masks of grammars in place of some; `stopping`: made of its criteria.
        drafting: how many candidates in a round; `verification`: "greedy", "token", "block" or "coupled".
        fallback_reason: why transformers' own sampler decodes this call; empty if it is speculated.
        seeds: one for each row; None for the default generator.
        synced, shared: whether other ranks run the same forwards, for rows of their own or for the same rows.
        queue: what follows in the places of rows that end; None for a call of its own.
        shown: whether the streamer has the prompt already.
        measured_candidates: the most candidates with which the target was shown to be right; None if it is trusted.
        nodes: the most candidates of a row in a round where they may branch; 0 where each follows the one before.
        tree_reason: why they do not branch though that was asked for; empty if they do, or it was not.
    """

    options: Any
    prompt: Prompt
    processors: Sequence[Processor]
    stopping: Stopping
    drafter: Drafter
    drafting: Drafting
    verification: str
    layout: Layout
    fallback_reason: str = ""
    seeds: list[int] | None = None
    synced: bool = False
    shared: bool = False
    queue: RequestQueue | None = None
    shown: bool = False
    measured_candidates: int | None = None
    nodes: int = 0
    tree_reason: str = ""


def make_call(
    options: Any,
    prompt: Prompt,
    drafter: Drafter,
    queue: RequestQueue | None = None,
    drafting: dict[str, Any] | None = None,
    synced_gpus: bool | None = None,
    shown: bool = False,
) -> Call:
    """What one call asks for, and how it is decoded; a ValueError if that cannot be done exactly.

    Args:
        prompt: what `generate` has prepared.
        options, drafter, queue, shown: as in `Call`; a queue has begun a batch of requests.
        drafting: arguments of the call that say how many candidates to draft; None if that is not known.
        synced_gpus: of the call; transformers does not pass these two on to a strategy.
    """
    config = prompt.generation_config
    models = [prompt.model] if drafter.model is None else [prompt.model, drafter.model]
    ranks = world_size() > 1
    synced = ranks and (synced_by_default(*models) if synced_gpus is None else synced_gpus)
    shared = ranks and shares_rows(*models)
    stopping = prompt.stopping if queue is None else queue.stopping
    _check_asked(options, prompt, drafter, queue)
    processors: Sequence[Processor] = prompt.processors
    fallback_reason = SWITCHED_OFF if options.num_draft_tokens == 0 and queue is None else ""
    if queue is None and not fallback_reason:  # else each request was asked by itself
        processors = _with_masks(prompt, stopping)
        fallback_reason = "; ".join(_reasons(options, prompt, processors, stopping, drafter, synced))
    seeds = None if prompt.seeds is None else as_list(prompt.seeds)
    if fallback_reason:
        layout = Layout(PLAINLY, PLAINLY, fallback_reason)
    else:
        layout = _layout(options, prompt, drafter, queue is not None)
    tree_reason = why_no_tree(options, prompt, drafter, layout, synced or shared)
    nodes = 0 if tree_reason or options.tree is False else options.tree
    lockstep_with_seeds = seeds is not None and layout.lockstep  # only coupled then has the text of a row alone
    is_coupled = lockstep_with_seeds or not drafter.has_probs or nodes > 0
    verification = options.verification or ("coupled" if is_coupled else "block")
    verification = verification if config.do_sample else "greedy"
    wants_past = config.return_dict_in_generate or getattr(prompt.past, "_is_user_defined", False)
    later_prompts = queue is not None and layout.refills  # which have limits of their own
    read_by_models = replace(
        prompt,
        max_new_tokens=UNLIMITED if later_prompts else stopping.max_new_tokens,
        longest=stopping.max_new_tokens,
        keeps_past=bool(wants_past) and not synced,  # it may take forwards that other ranks do not run
        gives_hidden=drafter.needs_hidden,
        hidden_of_all=drafter.hidden_of_all,
        hidden_state_taps=drafter.hidden_state_taps,
        in_step=synced,
    )
    call = Call(
        options=options,
        prompt=read_by_models,
        processors=processors,
        stopping=stopping,
        drafter=drafter,
        drafting=choose_drafting(options.num_draft_tokens, drafting, config, drafter.model),
        verification=verification,
        layout=layout,
        fallback_reason=fallback_reason,
        seeds=seeds,
        synced=synced,
        shared=shared,
        queue=queue,
        shown=shown,
        nodes=nodes,
        tree_reason=tree_reason,
    )
    _check_together(call)
    return call


def in_layout(call: Call, layout: str) -> Call:
    """The same call with its target in another layout."""
    options = copy.copy(call.options)
    options.layout = layout
    other = make_call(options, call.prompt, call.drafter, call.queue, synced_gpus=call.synced, shown=call.shown)
    return replace(other, options=call.options, drafting=call.drafting)


def warn_once(call: Call, asked: str, said: set[str]) -> None:
    """Warn of a call without speed-up, and of a slow layout that was not asked for; of each once.

    Where a draft does not pay, the report alone says so.
    """
    if call.fallback_reason == DOES_NOT_PAY:
        return
    if call.fallback_reason and call.fallback_reason not in said:
        said.add(call.fallback_reason)
        message = "transformers' own sampler decodes this call, with the same text and without any speed-up: "
        warnings.warn(f"{message}{call.fallback_reason}.", UserWarning, stacklevel=3)
    slow = call.layout.lockstep and len(call.prompt.input_ids) > 1
    if slow and asked == "auto" and LOCKSTEP_COST not in said:
        said.add(LOCKSTEP_COST)
        warnings.warn(LOCKSTEP_COST, UserWarning, stacklevel=3)


def _check_asked(options: Any, prompt: Prompt, drafter: Drafter, queue: RequestQueue | None) -> None:
    """Raise ValueError for what plain `generate` refuses as well, and for a draft that cannot serve."""
    model, tokenizers = prompt.model, (options.tokenizer, options.draft_tokenizer)
    check_target(model)
    check_mode(prompt, options.streamer)
    check_inputs(prompt)
    if queue is None:  # else each request was checked by itself
        check_length(prompt, prompt.stopping.max_new_tokens)
    drafter.check(vocabulary(model), options.tokenizer)
    if drafter.model is not None:
        warn_of_larger_draft(model, drafter.model)
    if drafter.model is not None and drafter.own_text:
        check_own_text(model, drafter.model, *tokenizers, prompt.input_ids.shape[1])
    elif drafter.model is not None:
        check_pair(model, drafter.model, *tokenizers)


def _with_masks(prompt: Prompt, stopping: Stopping) -> Sequence[Processor]:
    """The processors of a call, with `TokenMasks` in place of some."""
    if all(type(each) in WARPERS for each in prompt.processors):
        return prompt.processors
    return masked(prompt.processors, prompt.input_ids, vocabulary(prompt.model), stopping)


def _reasons(
    options: Any, prompt: Prompt, processors: Sequence[Processor], stopping: Stopping, drafter: Drafter, synced: bool
) -> list[str]:
    """Why transformers itself decodes a call, all that speaks against candidates; none if it is speculated."""
    config, reasons = prompt.generation_config, reasons_of(prompt, stopping.max_new_tokens)
    stateful = [type(p).__name__ for p in processors if not can_look_ahead(p) and type(p) not in RARE_PROCESSORS]
    if stateful or stopping.stateful:
        names = ", ".join(dict.fromkeys(stateful + stopping.stateful))
        remedy = "(set its attribute stateless = True if it keeps none)"
        reasons.append(f"{names} may keep state, and must be shown each token once, in order {remedy}")
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            reasons.append(f"{name}=True wants what the model gives for each token alone")
    verification = options.verification or ("block" if drafter.has_probs else "coupled")
    reasons.append(why_no_noise(prompt.input_ids.device, verification if config.do_sample else "greedy"))
    if synced and not any(reasons):
        reasons.append(why_out_of_step(prompt.model))
    return [why for why in reasons if why]


def _layout(options: Any, prompt: Prompt, drafter: Drafter, queued: bool) -> Layout:
    """How rows share the batch: as was asked for, or the best that is exact for both models and the cache given."""
    model, past = prompt.model, prompt.past
    chosen, reason = choose_layout(model, options.layout)
    if chosen != "lockstep" and past is not None and not has_columns(past):
        message = f"layout={options.layout!r} needs the keys of all tokens, and {CACHE}= does not have them (a "
        message += f"window drops some); use layout='auto' or leave {CACHE} out."
        require(options.layout == "auto", message)
        chosen, reason = "lockstep", f"chosen: {CACHE}= does not have the keys of all tokens"
    model_type, draft_model = model.config.model_type, drafter.model
    if draft_model is None or (draft_model.config.model_type == model_type and model_type not in LAYOUTS_OF):
        of_draft = [chosen]  # of a type that is in no table the target is measured, and its draft is fed alike
    else:
        of_draft = layouts_of(draft_model, drafts=True)
    if drafter.own_text:
        of_draft = [layout for layout in of_draft if layout in OWN_TEXT_LAYOUTS]
    layout = Layout(chosen, chosen if chosen in of_draft else of_draft[0], reason)
    notes, past_has_tokens = [reason], past is not None and num_cached_tokens(past) > 0
    whole = _why_whole([model] if drafter.model is None else [model, drafter.model], layout) if queued else ""
    if whole:
        notes.append(f"whole batches, since {whole}")
    elif queued and why_no_prefix_reuse(model):
        notes.append(f"prompts that begin alike are read anew, since {why_no_prefix_reuse(model)}")
    if drafter.needs_hidden and drafter.hidden_of_all and (past_has_tokens or not prompt.input_ids.shape[1]):
        unknown = "hidden states of the given cache" if past_has_tokens else "tokens of the given embeddings"
        notes.append(f"the draft has no {unknown}")
    return replace(layout, reason="; ".join(notes), refills=not whole)


def why_no_tree(options: Any, prompt: Prompt, drafter: Drafter, layout: Layout, ranks: bool) -> str:
    """Why candidates of a call do not branch though that was asked for; empty if they may, or it was not."""
    if options.tree is False or layout.target == PLAINLY:
        return ""
    name, positions = type(prompt.model).__name__, prompt.kwargs.get("position_ids")
    if not drafter.proposes_trees:
        return "no tree: the draft does not know what else it could have proposed"
    if layout.target != "ragged":
        return f"no tree: the layout of {name} is {layout.target!r}, and only 'ragged' has a mask for nodes"
    if positions is not None and positions.ndim == 3:
        return f"no tree: {name} has positions of images"
    if options.verification in ("token", "block") and prompt.generation_config.do_sample:
        return f"no tree: verification={options.verification!r} judges a chain; 'coupled' takes trees"
    return "no tree: other ranks run the same forwards" if ranks else ""


def _why_whole(models: Sequence[PreTrainedModel], layout: Layout) -> str:
    """Why prompts cannot be read in the places of rows that have ended; empty if they can."""
    for model in models:
        if model.config.is_encoder_decoder:
            return f"{type(model).__name__} has an encoder"
        if model.config.model_type in READS_WHOLE:
            return f"{type(model).__name__} reads prompts without its window"
    if layout.target == layout.draft:
        return "" if layout.target == "ragged" else f"the layout is {layout.target!r}"
    return f"the layout is {layout.target!r}, that of the draft {layout.draft!r}"


def _check_together(call: Call) -> None:
    """Raise ValueError if what a call asks for does not go with how it is decoded."""
    drafting, drafter, ids = call.drafting, call.drafter, call.prompt.input_ids
    number, schedule, threshold = drafting
    message = f"num_assistant_tokens={number!r} is not an int of 1 or more; give one, or leave it out for 'auto'."
    off = call.options.num_draft_tokens == 0  # of a queue, which then has rounds without candidates
    require(off or number is None or (is_int(number) and number >= 1), message)
    one_of("num_assistant_tokens_schedule", schedule, SCHEDULES)
    message = (
        f"assistant_confidence_threshold={threshold!r} is no probability; give a number from 0 (never stop) to 1."
    )
    require(isinstance(threshold, float | int) and 0 <= threshold <= 1, message)
    if call.seeds is not None:
        check_seeds(call.seeds, len(ids), call.verification, call.layout.lockstep, call.queue is not None)
    if call.fallback_reason:
        return
    why = why_no_noise(ids.device, call.verification)  # of a queue, and of seeds in lockstep
    require(not why, f"{why}.")
    if call.options.compile:
        ranks = call.synced or call.shared
        check_compile(call.prompt.model, call.layout.target, call.layout.reason, ranks)
        if drafter.model is not None and not drafter.own_text:  # whose queries have any length
            check_compile(drafter.model, call.layout.draft, "its best for a draft", ranks)
    if call.synced:
        check_synced(drafting, drafter)
