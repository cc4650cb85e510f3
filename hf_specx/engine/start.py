"""Put a `Run` together; nothing is read yet, so that what cannot be done is refused before any forward."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_specx.common.architectures import vocabulary
from hf_specx.common.batch import Batch
from hf_specx.drafting.drafter import Drafter, Reading
from hf_specx.drafting.forced import ForcedDrafter
from hf_specx.layouts.choose import make_decoder
from hf_specx.layouts.guidance import guide, is_guidance
from hf_specx.layouts.prompts import Prompt, draft_prompt
from hf_specx.sampling.grammars import masked
from hf_specx.sampling.processors import Processor, Processors, can_look_ahead
from hf_specx.sampling.rules import Rule, make_rule
from hf_specx.sampling.stopping import Stopping
from hf_specx.scheduling.costs import Costs
from hf_specx.scheduling.draft_length import MAX_DRAFT_TOKENS
from hf_specx.scheduling.prior import assumed_times, size_of
from hf_specx.scheduling.schedule import Schedule, make_schedule

from .dead_ends import DeadEnds
from .outputs import Outputs
from .places import Places
from .plan import Call, Plan, make_plan
from .ranks import Agreed, OneNumber, Ranks, any_rank
from .report import SpeculationReport
from .run import Run
from .streaming import Stream


KEPT_ROUNDS = 256  # of each row, in the report of a queue that may have no end
NOISE_WINDOW = 8  # rounds for which the noise of a row is kept under coupled verification


def start(
    call: Call,
    plan: Plan,
    prompt: Prompt,
    inputs_tensor: torch.Tensor | None,
    drafter: Drafter,
    processors: Sequence[Processor],
    stopping: Stopping,
    costs: Costs,
    earlier: Schedule | None,
    places: Places | None = None,
) -> Run:
    """Everything up to the first forward.

    Args:
        call, plan: what was asked for, and how it is decoded; `prompt`: the target's.
        inputs_tensor: input of the target's encoder, before rows were repeated; None without an encoder.
        drafter, processors, stopping: of the call, as prepared; `places`: of requests with their own.
        costs: what "auto" goes by; `earlier`: schedule of the call before.
    """
    of_target, of_draft = _processors(processors, prompt, plan.layout, stopping, places)
    described = plan.verification, plan.layout, plan.reason, len(prompt.input_ids)
    reading = _reading(call, plan, prompt, inputs_tensor, drafter, of_draft, costs)
    return Run(
        target=reading.target,
        drafter=_with_forced(drafter, reading, places),
        rule=reading.rule,
        processors=of_target,
        stopping=stopping,
        batch=reading.batch,
        report=SpeculationReport(
            *described,
            costs=costs,
            keeps=None if places is None else KEPT_ROUNDS,
            matching=drafter.matching,
        ),
        outputs=Outputs(prompt.generation_config, len(prompt.input_ids)),
        stream=Stream(call.streamer, call.stream_by, stopping),
        ranks=Ranks(call.synced, prompt.input_ids.device),
        dead_ends=DeadEnds(of_target, stopping),
        reading=reading,
        make_schedule=partial(_schedule, call, plan, costs, earlier),
        listeners=call.listeners,
        places=places,
    )


def _with_forced(drafter: Drafter, reading: Reading, places: Places | None) -> Drafter:
    """A drafter that adds forced tokens, if there may be any; a draft model's own adds them itself."""
    masks = places is not None or reading.processors.mask_size > 0  # requests that come later may have some
    if drafter.has_probs or not reading.forces or not masks:
        return drafter
    return ForcedDrafter(drafter)


def _reading(
    call: Call,
    plan: Plan,
    prompt: Prompt,
    inputs_tensor: torch.Tensor | None,
    drafter: Drafter,
    processors: Processors,
    costs: Costs,
) -> Reading:
    """What the drafter is told of the call, with the decoder of the target."""
    return Reading(
        batch=make_batch(prompt, plan.lockstep),
        target=make_decoder(plan.layout, prompt, compiled=plan.compiled),
        vocab_size=vocabulary(prompt.model),
        rule=_rule(call, plan, prompt, drafter.max_candidates),
        processors=processors,
        threshold=call.drafting.threshold,
        prompt=None
        if drafter.model is None or drafter.own_text
        else draft_prompt(drafter.model, prompt, inputs_tensor),
        layout=plan.draft_layout,
        compiled=plan.compiled,
        forces=not (call.synced or plan.compiled),
        costs=None if call.shared else costs,  # a draft that goes by times would differ from rank to rank
        number=call.drafting.number,
        alpha=None if call.shared else costs.alpha.get(plan.verification),
    )


def _processors(
    processors: Sequence[Processor], prompt: Prompt, layout: str, stopping: Stopping, places: Places | None
) -> tuple[Processors, Processors]:
    """Those of the target, and those of the draft."""
    if places is not None:
        return places.processors(), places.processors(look_ahead=True)
    limits = (stopping.eos_token_id, stopping.max_new_tokens)
    of_draft = Processors([processor for processor in processors if can_look_ahead(processor)], *limits)
    return Processors(_target_processors(processors, prompt, layout), *limits, of_draft.memory), of_draft


def _rule(call: Call, plan: Plan, prompt: Prompt, most: int | None) -> Rule:
    window = NOISE_WINDOW * (1 + (call.drafting.number or most or MAX_DRAFT_TOKENS))
    return make_rule(plan.verification, prompt.input_ids, window, call.seeds)


def prepare_processors(
    processors: Sequence[LogitsProcessor], prompt: Prompt, stopping: Stopping
) -> tuple[Sequence[Processor], list[str]]:
    """Processors with `TokenMasks` in place of some, and the names of what must be shown each token once, in order."""
    ours = masked(processors, prompt.input_ids, vocabulary(prompt.model), stopping)
    unknown = [p for p in ours if not (can_look_ahead(p) or is_guidance(p, prompt))]
    return ours, [type(p).__name__ for p in unknown] + stopping.stateful


def _target_processors(processors: Sequence[Processor], prompt: Prompt, layout: str) -> list[Processor]:
    """All of them, with guidance replaced by our own."""
    return [guide(p, prompt, layout) if is_guidance(p, prompt) else p for p in processors]


def make_batch(prompt: Prompt, lockstep: bool = False) -> Batch:
    """The text of a call, before its first token."""
    decodes = prompt.model.config.is_encoder_decoder
    mask = prompt.kwargs.get("decoder_attention_mask" if decodes else "attention_mask")
    pad = prompt.generation_config._pad_token_tensor
    width = prompt.input_ids.shape[1]
    mask = None if mask is None or width == 0 else mask[:, -width:]
    return Batch(prompt.input_ids, mask, 0 if pad is None else int(pad), lockstep)


def _schedule(call: Call, plan: Plan, costs: Costs, earlier: Schedule | None, run: Run) -> Schedule:
    """The schedule of a call; costs that it needs are measured first."""
    alone = call.seeds is not None if run.places is None else any(entry.seeded for entry in run.places.entries)
    varies = not (alone and plan.verification in ("token", "block"))
    known = None
    if call.drafting.number is None and varies and (call.synced or run.stopping.max_new_tokens > 2):
        step = run.drafter.cost(run.batch)
        if step is not None:
            _measure(call, plan, costs, run, step)
            known = costs
    rows, device = len(run.batch.rows), run.batch.ids.device
    room = [run.stopping.max_new_tokens] * rows if run.places is None else list(run.places.stopping.limits)
    most, earlier = run.drafter.max_candidates, None if call.seeds else earlier  # rows with seeds stand alone
    fixed = call.synced and known is None
    schedule = make_schedule(
        call.drafting, known, plan.verification, run.batch, None if fixed else room, earlier, most
    )
    schedule.most = run.processors.max_rollback
    if schedule.most < (call.drafting.number or most or MAX_DRAFT_TOKENS):
        told = f"{run.processors.limited_by} takes back {schedule.most} tokens at most"
        run.report.limit_reason = f"no row has more than {schedule.most} candidates: {told}"
    if call.synced and known is not None:
        return OneNumber(schedule, device)
    return Agreed(schedule, device) if call.shared else schedule


def _measure(call: Call, plan: Plan, costs: Costs, run: Run, step: Callable[[int], object]) -> None:
    """Have times of this batch size: assumed, or measured once; ranks that keep step measure together."""
    rows, forward = len(run.batch.rows), partial(run.target.rehearse, run.batch)
    if not call.synced:
        costs.prepare(rows, forward, step, None if costs.knows(rows) else _prior(call, plan, run))
    elif any_rank(rows not in costs.table, run.batch.ids.device):
        costs.measure(rows, forward, step)


def _prior(call: Call, plan: Plan, run: Run) -> dict[str, Any] | None:
    """What forwards are assumed to cost; None where only timing tells, or all ranks have to run the same forwards."""
    if call.shared or plan.compiled:
        return None
    target, draft = size_of(run.target.model), run.drafter.size()
    if target is None or draft is None:
        return None
    return assumed_times(target, draft, len(run.batch.rows), run.batch.ids.device)


def calibrate(call: Call, prompt: Prompt, input_ids: torch.Tensor, drafter: Drafter, costs: Costs) -> None:
    """Time bare forwards of both models after a prompt, made of `input_ids`, and put the times into `costs`."""
    rows, width = prompt.input_ids.shape
    stopping = Stopping(StoppingCriteriaList(), width, width + prompt.max_new_tokens)
    run = start(call, make_plan(call, prompt, drafter), prompt, input_ids, drafter, [], stopping, costs, None)
    run.target.read()
    drafter.read(run.reading)
    step = drafter.cost(run.batch) or (lambda _: None)
    costs.measure(rows, partial(run.target.rehearse, run.batch), step)
