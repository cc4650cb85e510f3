"""Put a `Run` together; nothing is read yet, so that what cannot be done is refused before any forward."""

from collections.abc import Callable
from functools import partial
from typing import Any

from hf_specx.common.architectures import vocabulary
from hf_specx.common.batch import Batch
from hf_specx.drafting.costs import Costs, Pace
from hf_specx.drafting.draft_length import MAX_DRAFT_TOKENS
from hf_specx.drafting.drafter import Drafter, Reading
from hf_specx.drafting.forced import ForcedDrafter
from hf_specx.drafting.forward_times import assumed_times, size_of
from hf_specx.drafting.schedule import Schedule, make_schedule
from hf_specx.models.choose import make_decoder
from hf_specx.models.guidance import guide
from hf_specx.models.prompts import Prompt, draft_prompt
from hf_specx.sampling.processors import Processors, can_look_ahead
from hf_specx.sampling.rules import Rule, make_rule

from .call import Call
from .dead_ends import DeadEnds
from .outputs import Outputs
from .ranks import Agreed, OneNumber, Ranks, any_rank
from .report import SpeculationReport
from .run import Run
from .streaming import Stream


KEPT_ROUNDS = 256  # of each row, in the report of a queue that may have no end
NOISE_WINDOW = 8  # rounds for which the noise of a row is kept under coupled verification


def start(call: Call, costs: Costs) -> Run:
    """Everything up to the first forward.

    Args:
        call: what was asked for.
        costs: what "auto" goes by.
    """
    prompt, options = call.prompt, call.options
    of_target, of_draft = _processors(call)
    reading = _reading(call, of_draft, costs)
    described = call.verification, call.layout.target, call.layout.reason, len(prompt.input_ids)
    keeps = None if call.queue is None else KEPT_ROUNDS
    return Run(
        call=call,
        target=reading.target,
        drafter=_with_forced(call.drafter, reading, call.queue is not None),
        rule=reading.rule,
        processors=of_target,
        batch=reading.batch,
        report=SpeculationReport(*described, costs=costs, keeps=keeps, matching=call.drafter.matching),
        outputs=Outputs(prompt.generation_config, len(prompt.input_ids)),
        stream=Stream(options.streamer, options.stream_by, call.stopping),
        ranks=Ranks(call.synced, prompt.input_ids.device),
        dead_ends=DeadEnds(of_target, call.stopping),
        reading=reading,
        make_schedule=partial(_schedule, costs),
    )


def _reading(call: Call, processors: Processors, costs: Costs) -> Reading:
    """What the drafter is told of the call, with the decoder of the target."""
    prompt, model = call.prompt, None if call.drafter.own_text else call.drafter.model
    return Reading(
        batch=make_batch(prompt, call.layout.lockstep),
        target=make_decoder(call.layout.target, prompt, compiled=call.options.compile),
        vocab_size=vocabulary(prompt.model),
        rule=_rule(call),
        processors=processors,
        threshold=call.drafting.threshold,
        prompt=None if model is None else draft_prompt(model, prompt, call.given.inputs_tensor),
        layout=call.layout.draft,
        compiled=call.options.compile,
        forces=not (call.synced or call.options.compile),
        # a draft that goes by times would differ from rank to rank
        pace=Pace(None if call.shared else costs, call.verification in ("greedy", "coupled")),
        number=call.drafting.number,
        alpha=None if call.shared else costs.alpha.get(call.verification),
    )


def _with_forced(drafter: Drafter, reading: Reading, queued: bool) -> Drafter:
    """A drafter that adds forced tokens, if there may be any; a draft model's own adds them itself."""
    masks = queued or reading.processors.mask_size > 0  # requests that come later may have some
    if drafter.has_probs or not reading.forces or not masks:
        return drafter
    return ForcedDrafter(drafter)


def _processors(call: Call) -> tuple[Processors, Processors]:
    """Those of the target, and those of the draft."""
    if call.queue is not None:
        return call.queue.processors(), call.queue.processors(look_ahead=True)
    prompt, ends = call.prompt, call.stopping.eos_token_id
    of_draft = Processors([processor for processor in call.processors if can_look_ahead(processor)], ends)
    layout = call.layout.target
    own = [p if can_look_ahead(p) else guide(p, prompt, layout) for p in call.processors]
    return Processors(own, ends, of_draft.memory), of_draft


def _rule(call: Call) -> Rule:
    most = call.drafting.number or call.drafter.max_candidates or MAX_DRAFT_TOKENS
    return make_rule(call.verification, call.prompt.input_ids, NOISE_WINDOW * (1 + most), call.seeds)


def make_batch(prompt: Prompt, lockstep: bool = False) -> Batch:
    """The text of a call, before its first token."""
    decodes = prompt.model.config.is_encoder_decoder
    mask = prompt.kwargs.get("decoder_attention_mask" if decodes else "attention_mask")
    pad = prompt.generation_config._pad_token_tensor
    width = prompt.input_ids.shape[1]
    mask = None if mask is None or width == 0 else mask[:, -width:]
    limits = [prompt.max_new_tokens] * len(prompt.input_ids) if prompt.limits is None else prompt.limits
    return Batch(prompt.input_ids, mask, 0 if pad is None else int(pad), lockstep, limits)


def _schedule(costs: Costs, run: Run) -> Schedule:
    """The schedule of a call; costs that it needs are measured first."""
    call, stopping = run.call, run.stopping
    alone = call.seeds is not None if call.queue is None else any(entry.seeded for entry in call.queue.entries)
    varies = not (alone and call.verification in ("token", "block"))
    pace = None
    if call.drafting.number is None and varies and (call.synced or stopping.max_new_tokens > 2):
        step = run.drafter.cost(run.batch)
        if step is not None:
            _measure(costs, run, step)
            pace = Pace(costs, call.verification in ("greedy", "coupled")) if call.shared else run.reading.pace
    device, alike = run.batch.ids.device, call.synced and pace is None
    number, most = call.drafting.number or run.drafter.max_candidates, run.processors.max_rollback
    schedule = make_schedule(number, pace, call.verification, run.batch, run.processors, alike)
    if most < (number or MAX_DRAFT_TOKENS):
        told = f"{run.processors.limited_by} takes back {most} tokens at most"
        run.report.limit_reason = f"no row has more than {most} candidates: {told}"
    if call.synced and pace is not None:
        return OneNumber(schedule, device)
    return Agreed(schedule, device) if call.shared else schedule


def _measure(costs: Costs, run: Run, step: Callable[[int], object]) -> None:
    """Have times of this batch size: assumed, or measured once; ranks that keep step measure together."""
    rows, forward = len(run.batch.rows), partial(run.target.rehearse, run.batch)
    if not run.call.synced:
        costs.prepare(rows, forward, step, None if costs.knows(rows) else _prior(run))
    elif any_rank(rows not in costs.table, run.batch.ids.device):
        costs.measure(rows, forward, step)


def _prior(run: Run) -> dict[str, Any] | None:
    """What forwards are assumed to cost; None where only timing tells, or all ranks have to run the same forwards."""
    if run.call.shared or run.call.options.compile:
        return None
    target, draft = size_of(run.target.model), run.drafter.size()
    if target is None or draft is None:
        return None
    return assumed_times(target, draft, len(run.batch.rows), run.batch.ids.device)


def calibrate(run: Run, costs: Costs) -> None:
    """Time bare forwards of both models after a prompt, and put the times into `costs`."""
    run.target.read()
    run.drafter.read(run.reading)
    step = run.drafter.cost(run.batch) or (lambda _: None)
    costs.measure(len(run.batch.rows), partial(run.target.rehearse, run.batch), step)
