"""What decodes one call: put together before anything is read, so that refusals come before any forward."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hf_specx.common.batch import Batch, Row
from hf_specx.common.drafts import FIXED_DRAFT_TOKENS
from hf_specx.common.round import Listener, Round
from hf_specx.drafting.auto import MAX_DRAFT_TOKENS, Auto, Costs, RoundTimer
from hf_specx.drafting.drafter import DraftContext
from hf_specx.drafting.forward_times import assumed_times, size_of
from hf_specx.drafting.schedule import Schedule
from hf_specx.drafting.several import SeveralDrafts
from hf_specx.models.choose import make_runner
from hf_specx.models.prompts import draft_prompt
from hf_specx.models.runner import ModelRunner
from hf_specx.models.self_check import tokens_of_a_round
from hf_specx.models.slots import write_user_cache
from hf_specx.sampling.per_request import RequestProcessors, RowProcessors
from hf_specx.sampling.processors import NO_LIMIT, Processors, RoundProcessor
from hf_specx.sampling.verifiers import make_verifier

from .call import Call
from .outputs import Outputs, Stream
from .queue import KEPT_ROUNDS
from .ranks import any_rank, of_first_rank
from .report import SpeculationReport
from .requests import Entry


REJECTION = ("token", "block")  # where the number of a row's candidates decides what is drawn for it
NOISE_WINDOW = 8  # rounds for which the noise of a row is kept under coupled verification


class Run:
    """The decoding of one call; "auto" goes by `costs`.

    Attributes:
        batch: the text; `finished` says whether all of its rows have ended.
        target, verifier, drafter, schedule: what the loop asks in each round.
        processors: of the target and of the draft.
        report, outputs, stream: what the caller gets; the latter two are None where they are not asked for.
    """

    schedule: Schedule

    def __init__(self, call: Call, costs: Costs, target: ModelRunner | None = None):
        """A `target` that is given has read the prompts."""
        prompt, options, rows = call.prompt, call.options, len(call.prompt.input_ids)
        self.call, self.costs, self.stopping = call, costs, call.stopping
        self.batch, self.finished = make_batch(call), False
        self.has_read = target is not None
        self.target = target or make_runner(call.layout.target, prompt, compiled=options.compile)
        self.processors = self._make_processors()
        most = call.drafting.number or call.drafter.max_candidates or MAX_DRAFT_TOKENS
        window = NOISE_WINDOW * (1 + most)
        self.verifier = make_verifier(call.verification, prompt.input_ids, window, seeded=call.seeds is not None)
        # a draft that goes by times would differ from rank to rank
        self.round_timer = RoundTimer(None if call.shared else costs, call.verification in ("greedy", "coupled"))
        model = None if call.drafter.own_text else call.drafter.model
        self.draft_prompt = None if model is None else draft_prompt(model, prompt)
        # all ranks need the same numbers, and so do compiled forwards
        self.forces, self.drafter = not (call.synced or options.compile), call.drafter
        may_have_masks = call.queue is not None or self.processors.mask_size > 0  # later requests may bring some
        if self.forces and may_have_masks and not (self.drafter.has_probs or self.drafter.parts):
            self.drafter = SeveralDrafts([self.drafter])  # which adds forced tokens, as that of a model does itself
        max_rollback, limited_by = self.processors.max_rollback, ""
        if max_rollback < most:
            limited_by = f"no row has more than {max_rollback} candidates: {self.processors.limited_by}"
        self.report = SpeculationReport(
            call.verification,
            call.layout.target,
            call.layout.reason,
            rows,
            limited_by,
            costs=costs,
            keeps=None if call.queue is None else KEPT_ROUNDS,
            matching=call.drafter.matching,
        )
        config = prompt.generation_config
        self.outputs = Outputs(config, rows) if config.return_dict_in_generate else None
        self.stream = None if options.streamer is None else Stream(call)
        self.listeners: list[Listener] = [self.report]
        for listener in (self.outputs, self.stream, *options.listeners, call.queue):
            if listener is not None:
                self.listeners.append(listener)
        self.started = self.lapped = time.perf_counter()

    def _make_processors(self) -> Processors:
        """The processors of the call, or those of a queue's requests."""
        call = self.call
        fits = tokens_of_a_round(call.prompt.model)
        limit = NO_LIMIT if fits is None else (fits - 1, f"the target's experts take {fits} tokens of a row at once")
        if call.measured_candidates is not None and call.measured_candidates < limit[0]:
            limit = call.measured_candidates, "the target was measured with so many"
        if call.queue is not None:
            return RequestProcessors(self.batch.table, self.stopping.eos_token_ids, limit)
        return Processors(call.processors, self.stopping.eos_token_ids, limit)

    def begin(self) -> None:
        """Read the prompts, and decide how many candidates to draft."""
        call = self.call
        if self.stream is not None:
            self.stream.prompt(self.batch)
        if not self.has_read:
            self.target.prefill()
        self.verifier.start()  # `generate` draws its first random number after this forward
        context = DraftContext(
            batch=self.batch,
            target=self.target,
            vocab_size=self.target.prompt_logits.shape[-1],
            verifier=self.verifier,
            processors=self.processors,
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
        fixed = call.drafting.number is not None or any(row.drafts_alone for row in batch.table)
        # other ranks, and requests that come later, may have longer texts
        if not fixed and (call.synced or call.queue is not None or self.stopping.max_new_tokens > 2):
            step = drafter.cost(batch)
            if step is not None:
                self._measure(step)
                round_timer = RoundTimer(self.costs, self.round_timer.online) if call.shared else self.round_timer
        options: dict[str, Any] = {"synced": call.synced, "processors": self.processors}
        if round_timer is not None and (call.synced or call.shared):
            options["agree"] = partial(of_first_rank, device=batch.ids.device)
        number = drafter.max_candidates if call.drafting.number is None else call.drafting.number
        if number is not None or round_timer is None:
            return Schedule(FIXED_DRAFT_TOKENS if number is None else number, round_timer, **options)
        return Auto(round_timer, call.verification, batch, call.options.compile, **options)

    def _measure(self, step: Callable[[int], object]) -> None:
        """Have times of this batch size: assumed, or measured once; ranks that keep step measure together."""
        call, costs, rows = self.call, self.costs, len(self.batch.rows)
        forward, device = partial(self.target.dummy_run, self.batch), self.batch.ids.device
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
        self.costs.measure(len(self.batch.rows), partial(self.target.dummy_run, self.batch), step)

    def active(self) -> bool:
        """Whether some row goes on; while only other ranks have such rows, forwards are run here to keep step."""
        while self.call.synced and any_rank(not self.finished, self.batch.ids.device):
            if not self.finished:
                return True
            self.dummy_round()
        return not self.finished

    def dummy_round(self) -> None:
        """Run the forwards of a round on a copy of the finished text, whose last rows are still in the caches."""
        batch = self.batch.view_at(self.batch.counts)  # whose ends follow cuts of the rows
        batch.ids = batch.ids.clone()
        draft = batch.write_draft(self.drafter.propose(batch, self.schedule(batch)))
        self.target(batch, draft)

    def publish(self, done: Round) -> None:
        """Tell those of a round who only look on. Where there is no next token, the call fails, or a request alone.

        A request that was cancelled ends here.
        """
        for row, error in self.stopping.row_errors(done, self.processors.prefix_errors).items():
            state = done.batch.table[row]
            if state.request is None or not state.request.has_processors:
                raise error
            if state.stopped_at is None:
                state.stopped_at = done.batch.counts[row]
            done.ended = sorted({*done.ended, row})
        for row in done.rows if self.call.queue is not None else ():
            state = done.batch.table[row]
            if row not in done.ended and state.request.is_cancelled():
                state.stopped_at = done.batch.counts[row]
                done.ended = sorted({*done.ended, row})
        for listener in self.listeners:
            listener.observe(done)

    def admit(self, done: Round) -> None:
        """Let rows that ended leave, or put the next requests in their places, and in those that are free."""
        call, batch = self.call, self.batch
        entries: dict[int, Entry] = {}  # what comes in the place of each of these rows
        if call.queue is not None and call.layout.refills:
            entries = call.queue.next_requests(batch, done.ended)
        leaving = [row for row in done.ended if row not in entries]
        self.finished = len(leaving) == len(done.rows)  # the last rows to end stay in the batch
        stay = None if self.finished else batch.drop_rows(leaving)
        done = replace(done, stay=stay, finished=self.finished)
        if self.target.is_half_idle:  # what a round takes is not what one of so many rows would
            self.round_timer.skip()
        listeners: list[Listener] = [self.schedule, self.drafter, self.target]
        for listener in listeners:
            listener.observe(done)
        self.lap("verify")
        if not entries:
            return
        if not entries.keys() <= set(batch.rows):
            before = batch.seat_rows(sorted({*batch.rows, *entries}))
            self.target.seat_rows(batch, before)
            self.drafter.seat_rows(batch, before)
        for row, entry in entries.items():  # only now, since all were told of the text before
            batch.admit(row, request_row(call, entry, is_refill=True), entry.input_ids)
        rows = list(entries)
        self.schedule.admit(batch, rows)
        self.target.admit(batch, rows)
        self.drafter.admit(batch, rows)
        self.lap("read")

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase of the report."""
        now = time.perf_counter()
        self.report.seconds[phase] = self.report.seconds.get(phase, 0.0) + now - self.lapped
        self.lapped = now

    def finish(self) -> None:
        """End the call, and remember what it has shown."""
        columns, report, draft = self.stopping.columns(self.batch), self.report, self.drafter.runner
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
        prompt, columns = self.call.prompt, self.stopping.columns(self.batch)
        text = self.batch.output(columns)
        past = self.target.past_key_values(self.batch, columns) if prompt.keeps_past else None
        if getattr(prompt.past, "_is_user_defined", False):  # it was read alone before
            past = write_user_cache(prompt.past, past)
        if self.outputs is None:
            return text
        return self.outputs.finish(text, columns, past, prompt.model.config.is_encoder_decoder, self.report)


def would_not_draft(call: Call, costs: Costs) -> bool:
    """Whether "auto" will hardly draft in all of a call: candidates take forwards, and do not pay.

    Not if anything else in it needs rounds, or gets candidates for nothing.
    """
    options, drafter = call.options, call.drafter
    fixed = call.drafting.number is not None or drafter.max_candidates is not None
    needs_rounds = call.seeds is not None or call.synced or call.shared
    if fixed or needs_rounds or drafter.parts or not drafter.has_probs or options.compile or options.listeners:
        return False
    if any(isinstance(each, RoundProcessor) and each.vocab_size for each in call.processors):
        return False
    return Auto(RoundTimer(costs), call.verification, make_batch(call)).is_idle()


def make_batch(call: Call) -> Batch:
    """The text of a call before its first token, with a `Row` for each prompt."""
    prompt = call.prompt
    width = prompt.input_ids.shape[1]
    name = "decoder_attention_mask" if prompt.model.config.is_encoder_decoder else "attention_mask"
    mask = prompt.kwargs.get(name)
    mask = None if mask is None or width == 0 else mask[:, -width:]
    pad = prompt.generation_config._pad_token_tensor
    if call.queue is None:
        seeds: Sequence[int | None] = call.seeds or [None] * len(prompt.input_ids)
        drafts_alone = call.seeds is not None and call.verification in REJECTION
        table = [Row(limit=prompt.longest, seed=seed, drafts_alone=drafts_alone) for seed in seeds]
    else:
        table = [request_row(call, entry) for entry in call.queue.entries]
    return Batch(prompt.input_ids, mask, 0 if pad is None else int(pad), call.layout.lockstep, table)


def request_row(call: Call, entry: Entry, is_refill: bool = False) -> Row:
    """The row of a request, as it begins."""
    return Row(
        limit=entry.limit,
        greedy=entry.greedy,
        seed=entry.seed,
        drafts_alone=entry.seeded and call.verification in REJECTION,
        is_refill=is_refill,
        processors=RowProcessors(entry.processors, entry.stopping.eos_token_ids),
        stopping=entry.stopping,
        request=entry,
    )
