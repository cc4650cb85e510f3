"""What decodes one call: put together before anything is read, so that refusals come before any forward."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hf_specx.common.batch import Batch
from hf_specx.common.round import Listener, Round
from hf_specx.drafting.costs import Costs, RoundTimer
from hf_specx.drafting.draft_length import FIXED_DRAFT_TOKENS, MAX_DRAFT_TOKENS
from hf_specx.drafting.drafter import DraftContext
from hf_specx.drafting.forward_times import assumed_times, size_of
from hf_specx.drafting.schedule import Auto, Schedule
from hf_specx.drafting.several import SeveralDrafts
from hf_specx.models.choose import make_runner
from hf_specx.models.guidance import Guidance, guide
from hf_specx.models.prompts import Prompt, draft_prompt
from hf_specx.models.runner import ModelRunner
from hf_specx.models.self_check import tokens_of_a_round
from hf_specx.models.slots import write_user_cache
from hf_specx.sampling.per_request import RequestProcessors
from hf_specx.sampling.processors import NO_LIMIT, Processors, RoundProcessor, can_look_ahead
from hf_specx.sampling.verifiers import make_verifier

from .call import Call
from .outputs import Outputs, Stream
from .queue import KEPT_ROUNDS, RequestQueue
from .ranks import any_rank, of_first_rank
from .report import SpeculationReport


NOISE_WINDOW = 8  # rounds for which the noise of a row is kept under coupled verification


class Run:
    """The decoding of one call; "auto" goes by `costs`.

    Attributes:
        batch: the text; `finished` says whether all of its rows have ended.
        target, verifier, drafter, schedule: what the loop asks in each round.
        processors: the target's; `draft_processors`, the draft's, are without those that keep state.
        report, outputs, stream: what the caller gets; the latter two are None where they are not asked for.
    """

    schedule: Schedule

    def __init__(self, call: Call, costs: Costs, target: ModelRunner | None = None):
        """A `target` that is given has read the prompts."""
        prompt, options, rows = call.prompt, call.options, len(call.prompt.input_ids)
        self.call, self.costs, self.stopping = call, costs, call.stopping
        self.batch, self.finished = make_batch(prompt, call.layout.lockstep, call.queue), False
        self.has_read = target is not None
        self.target = target or make_runner(call.layout.target, prompt, compiled=options.compile)
        self.processors, self.draft_processors = self._processors()
        most = call.drafting.number or call.drafter.max_candidates or MAX_DRAFT_TOKENS
        self.verifier = make_verifier(call.verification, prompt.input_ids, NOISE_WINDOW * (1 + most), call.seeds)
        # a draft that goes by times would differ from rank to rank
        self.round_timer = RoundTimer(None if call.shared else costs, call.verification in ("greedy", "coupled"))
        model = None if call.drafter.own_text else call.drafter.model
        self.draft_prompt = None if model is None else draft_prompt(model, prompt)
        # all ranks need the same numbers, and so do compiled forwards
        self.forces, self.drafter = not (call.synced or options.compile), call.drafter
        masks = call.queue is not None or self.draft_processors.mask_size > 0  # later requests may have some
        if self.forces and masks and not (self.drafter.has_probs or self.drafter.parts):
            self.drafter = SeveralDrafts([self.drafter])  # which adds forced tokens, as that of a model does itself
        back, told = self.processors.max_rollback, ""
        if back < most:
            told = f"no row has more than {back} candidates: {self.processors.limited_by}"
        described = call.verification, call.layout.target, call.layout.reason, rows, told
        keeps = None if call.queue is None else KEPT_ROUNDS
        self.report = SpeculationReport(*described, costs=costs, keeps=keeps, matching=call.drafter.matching)
        config = prompt.generation_config
        self.outputs = Outputs(config, rows) if config.return_dict_in_generate else None
        self.stream = None if options.streamer is None else Stream(call)
        self.listeners: list[Listener] = [self.report]
        for listener in (self.outputs, self.stream, *options.listeners, call.queue):
            if listener is not None:
                self.listeners.append(listener)
        self.started = self.lapped = time.perf_counter()

    def _processors(self) -> tuple[Processors, Processors]:
        """Those of the target, and those of the draft, which is not guided."""
        call, ends = self.call, self.stopping.ends
        alone = [p for p in call.processors if can_look_ahead(p)]
        fits = tokens_of_a_round(call.prompt.model)
        limit = NO_LIMIT if fits is None else (fits - 1, f"the target's experts take {fits} tokens of a row at once")
        of_draft = Processors(alone, ends, limit) if call.queue is None else call.queue.processors(limit)
        if call.queue is not None or len(alone) == len(call.processors):
            return of_draft, of_draft
        own = [p if can_look_ahead(p) else guide(p, call.prompt, call.layout.target) for p in call.processors]
        return Processors(own, ends, limit), of_draft

    def begin(self) -> None:
        """Read the prompts, and decide how many candidates to draft."""
        call = self.call
        if self.stream is not None:
            self.stream.prompt(self.batch)
        if not self.has_read:
            self.target.prefill()
        self.verifier.begin()  # `generate` draws its first random number after this forward
        context = DraftContext(
            batch=self.batch,
            target=self.target,
            vocab_size=self.target.prompt_logits.shape[-1],
            verifier=self.verifier,
            processors=self.draft_processors,
            threshold=call.drafting.threshold,
            prompt=self.draft_prompt,
            layout=call.layout.draft,
            compiled=call.options.compile,
            forces=self.forces,
            round_timer=self.round_timer,
            number=call.drafting.number,
            alpha=None if call.shared else self.costs.alpha.get(call.verification),
        )
        self.drafter.start(context)
        self.schedule = self._make_schedule()
        self.lapped = time.perf_counter()

    def _make_schedule(self) -> Schedule:
        """How many candidates rows draft; costs that this needs are measured first."""
        call, batch, drafter, round_timer = self.call, self.batch, self.drafter, None
        alone = call.seeds is not None if call.queue is None else any(entry.seeded for entry in call.queue.entries)
        fixed = call.drafting.number is not None or (alone and call.verification in ("token", "block"))
        # other ranks, and requests that come later, may have longer texts
        if not fixed and (call.synced or call.queue is not None or self.stopping.max_new_tokens > 2):
            step = drafter.cost(batch)
            if step is not None:
                self._measure(step)
                round_timer = RoundTimer(self.costs, self.round_timer.online) if call.shared else self.round_timer
        given: dict[str, Any] = {"alike": call.synced, "processors": self.processors}
        if round_timer is not None and (call.synced or call.shared):
            given["agree"] = partial(of_first_rank, device=batch.ids.device)
        number = drafter.max_candidates if call.drafting.number is None else call.drafting.number
        if number is not None or round_timer is None:
            return Schedule(FIXED_DRAFT_TOKENS if number is None else number, round_timer, **given)
        return Auto(round_timer, call.verification, batch, call.options.compile, **given)

    def _measure(self, step: Callable[[int], object]) -> None:
        """Have times of this batch size: assumed, or measured once; ranks that keep step measure together."""
        call, costs, rows = self.call, self.costs, len(self.batch.rows)
        forward, device = partial(self.target.rehearse, self.batch), self.batch.ids.device
        if call.synced:
            if any_rank(rows not in costs.table, device):
                costs.measure(rows, forward, step)
            return
        assumed = costs.table[rows] if rows in costs.assumed else None
        # what is shared or compiled only timing tells
        if assumed is None and not (costs.knows(rows) or call.shared or call.options.compile):
            target, draft = size_of(self.target.model), self.drafter.size()
            assumed = None if target is None or draft is None else assumed_times(target, draft, rows, device)
        costs.prepare(rows, forward, step, assumed)

    def calibrate(self) -> None:
        """Time bare forwards of both models after the prompts, and put the times into the costs."""
        self.begin()
        step = self.drafter.cost(self.batch) or (lambda _: None)
        self.costs.measure(len(self.batch.rows), partial(self.target.rehearse, self.batch), step)

    def active(self) -> bool:
        """Whether some row goes on; while only other ranks have such rows, forwards are run here to keep step."""
        while self.call.synced and any_rank(not self.finished, self.batch.ids.device):
            if not self.finished:
                return True
            self.idle()
        return not self.finished

    def idle(self) -> None:
        """Run the forwards of a round on a copy of the finished text, whose last rows are still in the caches."""
        batch = self.batch.until(self.batch.counts)  # whose ends follow cuts of the rows
        batch.ids = batch.ids.clone()
        draft = batch.take(self.drafter.propose(batch, self.schedule(batch)))
        self.processors(batch, draft, self.target(batch, draft).logits)  # guidance has a forward as well

    def publish(self, done: Round) -> None:
        """Tell those of a round who only look on. Where there is no next token, the call fails, or a request alone."""
        for row, error in self.stopping.dead(done, self.processors.barred).items():
            if self.call.queue is None or not self.call.queue.entries[row].has_processors:
                raise error
            self.stopping.stopped_at.setdefault(row, done.batch.counts[row])
            done.ended = sorted({*done.ended, row})
        for listener in self.listeners:
            listener.observe(done)

    def admit(self, done: Round) -> None:
        """Let rows that ended leave, or read the prompts of the next requests in their places."""
        queue = self.call.queue if self.call.layout.refills else None
        coming = {} if queue is None else queue.followers(self.batch, done.ended)
        leaving = [row for row in done.ended if row not in coming]
        self.finished = len(leaving) == len(done.rows)  # the last rows to end stay in the batch
        stay = None if self.finished else self.batch.retire(leaving)
        done = replace(done, stay=stay, finished=self.finished)
        if self.target.is_half_idle:  # what a round takes is not what one of so many rows would
            self.round_timer.skip()
        guides = [processor.runner for processor in self.processors.applied if isinstance(processor, Guidance)]
        told: list[Listener] = [self.schedule, self.drafter, *guides, self.target]
        for listener in told:
            listener.observe(done)
        self.lap("verify")
        if queue is not None:
            queue.admit(self.batch, coming)  # only now: they were told of the text before
        for row, entry in coming.items():
            self.verifier.admit(row, entry.seed)
            assert isinstance(self.processors, RequestProcessors)
            self.processors.admit(row, entry.processors, entry.alike)
            self.schedule.admit(row, entry.seeded and self.call.verification in ("token", "block"))
        if coming:
            self.target.admit(self.batch, list(coming))
            self.drafter.admit(self.batch, list(coming))
            self.lap("read")

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase of the report."""
        now = time.perf_counter()
        self.report.seconds[phase] = self.report.seconds.get(phase, 0.0) + now - self.lapped
        self.lapped = now

    def finish(self) -> None:
        """End the call, and remember what it has shown."""
        columns, report, draft = self.stopping.columns, self.report, self.drafter.runner
        self.verifier.finish(columns)
        self.schedule.end()
        cut = columns if self.call.queue is None else sys.maxsize  # requests end on their own, one after another
        report.finish(time.perf_counter() - self.started, cut)
        report.misread_reason = self.drafter.misread_reason(self.batch)
        report.compilations, report.copied = self.target.compilations, self.target.reused_tokens
        if getattr(draft, "model", None) is not self.target.model:  # else these were counted
            report.compilations += getattr(draft, "compilations", 0)
        self.costs.remember(report.verification, report.survival_rate, report.survival[1], report.rounds)

    def output(self) -> Any:
        """What `generate` returns: the text [B, L + N], or an output with the report; a user's cache is filled."""
        prompt, columns = self.call.prompt, self.stopping.columns
        text = self.batch.output(columns)
        past = self.target.past_key_values(self.batch, columns) if prompt.keeps_past else None
        if getattr(prompt.past, "_is_user_defined", False):  # it was read alone before
            past = write_user_cache(prompt.past, past)
        if self.outputs is None:
            return text
        return self.outputs.finish(text, columns, past, prompt.model.config.is_encoder_decoder, self.report)


def would_rest(call: Call, costs: Costs) -> bool:
    """Whether "auto" will hardly draft in all of a call: candidates take forwards, and do not pay.

    Not if anything else in it needs rounds, or gets candidates for nothing.
    """
    options, drafter = call.options, call.drafter
    fixed = call.drafting.number is not None or drafter.max_candidates is not None
    apart = call.seeds is not None or call.synced or call.shared
    if fixed or apart or drafter.parts or not drafter.has_probs or options.compile or options.listeners:
        return False
    if any(isinstance(each, RoundProcessor) and each.vocab_size for each in call.processors):
        return False
    return Auto(RoundTimer(costs), call.verification, make_batch(call.prompt, call.layout.lockstep)).is_idle()


def make_batch(prompt: Prompt, lockstep: bool = False, queue: RequestQueue | None = None) -> Batch:
    """The text of a call, before its first token."""
    name = "decoder_attention_mask" if prompt.model.config.is_encoder_decoder else "attention_mask"
    mask, width = prompt.kwargs.get(name), prompt.input_ids.shape[1]
    mask = None if mask is None or width == 0 else mask[:, -width:]
    pad = prompt.generation_config._pad_token_tensor
    limits = [prompt.longest] * len(prompt.input_ids) if queue is None else [entry.limit for entry in queue.entries]
    return Batch(prompt.input_ids, mask, 0 if pad is None else int(pad), lockstep, limits)
