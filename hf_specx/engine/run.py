"""What one call of `generate` works with, and what it does around each round."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round
from hf_specx.drafting.drafter import Drafter, Reading
from hf_specx.layouts.decoder import Decoder
from hf_specx.layouts.forward_outputs import Forward
from hf_specx.sampling.per_request import RequestProcessors
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.rules import Rule
from hf_specx.sampling.stopping import Stopping
from hf_specx.scheduling.schedule import Schedule

from .dead_ends import DeadEnds
from .outputs import Outputs
from .places import Places
from .plan import Listener
from .ranks import Ranks
from .report import SpeculationReport
from .streaming import Stream


@dataclass
class Run:
    """One call; nothing is read before `admit`.

    Attributes:
        target, drafter, rule, processors, stopping, batch: see their classes.
        report, outputs, stream: what the caller gets.
        ranks: processes that hold parts of the models.
        dead_ends: raises the error of a row that has no token to choose.
        reading: what the drafter is told of the call; `vocab_size` is that of the target's logits once there are some.
        make_schedule: makes the schedule once both models have read the prompts; it may time their forwards.
        listeners: other objects that are told of each round.
        places: requests that wait for the places of rows that end; None if none do.
        finished: whether all rows have ended.
        begun: whether the prompts were read; `started`, `lapped`: when the call and its current phase began.
    """

    target: Decoder
    drafter: Drafter
    rule: Rule
    processors: Processors
    stopping: Stopping
    batch: Batch
    report: SpeculationReport
    outputs: Outputs
    stream: Stream
    ranks: Ranks
    dead_ends: DeadEnds
    reading: Reading
    make_schedule: Callable[["Run"], Schedule]
    listeners: tuple[Listener, ...] = ()
    places: Places | None = None
    finished: bool = False
    begun: bool = False
    lapped: float = 0.0
    schedule: Schedule = field(init=False)
    started: float = field(default_factory=time.perf_counter)

    def admit(self) -> None:
        """Read the prompts with both models; after a round those that have the places of rows that ended."""
        if self.begun:
            self._replace()
            return
        self.stream.prompt(self.batch)
        self.target.read()
        self.rule.begin()  # `generate` draws its first random number after this forward
        self.reading.vocab_size = self.target.after_prompt.shape[-1]
        self.drafter.read(self.reading)
        self.schedule = self.make_schedule(self)
        self.lapped, self.begun = time.perf_counter(), True

    def _replace(self) -> None:
        coming = {} if self.places is None else self.places.replace(self.batch)
        for row, entry in coming.items():
            self.rule.admit(row, entry.seed)
            for processors in (self.processors, self.reading.processors):
                assert isinstance(processors, RequestProcessors)
                processors.admit(row, entry.processors, entry.limit, entry.alike)
            self.schedule.most = self.processors.max_rollback
            self.schedule.admit(row, entry.limit, entry.seeded and self.report.verification in ("token", "block"))
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

    def publish(self, done: Round, forward: Forward, scores: torch.Tensor) -> None:
        """Tell all listeners of a round; the models come last, since rows leave them.

        Args:
            done: the round.
            forward: the target's.
            scores: [R, P, V], after all processors.
        """
        done.forward, done.scores, self.finished = forward, scores, done.finished
        told: list[Listener] = [self.dead_ends, self.report, self.outputs, self.stream, *self.listeners]
        told += [] if self.places is None else [self.places]
        for listener in [*told, self.schedule, self.drafter, self.processors, self.target]:
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
        cut = columns if self.places is None else sys.maxsize  # requests end on their own, one after another in a row
        self.report.finish(time.perf_counter() - self.started, cut)
        return self.batch.output(columns)
