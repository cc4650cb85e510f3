"""One call: what was asked for, with the checks and choices that say how it is decoded; none of it changes later."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from hf_specx.common.architectures import LAYOUTS_OF, NO_TREES, WINDOW_IN_CACHE
from hf_specx.common.batch import Batch, RowState
from hf_specx.common.devices import world_size
from hf_specx.common.errors import is_int, one_of, require
from hf_specx.common.wrappers import vocabulary
from hf_specx.drafting.auto import AutoDraftLength
from hf_specx.drafting.costs import MAX_DRAFT_TOKENS, Costs
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.round_timer import RoundTimer
from hf_specx.drafting.schedule import DraftSettings, choose_draft_settings
from hf_specx.models.choose import choose_layout, layouts_of
from hf_specx.models.compiled import check_compile
from hf_specx.models.prompts import UNLIMITED, PreparedInputs
from hf_specx.models.ragged import why_no_prefix_reuse
from hf_specx.models.self_check import tokens_of_a_round
from hf_specx.models.slots import CACHE, has_columns, num_cached_tokens
from hf_specx.sampling.per_request import RowProcessors
from hf_specx.sampling.processors import WARPERS, Processor, RoundProcessor
from hf_specx.sampling.rewindable import with_token_masks
from hf_specx.sampling.stopping import Stopping

from .check_inputs import as_list, check_inputs, check_length, check_mode, check_seeds
from .check_models import (
    OTHER_TOKENIZER_LAYOUTS,
    check_other_tokenizer,
    check_pair,
    check_target,
    warn_of_larger_draft,
)
from .check_options import MAX_NODES
from .queue import RequestQueue
from .ranks import check_synced, is_tensor_parallel, synced_by_default
from .reasons import DOES_NOT_PAY, SWITCHED_OFF, reasons_in_call, why_no_noise
from .report import PLAINLY
from .requests import PreparedRequest


LOCKSTEP_COST = (
    "in this batch all rows advance by as many tokens as the row that accepted the fewest, so that larger batches "
    "gain less: no other layout has been shown to be exact for these models and inputs. Pass layout='lockstep' to "
    "silence this warning."
)
DRAWN_BY_LENGTH = ("token", "block")  # verifications that draw other tokens for another number of candidates
SCHEDULES = ("constant", "heuristic", "heuristic_transient")


@dataclass(frozen=True)
class Layout:
    """How rows of unequal length share the batch.

    Attributes:
        target, draft: that of each model: "ragged" (each row has slots of its own and ends where it ends), "padded"
            (all rows end in one slot), "packed" (one after another in a batch of one) or "lockstep" (all advance by as
            many tokens as the row that accepted fewest); "plain" in a call that transformers' own sampler decodes.
        reason: why the target's.
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
        strategy: the `SpeculativeDecoding`, as it was when the call began.
        prompt: what `generate` has prepared, with what the models are to keep and hand over.
        processors: those of the prompt, with masks of grammars in place of some; `stopping`: made of its criteria.
        draft_settings: how many candidates in a round; `verification`: "greedy", "token", "block" or "coupled".
        fallback_reason: why transformers' own sampler decodes this call; empty if it is speculated.
        seeds: one for each row; None for the default generator.
        synced_gpus: whether other ranks, which hold parts of the models, run the same forwards for rows of their own.
        tensor_parallel: whether other ranks decode the same rows.
        queue: what follows in the places of rows that end; None for a call of its own.
        prompt_streamed: whether the streamer was given the prompt already.
        measured_candidates: the most candidates with which the target was shown to be right; None if it is trusted.
        tree: the most candidates of a row in a round where they may branch, as asked for, or "auto"; 0 where each
            follows the one before.
        tree_reason: why they do not branch though that was asked for; empty if they do, or it was not.
    """

    strategy: Any
    prompt: PreparedInputs
    processors: Sequence[Processor]
    stopping: Stopping
    drafter: Drafter
    draft_settings: DraftSettings
    verification: str
    layout: Layout
    fallback_reason: str = ""
    seeds: list[int] | None = None
    synced_gpus: bool = False
    tensor_parallel: bool = False
    queue: RequestQueue | None = None
    prompt_streamed: bool = False
    measured_candidates: int | None = None
    tree: int | str = 0
    tree_reason: str = ""

    @property
    def max_nodes(self) -> int:
        """The most candidates of a row in a round where they may branch; 0 where they may not."""
        if not self.tree:
            return 0
        max_nodes = self.tree if isinstance(self.tree, int) else MAX_NODES
        round_size = tokens_of_a_round(self.prompt.model)
        return max_nodes if round_size is None else min(max_nodes, round_size - 1)

    @property
    def max_draft_tokens(self) -> int:
        """The most candidates that a row may have in a round, one after another."""
        return self.draft_settings.num_draft_tokens or self.drafter.max_candidates or MAX_DRAFT_TOKENS

    @property
    def fixed_draft_tokens(self) -> int | None:
        """The candidates of each round, if that was asked for or the draft finds its own number up to that; else None.

        0 in a queue without candidates.
        """
        if self.draft_settings.num_draft_tokens is not None:
            return self.draft_settings.num_draft_tokens
        return self.drafter.max_candidates if self.drafter.finds_own_number else None

    def would_not_draft(self, costs: Costs) -> bool:
        """Whether "auto" will probably draft nothing in all of the call, so that transformers may decode it.

        Not if anything in it needs rounds, or gets candidates without a forward.
        """
        strategy, drafter = self.strategy, self.drafter
        needs_rounds = self.seeds is not None or self.synced_gpus or self.tensor_parallel
        needs_rounds = needs_rounds or strategy.compile or bool(strategy.listeners)
        drafts_without_forwards = bool(drafter.parts) or not drafter.has_probs
        if self.fixed_draft_tokens is not None or needs_rounds or drafts_without_forwards:
            return False
        if any(isinstance(each, RoundProcessor) and each.vocab_size for each in self.processors):  # of forced tokens
            return False
        round_timer, limit = RoundTimer(costs), drafter.max_candidates
        return AutoDraftLength(round_timer, self.verification, self.make_batch(), max_candidates=limit).is_idle()

    def make_batch(self) -> Batch:
        """The text before its first token, with a `RowState` for each prompt."""
        prompt = self.prompt
        width = prompt.input_ids.shape[1]
        name = "decoder_attention_mask" if prompt.model.config.is_encoder_decoder else "attention_mask"
        mask = prompt.kwargs.get(name)
        mask = None if mask is None or width == 0 else mask[:, -width:]
        pad = prompt.generation_config._pad_token_tensor
        if self.queue is None:
            seeds: Sequence[int | None] = self.seeds or [None] * len(prompt.input_ids)
            independent_lengths = self.seeds is not None and self.verification in DRAWN_BY_LENGTH
            row_states = []
            for seed in seeds:
                limit = prompt.max_new_tokens_now
                row_states.append(RowState(limit=limit, seed=seed, independent_lengths=independent_lengths))
        else:
            row_states = [self.make_row_state(request) for request in self.queue.batch_requests]
        pad_token_id = 0 if pad is None else int(pad)
        return Batch(prompt.input_ids, mask, pad_token_id, self.layout.lockstep, row_states, self.max_nodes)

    def make_row_state(self, request: PreparedRequest, is_refill: bool = False) -> RowState:
        """The row of a request of a queue, as it begins."""
        return RowState(
            limit=request.limit,
            greedy=request.greedy,
            seed=request.seed,
            independent_lengths=request.has_own_seed and self.verification in DRAWN_BY_LENGTH,
            is_refill=is_refill,
            processors=RowProcessors(request.row_processors, request.stopping.eos_token_ids),
            stopping=request.stopping,
            request=request,
        )


def make_call(
    strategy: Any,
    prompt: PreparedInputs,
    drafter: Drafter,
    queue: RequestQueue | None = None,
    draft_settings: dict[str, Any] | None = None,
    synced_gpus: bool | None = None,
    prompt_streamed: bool = False,
    wanted_layout: str | None = None,
) -> Call:
    """The call of `generate`, or of a batch of a queue, with all that is decided before any forward.

    Args:
        prompt: what `generate` has prepared.
        strategy, drafter, queue, prompt_streamed: as in `Call`; a queue has begun a batch of requests.
        draft_settings: the `explicit_draft_settings` of the call; None if these are not known.
        synced_gpus: of the call; None if it is not known. transformers passes neither on to a strategy.
        wanted_layout: that of the target; by default what the strategy says.

    Raises:
        ValueError: if the call is one that plain `generate` refuses too, or its options contradict each other.
    """
    _check_asked(strategy, prompt, drafter, queue)
    models = [prompt.model] if drafter.model is None else [prompt.model, drafter.model]
    has_ranks = world_size() > 1
    synced_gpus = has_ranks and (synced_by_default(*models) if synced_gpus is None else synced_gpus)
    tensor_parallel = has_ranks and is_tensor_parallel(*models)
    stopping = prompt.stopping if queue is None else queue.stopping
    # 1. can it be speculated? Each request of a queue was asked by itself
    processors: Sequence[Processor] = prompt.processors
    fallback_reason = ""
    if queue is None and strategy.num_draft_tokens == 0:
        fallback_reason = SWITCHED_OFF
    elif queue is None:
        processors = _with_masks(prompt, stopping)
        if_sampled = _sampled_verification(strategy, drafter)
        fallback_reason = "; ".join(reasons_in_call(prompt, processors, stopping, if_sampled, synced_gpus))
    # 2. how do rows share the batch, and may candidates branch?
    if fallback_reason:
        layout = Layout(PLAINLY, PLAINLY, fallback_reason)
    else:
        layout = _layout(wanted_layout or strategy.layout, prompt, drafter, is_queue=queue is not None)
    tree_reason = why_no_tree(strategy, prompt, drafter, layout, has_other_ranks=synced_gpus or tensor_parallel)
    tree = 0 if tree_reason or strategy.tree is False else strategy.tree
    # 3. how are they judged?
    seeds = None if prompt.seeds is None else as_list(prompt.seeds)
    verification = "greedy"
    if prompt.generation_config.do_sample:
        # only coupled verification gives a seeded row in lockstep the text that it has alone, and only it judges trees
        needs_coupled = (seeds is not None and layout.lockstep) or bool(tree)
        verification = _sampled_verification(strategy, drafter, needs_coupled)
    call = Call(
        strategy=strategy,
        prompt=_for_runners(prompt, stopping, drafter, synced_gpus, is_refilled=queue is not None and layout.refills),
        processors=processors,
        stopping=stopping,
        drafter=drafter,
        draft_settings=choose_draft_settings(
            strategy.num_draft_tokens, draft_settings, prompt.generation_config, drafter.model
        ),
        verification=verification,
        layout=layout,
        fallback_reason=fallback_reason,
        seeds=seeds,
        synced_gpus=synced_gpus,
        tensor_parallel=tensor_parallel,
        queue=queue,
        prompt_streamed=prompt_streamed,
        tree=tree,
        tree_reason=tree_reason,
    )
    _check_together(call)
    return call


def _sampled_verification(strategy: Any, drafter: Drafter, needs_coupled: bool = False) -> str:
    """The verification of a call if it samples: as asked for, or by whether the draft has probabilities."""
    default = "coupled" if needs_coupled or not drafter.has_probs else "block"
    return strategy.verification or default


def _for_runners(
    prompt: PreparedInputs, stopping: Stopping, drafter: Drafter, synced_gpus: bool, is_refilled: bool
) -> PreparedInputs:
    """What `generate` has prepared, with what a `ModelRunner` is to keep and hand over.

    `is_refilled` says whether later prompts, with limits of their own, replace these.
    """
    config, past = prompt.generation_config, prompt.past
    returns_cache = config.return_dict_in_generate or getattr(past, "_is_user_defined", False)
    return replace(
        prompt,
        max_new_tokens=UNLIMITED if is_refilled else stopping.max_new_tokens,
        max_new_tokens_now=stopping.max_new_tokens,
        returns_cache=bool(returns_cache) and not synced_gpus,  # it may take forwards that other ranks do not run
        returns_hidden=drafter.needs_hidden,
        all_prompt_hidden=drafter.all_prompt_hidden,
        hidden_state_taps=drafter.hidden_state_taps,
        synced_gpus=synced_gpus,
    )


def without_tree(call: Call, reason: str) -> Call:
    """The same call with chains, verified as a call that has asked for no tree."""
    verification = call.verification
    if verification != "greedy":
        needs_coupled = call.seeds is not None and call.layout.lockstep
        verification = _sampled_verification(call.strategy, call.drafter, needs_coupled)
    return replace(call, tree=0, tree_reason=reason, verification=verification)


def in_layout(call: Call, layout: str) -> Call:
    """The same call with its target in another layout."""
    other = make_call(
        call.strategy,
        call.prompt,
        call.drafter,
        call.queue,
        synced_gpus=call.synced_gpus,
        prompt_streamed=call.prompt_streamed,
        wanted_layout=layout,
    )
    return replace(other, draft_settings=call.draft_settings)


def warn_once(call: Call, asked: str, said: set[str]) -> None:
    """Warn of a call that is decoded plainly, and of a slow layout that was not asked for; of each once.

    Where a draft does not pay, the report alone says so. `asked` is the layout that was asked for, and `said` has the
    warnings so far.
    """
    if call.fallback_reason == DOES_NOT_PAY:
        return
    if call.fallback_reason and call.fallback_reason not in said:
        said.add(call.fallback_reason)
        message = (
            "transformers' own sampler decodes this call, with the same text and without any speed-up: "
            f"{call.fallback_reason}."
        )
        warnings.warn(message, UserWarning, stacklevel=3)
    slow = call.layout.lockstep and len(call.prompt.input_ids) > 1
    if slow and asked == "auto" and LOCKSTEP_COST not in said:
        said.add(LOCKSTEP_COST)
        warnings.warn(LOCKSTEP_COST, UserWarning, stacklevel=3)


def _check_asked(strategy: Any, prompt: PreparedInputs, drafter: Drafter, queue: RequestQueue | None) -> None:
    """Raise ValueError for what plain `generate` refuses as well, and for a draft that cannot serve."""
    model, tokenizers = prompt.model, (strategy.tokenizer, strategy.draft_tokenizer)
    check_target(model)
    check_mode(prompt, strategy.streamer)
    check_inputs(prompt)
    if queue is None:  # else each request was checked by itself
        check_length(prompt, prompt.stopping.max_new_tokens)
    drafter.check(vocabulary(model), strategy.tokenizer)
    if drafter.model is not None:
        warn_of_larger_draft(model, drafter.model)
    if drafter.model is not None and drafter.has_other_tokenizer:
        check_other_tokenizer(model, drafter.model, *tokenizers, prompt.input_ids.shape[1])
    elif drafter.model is not None:
        check_pair(model, drafter.model, *tokenizers)


def _with_masks(prompt: PreparedInputs, stopping: Stopping) -> Sequence[Processor]:
    """The processors of a call, with `TokenMasks` in place of some."""
    if all(type(each) in WARPERS for each in prompt.processors):
        return prompt.processors
    return with_token_masks(prompt.processors, prompt.input_ids, vocabulary(prompt.model), stopping)


def _layout(wanted: str, prompt: PreparedInputs, drafter: Drafter, is_queue: bool) -> Layout:
    """How rows share the batch: as was asked for, or the best that is exact for both models and the cache given."""
    model, past = prompt.model, prompt.past
    chosen, reason = choose_layout(model, wanted)
    if chosen != "lockstep" and past is not None and not has_columns(past):
        message = (
            f"layout={wanted!r} needs the keys of all tokens, and {CACHE}= does not have them (a window drops some); "
            f"use layout='auto' or leave {CACHE} out."
        )
        require(wanted == "auto", message)
        chosen, reason = "lockstep", f"chosen: {CACHE}= does not have the keys of all tokens"
    model_type, draft_model = model.config.model_type, drafter.model
    if draft_model is None or (draft_model.config.model_type == model_type and model_type not in LAYOUTS_OF):
        of_draft = [chosen]  # of a type that is in no table the target is measured, and its draft is fed alike
    else:
        of_draft = layouts_of(draft_model, drafts=True)
    if drafter.has_other_tokenizer:
        of_draft = [layout for layout in of_draft if layout in OTHER_TOKENIZER_LAYOUTS]
    layout = Layout(chosen, chosen if chosen in of_draft else of_draft[0], reason)
    notes, past_has_tokens = [reason], past is not None and num_cached_tokens(past) > 0
    models = [model] if drafter.model is None else [model, drafter.model]
    why_no_refill = _why_no_refill(models, layout) if is_queue else ""
    if why_no_refill:
        notes.append(f"whole batches, since {why_no_refill}")
    elif is_queue and why_no_prefix_reuse(model):
        notes.append(f"prompts that begin alike are read anew, since {why_no_prefix_reuse(model)}")
    if drafter.needs_hidden and drafter.all_prompt_hidden and (past_has_tokens or not prompt.input_ids.shape[1]):
        unknown = "hidden states of the given cache" if past_has_tokens else "tokens of the given embeddings"
        notes.append(f"the draft has no {unknown}")
    return replace(layout, reason="; ".join(notes), refills=not why_no_refill)


def why_no_tree(strategy: Any, prompt: PreparedInputs, drafter: Drafter, layout: Layout, has_other_ranks: bool) -> str:
    """Why candidates of a call do not branch though that was asked for; empty if they may, or it was not."""
    if strategy.tree is False or layout.target == PLAINLY:
        return ""
    name, positions = type(prompt.model).__name__, prompt.kwargs.get("position_ids")
    if not drafter.proposes_trees:
        return "no tree: the draft does not know what else it could have proposed"
    if layout.target != "ragged":
        return f"no tree: the layout of {name} is {layout.target!r}, and only 'ragged' has a mask for nodes"
    if prompt.model.config.model_type in NO_TREES:
        return f"no tree: the attention of {name} goes by distances of slots"
    if positions is not None and positions.ndim == 3:
        return f"no tree: {name} has positions of images"
    if strategy.verification in ("token", "block") and prompt.generation_config.do_sample:
        return f"no tree: verification={strategy.verification!r} judges a chain; 'coupled' takes trees"
    if has_other_ranks:
        return "no tree: other ranks run the same forwards"
    no_noise = why_no_noise(prompt.input_ids.device, "coupled") if prompt.generation_config.do_sample else ""
    return f"no tree: {no_noise}" if no_noise else ""


def _why_no_refill(models: Sequence[PreTrainedModel], layout: Layout) -> str:
    """Why prompts cannot be read in the places of rows that have ended; empty if they can."""
    for model in models:
        if model.config.is_encoder_decoder:
            return f"{type(model).__name__} has an encoder"
        if model.config.model_type in WINDOW_IN_CACHE:
            return f"{type(model).__name__} reads prompts without its window"
    if layout.target == layout.draft:
        return "" if layout.target == "ragged" else f"the layout is {layout.target!r}"
    return f"the layout is {layout.target!r}, that of the draft {layout.draft!r}"


def _check_together(call: Call) -> None:
    """Raise ValueError if what a call asks for does not go with how it is decoded."""
    drafter, ids = call.drafter, call.prompt.input_ids
    number, schedule, threshold = call.draft_settings
    message = f"num_assistant_tokens={number!r} is not an int of 1 or more; give one, or leave it out for 'auto'."
    off = call.strategy.num_draft_tokens == 0  # of a queue, which then has rounds without candidates
    require(off or number is None or (is_int(number) and number >= 1), message)
    one_of("num_assistant_tokens_schedule", schedule, SCHEDULES)
    message = (
        f"assistant_confidence_threshold={threshold!r} is no probability; give a number from 0 (never stop) to 1."
    )
    require(isinstance(threshold, float | int) and 0 <= threshold <= 1, message)
    if call.seeds is not None:
        by_windows = call.prompt.model.config.model_type == "whisper"
        check_seeds(call.seeds, len(ids), call.verification, call.layout.lockstep, call.queue is not None, by_windows)
    if call.fallback_reason:
        return
    why = why_no_noise(ids.device, call.verification)  # of a queue, and of seeds in lockstep
    require(not why, f"{why}.")
    if call.strategy.compile:
        ranks = call.synced_gpus or call.tensor_parallel
        check_compile(call.prompt.model, call.layout.target, call.layout.reason, ranks)
        if drafter.model is not None and not drafter.has_other_tokenizer:  # whose queries have any length
            check_compile(drafter.model, call.layout.draft, "its best for a draft", ranks)
    if call.synced_gpus:
        check_synced(call.draft_settings, drafter)
