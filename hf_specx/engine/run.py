"""What decodes one call, and what it does around each round."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_specx.common.batch import Batch
from hf_specx.common.round import Listener, Round
from hf_specx.drafting.drafter import Drafter, Reading
from hf_specx.drafting.schedule import Schedule
from hf_specx.models.decoder import Decoder
from hf_specx.models.slots import fill
from hf_specx.sampling.per_request import RequestProcessors
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.rules import Rule
from hf_specx.sampling.stopping import Stopping

from .call import Call
from .dead_ends import DeadEnds
from .outputs import Outputs
from .ranks import Ranks
from .report import SpeculationReport
from .streaming import Stream


@dataclass
class Run:
    """The decoding of one call; nothing is read before `admit`.

    Attributes:
        call: what was asked for.
        target, drafter, rule, processors, batch: see their classes.
        report, outputs, stream: what the caller gets.
        ranks: processes that hold parts of the models.
        dead_ends: raises the error of a row that has no token to choose.
        reading: what the drafter is told of the call; `vocab_size` is that of the target's logits once there are some.
        make_schedule: makes the schedule once both models have read the prompts; it may time their forwards.
        finished: whether all rows have ended.
        started, lapped: when the call and its current phase began.
    """

    call: Call
    target: Decoder
    drafter: Drafter
    rule: Rule
    processors: Processors
    batch: Batch
    report: SpeculationReport
    outputs: Outputs
    stream: Stream
    ranks: Ranks
    dead_ends: DeadEnds
    reading: Reading
    make_schedule: Callable[["Run"], Schedule]
    finished: bool = False
    schedule: Schedule = field(init=False)
    lapped: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def stopping(self) -> Stopping:
        """When rows end."""
        return self.call.stopping

    def begin(self) -> None:
        """Read the prompts with both models."""
        self.stream.prompt(self.batch)
        self.target.read()
        self.rule.begin()  # `generate` draws its first random number after this forward
        self.reading.vocab_size = self.target.after_prompt.shape[-1]
        self.drafter.read(self.reading)
        self.schedule = self.make_schedule(self)
        self.lapped = time.perf_counter()

    def admit(self, done: Round) -> None:
        """Let rows that ended leave, or read the prompts of the next requests in their places."""
        coming = self.call.queue.admit(self.batch, done.ended) if self.call.queue and self.call.layout.refills else {}
        leaving = [row for row in done.ended if row not in coming]
        self.finished = len(leaving) == len(done.rows)  # the last rows to end stay in the batch
        stay = None if self.finished else self.batch.retire(leaving)
        done = replace(done, stay=stay, finished=self.finished)
        told: list[Listener] = [self.schedule, self.drafter, self.processors, self.target]
        for listener in told:
            listener.observe(done)
        self.lap("verify")
        for row, entry in coming.items():
            self.rule.admit(row, entry.seed)
            for processors in (self.processors, self.reading.processors):
                assert isinstance(processors, RequestProcessors)
                processors.admit(row, entry.processors, entry.alike)
            self.schedule.admit(row, entry.seeded and self.report.verification in ("token", "block"))
            self.dead_ends.admit(row)
        if coming:
            self.target.admit(self.batch, list(coming))
            self.drafter.admit(self.batch, list(coming))
            self.lap("read")

    def active(self) -> bool:
        """Whether some row goes on; while only other ranks have such rows, forwards are run here to keep step."""
        while not self.ranks.all_finished(self.finished):
            if not self.finished:
                return True
            self.ranks.idle(self.target, self.drafter, self.processors, self.batch, self.schedule)
        return False

    def publish(self, done: Round) -> None:
        """Tell those of a round who only look on."""
        told: list[Listener] = [self.dead_ends, self.report, self.outputs, self.stream, *self.call.options.listeners]
        for listener in [*told, *([] if self.call.queue is None else [self.call.queue])]:
            listener.observe(done)

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase of the report."""
        now = time.perf_counter()
        self.report.note_time(phase, now - self.lapped)
        self.lapped = now

    def finish(self) -> torch.Tensor:
        """End the call; returns the text, [B, L + N]."""
        columns = self.stopping.columns
        self.rule.finish(columns)
        self.schedule.end()
        cut = columns if self.call.queue is None else sys.maxsize  # requests end on their own, one after another
        self.report.finish(time.perf_counter() - self.started, cut)
        return self.batch.output(columns)

    def output(self, text: torch.Tensor, report: SpeculationReport | None) -> Any:
        """What `generate` returns: the text, or an output with this report; a cache of the user is filled."""
        prompt, columns = self.call.prompt, self.stopping.columns
        user_cache: Any = prompt.kwargs.get("past_key_values", prompt.kwargs.get("cache_params"))
        given = getattr(user_cache, "_is_user_defined", False)  # it was read alone before
        past = self.target.past(self.batch, columns) if prompt.keeps_past else None
        past = fill(user_cache, past) if given else past
        if not prompt.generation_config.return_dict_in_generate:
            return text
        return self.outputs.finish(text, columns, past, prompt.model.config.is_encoder_decoder, report)
