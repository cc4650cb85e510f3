"""Put a `Run` together; nothing is read yet, so that what cannot be done is refused before any forward."""

from collections.abc import Sequence
from functools import partial

import torch
from transformers.generation.logits_process import LogitsProcessor

from hf_specx.common.batch import Batch
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.draft_length import MAX_DRAFT_TOKENS
from hf_specx.drafting.drafter import Drafter, Reading
from hf_specx.drafting.schedule import Schedule, make_schedule
from hf_specx.layouts.choose import make_decoder
from hf_specx.layouts.decoder import vocabulary
from hf_specx.layouts.guidance import guide, is_guidance
from hf_specx.layouts.prompts import Prompt, draft_prompt
from hf_specx.sampling.processors import Processor, Processors, can_look_ahead
from hf_specx.sampling.rules import Rule, make_rule
from hf_specx.sampling.stopping import Stopping

from .dead_ends import DeadEnds
from .outputs import Outputs
from .plan import Call, Plan
from .ranks import Ranks
from .report import SpeculationReport
from .run import Run
from .streaming import Stream


NOISE_WINDOW = 8  # rounds for which the noise of a row is kept under coupled verification


def start(
    call: Call,
    plan: Plan,
    prompt: Prompt,
    inputs_tensor: torch.Tensor | None,
    drafter: Drafter,
    processors: Sequence[LogitsProcessor],
    stopping: Stopping,
    costs: Costs,
    earlier: Schedule | None,
) -> Run:
    """Everything up to the first forward.

    Args:
        call, plan: what was asked for, and how it is decoded; `prompt`: the target's.
        inputs_tensor: input of the target's encoder, before rows were repeated; None without an encoder.
        drafter, processors, stopping: of the call, as `generate` prepared them.
        costs: what "auto" goes by, measured if there are none for this batch; `earlier`: schedule of the call before.
    """
    limits = (stopping.eos_token_id, stopping.max_new_tokens)
    reading = Reading(
        batch=make_batch(prompt, plan.lockstep),
        vocab_size=vocabulary(prompt.model),
        rule=_rule(call, plan, prompt, drafter.max_candidates),
        processors=Processors([p for p in processors if can_look_ahead(p)], *limits),
        threshold=call.drafting.threshold,
        prompt=None if drafter.model is None else draft_prompt(drafter.model, prompt, inputs_tensor),
        layout=plan.draft_layout,
        compiled=plan.compiled,
        costs=costs,
        number=call.drafting.number,
    )
    target = make_decoder(plan.layout, prompt, compiled=plan.compiled)
    of_target = Processors(_target_processors(processors, prompt, plan.layout), *limits)
    return Run(
        target=target,
        drafter=drafter,
        rule=reading.rule,
        processors=of_target,
        stopping=stopping,
        batch=reading.batch,
        report=SpeculationReport(plan.verification, plan.layout, plan.reason, len(prompt.input_ids), costs=costs),
        outputs=Outputs(prompt.generation_config, len(prompt.input_ids), target.notes),
        stream=Stream(call.streamer, call.stream_by, stopping),
        ranks=Ranks(call.synced, prompt.input_ids.device),
        dead_ends=DeadEnds(of_target, stopping),
        reading=reading,
        make_schedule=partial(_schedule, call, plan, costs, earlier),
        listeners=call.listeners,
    )


def _rule(call: Call, plan: Plan, prompt: Prompt, most: int | None) -> Rule:
    window = NOISE_WINDOW * (1 + (call.drafting.number or most or MAX_DRAFT_TOKENS))
    return make_rule(plan.verification, prompt.input_ids, window, call.seeds)


def stateful_processors(processors: Sequence[LogitsProcessor], prompt: Prompt) -> list[LogitsProcessor]:
    """Those that must be shown each emitted token once, in order."""
    return [p for p in processors if not (can_look_ahead(p) or is_guidance(p, prompt))]


def _target_processors(processors: Sequence[LogitsProcessor], prompt: Prompt, layout: str) -> list[Processor]:
    """All of them, with guidance replaced by our own unless a stateful one comes before it."""
    waiting = stateful_processors(processors, prompt)
    first = next((i for i, p in enumerate(processors) if p in waiting), len(processors))
    early = [guide(p, prompt, layout) if is_guidance(p, prompt) else p for p in processors[:first]]
    return [*early, *processors[first:]]


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
    varies = not call.synced and not (call.seeds is not None and plan.verification in ("token", "block"))
    known = None
    if call.drafting.number is None and varies and run.stopping.max_new_tokens > 2:
        step = run.drafter.cost(run.batch)
        if step is not None:
            costs.measure_once(len(run.batch.rows), partial(run.target.rehearse, run.batch), step)
            known = costs
    room = None if call.synced else run.stopping.max_new_tokens
    most, earlier = run.drafter.max_candidates, None if call.seeds else earlier  # rows with seeds stand alone
    return make_schedule(call.drafting, known, plan.verification, run.batch, room, earlier, most)
