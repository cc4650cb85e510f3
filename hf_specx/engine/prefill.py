"""Read the prompts with both models, and put together what the loop works with, its schedule included."""

from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import LogitsProcessor

from hf_specx.common.batch import Sequences
from hf_specx.drafting.candidates import Drafter, ForeignCandidateGenerator, SampledCandidateGenerator
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.draft_length import FIXED_DRAFT_TOKENS
from hf_specx.drafting.schedule import Auto, Drafting, Schedule
from hf_specx.layouts.choose import make_decoder
from hf_specx.layouts.decoder import Decoder, Prompt, vocabulary
from hf_specx.layouts.guidance import guide, is_guidance
from hf_specx.layouts.prompts import draft_prompt
from hf_specx.sampling.processors import Processor, Processors, can_look_ahead
from hf_specx.sampling.rules import CoupledRule, GreedyRule, RejectionRule, Rule
from hf_specx.sampling.stopping import Stopping

from .outputs import Outputs
from .plan import Plan
from .report import SpeculationReport
from .settle import Run
from .streaming import Stream


def stateful_processors(processors: Sequence[LogitsProcessor], prompt: Prompt) -> list[LogitsProcessor]:
    """Those that have to be called in order."""
    return [p for p in processors if not (can_look_ahead(p) or is_guidance(p, prompt))]


def prefill(
    prompt: Prompt,
    inputs_tensor: torch.Tensor | None,
    plan: Plan,
    draft_model: PreTrainedModel | CandidateGenerator,
    processors: Sequence[LogitsProcessor],
    stopping: Stopping,
    stream: Stream,
    report: SpeculationReport,
    seeds: list[int] | None,
) -> Run:
    """Everything up to the first token.

    Args:
        prompt: the target's.
        inputs_tensor: what the target's encoder has read, before rows were repeated.
        plan: how the call is decoded.
        draft_model, processors, stopping, stream, report, seeds: of the call.
    """
    sequences = make_sequences(prompt)
    stream.prompt(sequences)
    target = make_decoder(plan.layout, prompt, compiled=plan.compiled)
    own = draft_prompt(draft_model, prompt, inputs_tensor) if isinstance(draft_model, PreTrainedModel) else None
    target.read()
    rule = _rule(plan.verification, prompt.input_ids, seeds)  # takes the generator as stock has it here
    limits = (stopping.eos_token_id, stopping.max_new_tokens)
    drafter: Drafter
    if own is None:
        assert isinstance(draft_model, CandidateGenerator)
        drafter = ForeignCandidateGenerator(draft_model, target.after_prompt.shape[-1])
    else:
        decoder = make_decoder(plan.draft_layout, own, vocabulary(own.model), plan.compiled)
        decoder.read()
        of_draft = Processors([p for p in processors if can_look_ahead(p)], *limits)
        drafter = SampledCandidateGenerator(own.model, of_draft, rule, target.after_prompt.shape[-1], decoder=decoder)
    of_target = Processors(_target_processors(processors, prompt, plan.layout), *limits)
    outputs = Outputs(prompt.generation_config, len(prompt.input_ids))
    models = target, drafter, rule, of_target
    return Run(*models, stopping, sequences, report, outputs, stream, plan.lockstep, plan.in_order)


def _target_processors(processors: Sequence[LogitsProcessor], prompt: Prompt, layout: str) -> list[Processor]:
    """All of them, guidance by our own unless one before it has to be called in order."""
    waiting = stateful_processors(processors, prompt)
    first = next((i for i, p in enumerate(processors) if p in waiting), len(processors))
    early = [guide(p, prompt, layout) if is_guidance(p, prompt) else p for p in processors[:first]]
    return [*early, *processors[first:]]


def _rule(verification: str, input_ids: torch.Tensor, seeds: list[int] | None) -> Rule:
    if verification == "greedy":
        return GreedyRule()
    if verification == "coupled":
        return CoupledRule(len(input_ids), input_ids.device, window=0, seeds=seeds)
    return RejectionRule(verification == "block", input_ids.device, seeds)


def make_sequences(prompt: Prompt) -> Sequences:
    """The text of a call, before its first token."""
    decodes = prompt.model.config.is_encoder_decoder
    mask = prompt.kwargs.get("decoder_attention_mask" if decodes else "attention_mask")
    pad = prompt.generation_config._pad_token_tensor
    width = prompt.input_ids.shape[1]
    mask = None if mask is None or width == 0 else mask[:, -width:]
    return Sequences(prompt.input_ids, mask, 0 if pad is None else int(pad))


def draft_decoder(run: Run) -> Decoder | None:
    """The draft's, where it is a model."""
    return run.drafter.decoder if isinstance(run.drafter, SampledCandidateGenerator) else None


def begin_schedule(schedule: Schedule, drafting: Drafting, costs: Costs, run: Run) -> Schedule:
    """What says how many candidates the rounds of a call draft; the costs are measured first if they are needed.

    Args:
        schedule: the strategy's own.
        drafting: what was asked for.
        costs: the strategy's.
        run: the call.
    """
    draft, rows, number = draft_decoder(run), len(run.sequences.rows), drafting.number
    if number is None and not run.fixed and draft is not None and run.stopping.max_new_tokens > 2:
        if rows not in costs.table:
            measure(costs, run.sequences, run.target, draft)
        if drafting == Drafting():
            return Auto(costs, run.report.verification, rows, run.stopping.max_new_tokens, run.lockstep)
        number = costs.best_num_draft_tokens(rows, run.report.verification)
    schedule.begin(drafting, number or FIXED_DRAFT_TOKENS)
    return schedule


def measure(costs: Costs, sequences: Sequences, target: Decoder, draft: Decoder) -> None:
    """Time bare forwards of both models behind the prompts that they have read."""
    costs.measure(len(sequences.rows), partial(target.rehearse, sequences), partial(draft.rehearse, sequences))
