"""Time methods to generate in turns, so that what slows the machine down slows all of them down alike.

In a turn every method runs once, on the same prompts and with the same seed. The order rotates from turn to turn, or
is drawn at random, so that no method always runs first.
"""

import random
import statistics
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specx.common.devices import execution_device, synchronize
from hf_specx.engine.report import PLAINLY, SpeculationReport
from hf_specx.engine.strategy import SpeculativeDecoding

from .decoding_methods import ASSISTED_NAME, PLAIN_NAME
from .inputs import Inputs, emitted
from .timed_methods import TimedMethod


WARM_UP = 32  # new tokens of the run that is not counted, where nothing is compiled
SAME_DRAFT = "block-auto"  # ours with the draft of assisted generation
RETRIES = 5  # times that a run in which something was compiled is made again
REPORTED_RATIOS = ("alpha", "mean_acceptance_length", "expected_speedup", "forward_limited_speedup")
Advance = Callable[[], object]  # called after each timed run, as to move a progress bar


@dataclass
class TimedCall:
    """The time and the tokens of one timed call."""

    seconds: float
    tokens: int  # emitted, over all rows
    report: SpeculationReport | None = None  # None of a method of transformers
    longest_row: int = 1  # its number of tokens, which is the number of steps of plain `generate`
    arrivals: list[float] = field(default_factory=list)  # seconds at which tokens came, where that was asked for

    @property
    def first_token(self) -> float | None:
        """Seconds until the first token came."""
        return self.arrivals[0] if self.arrivals else None

    @property
    def between_tokens(self) -> float | None:
        """Seconds for each token of the longest row after its first."""
        if not self.arrivals or self.longest_row < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.longest_row - 1)

    @property
    def longest_wait(self) -> float | None:
        """The most seconds in which no token came, after the first."""
        return max((after - before for before, after in pairwise(self.arrivals)), default=None)


class Arrivals(BaseStreamer):
    """A streamer that notes when tokens come, for any number of rows; `times` are those of `perf_counter`."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts, and then tokens."""
        if self.has_prompt:
            self.times.append(time.perf_counter())
        self.has_prompt = True

    def put_row(self, row: int, tokens: torch.Tensor) -> None:
        """Take tokens of a row."""
        self.put(tokens)

    def end_row(self, row: int) -> None:
        """No tokens of a row follow."""

    def end(self) -> None:
        """No tokens follow."""


@dataclass
class Timing:
    """The runs of one method."""

    runs: list[TimedCall] = field(default_factory=list)  # one for each turn
    first_seconds: float | None = None  # of its very first call, which warms up and may compile
    error: str | None = None  # what the method failed with, in a line; it then has no runs

    @property
    def reports(self) -> list[SpeculationReport]:
        """The reports of all runs; [] of a method of transformers."""
        return [run.report for run in self.runs if run.report is not None]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each run."""
        return [run.tokens / run.seconds for run in self.runs]

    @property
    def tokens_per_second(self) -> float:
        """The median of `rates`."""
        return statistics.median(self.rates)

    @property
    def seconds(self) -> list[float]:
        """The seconds of each run."""
        return [run.seconds for run in self.runs]

    @property
    def pooled_rate(self) -> float:
        """Tokens of all runs over the seconds of all runs."""
        return sum(run.tokens for run in self.runs) / sum(self.seconds)

    def speedups(self, plain: "Timing") -> list[float]:
        """How many times as fast as plain `generate` in each turn, by tokens per second."""
        return [rate / plain_rate for rate, plain_rate in zip(self.rates, plain.rates, strict=True)]

    def measured_speedup(self, plain: "Timing") -> float:
        """The median of `speedups`."""
        return statistics.median(self.speedups(plain))

    def median_of(self, figure: str) -> float | None:
        """The median of a figure of `reports` over the runs that have it; None if none has."""
        values = [getattr(report, figure) for report in self.reports]
        values = [value for value in values if value is not None]
        return statistics.median(values) if values else None

    @property
    def latency(self) -> dict[str, dict[str, float]]:
        """Seconds until the first token, for each later one, and the longest wait; as far as arrivals were noted."""
        figures = {}
        for name in ("first_token", "between_tokens", "longest_wait"):
            values = [getattr(run, name) for run in self.runs]
            if values and None not in values:
                figures[name] = spread(values)
        return figures

    def to_dict(self) -> dict[str, Any]:
        """Seconds and tokens of each run, and the median rate, as JSON has them."""
        runs = {name: [getattr(run, name) for run in self.runs] for name in ("seconds", "tokens")}
        return runs | {"tokens_per_second": self.tokens_per_second}

    def __str__(self) -> str:
        rates = f"{self.tokens_per_second:8.1f} tokens/s ({min(self.rates):.1f} to {max(self.rates):.1f})"
        return f"{rates}, {statistics.median(self.seconds):.2f} s a run"


@dataclass
class Timer:
    """Times methods in turns; `time` runs it."""

    make_method: Callable[[str], TimedMethod]  # by its name; called once for each
    batches: Sequence[Inputs]  # one for each turn, and from the first on again if there are more turns
    options: dict[str, Any]  # of `generate`, `max_new_tokens` among them
    seeds: Sequence[int]  # of the turns, one run of each method in each; the warm-up has that of the first
    advance: Advance = lambda: None  # called after each run, `(1 + len(seeds))` times for each method
    may_fail: Container[str] = ()  # methods whose failure is noted, and the others go on; else it is raised
    rng: random.Random | None = None  # draws the order of each turn; None rotates it
    should_stop: Callable[[dict[str, Timing]], bool] = lambda timings: False  # called after each turn; True ends it
    notes_arrivals: bool = False  # whether each run notes when its tokens come

    def time(self, names: Sequence[str]) -> dict[str, Timing]:
        """Time these methods; returns their timings by name."""
        self.methods: dict[str, TimedMethod] = {}
        self.warm_shapes: set[tuple[str, torch.Size]] = set()  # methods with the shapes of inputs that they ran
        timings = {name: Timing() for name in names}
        for turn in range(-1, len(self.seeds)):
            first = max(turn, 0) % len(names)
            order = [*names[first:], *names[:first]]
            if self.rng is not None:
                order = self.rng.sample(order, len(order))
            for name in order:
                if timings[name].error is None:
                    try:
                        self._time_turn(name, turn, timings[name])
                    except Exception as error:  # compilers, memory, and options that are not there
                        if name not in self.may_fail:
                            raise
                        first_line = next(iter(str(error).strip().splitlines()), "")
                        timings[name] = Timing(error=f"{type(error).__name__}: {first_line}")
                self.advance()
            if turn >= 0 and self.should_stop(timings):
                break
        return timings

    def _time_turn(self, name: str, turn: int, timing: Timing) -> None:
        """Time one run in which nothing is compiled, and add it to `timing`.

        Turn -1 only warms up. A compiled method also warms up before its first run with inputs of another shape.
        """
        if name not in self.methods:
            self.methods[name] = self.make_method(name)
        method = self.methods[name]
        options = self.options
        if turn < 0 and not method.compiled:
            options = options | {"max_new_tokens": min(WARM_UP, options["max_new_tokens"])}
        number = max(turn, 0)
        inputs = self.batches[number % len(self.batches)]
        seed = self.seeds[number]
        shape = name, inputs["input_ids"].shape
        # a report says what was compiled in a run (below), transformers does not
        if turn < 0 or (method.compiled and shape not in self.warm_shapes):
            warm_up = time_call(method, inputs, options, seed)
            timing.first_seconds = timing.first_seconds or warm_up.seconds
            self.warm_shapes.add(shape)
        if turn < 0:
            return
        run = time_call(method, inputs, options, seed, self.notes_arrivals)
        for _ in range(RETRIES):
            if run.report is None or not run.report.compilations:
                break
            run = time_call(method, inputs, options, seed, self.notes_arrivals)  # a forward of a new size was compiled
        timing.runs.append(run)


def time_call(
    method: TimedMethod, inputs: Inputs, options: dict[str, Any], seed: int, notes_arrivals: bool = False
) -> TimedCall:
    """The seconds and tokens of one call, seeded by `torch.manual_seed(seed)`; the device is waited for."""
    device = execution_device(method.target)
    arrivals = Arrivals()
    if notes_arrivals:
        options = options | {"streamer": arrivals}
    torch.manual_seed(seed)
    synchronize(device)
    started = time.perf_counter()
    output = method(inputs, options)
    synchronize(device)
    seconds = time.perf_counter() - started
    lengths = list(map(len, emitted(method.target, inputs, output, options)))
    times = [at - started for at in arrivals.times]
    return TimedCall(seconds, sum(lengths), method.report, max(lengths), times)


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, the least and the largest of some values, by name."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def seconds_per_step(report: SpeculationReport) -> float:
    """The seconds of a whole call divided by the number of its target forwards."""
    return report.seconds["total"] / (report.rounds + report.plain_steps)


@dataclass
class Comparison:
    """Timings of plain `generate` and of ours in the same turns; every figure is a median over the turns."""

    plain: Timing
    ours: Timing
    # both with the `draft` of `compare`, where one was given: transformers' assisted generation, if it takes such
    # calls, and ours, if the strategy has another draft
    assisted: Timing | None = None
    ours_with_its_draft: Timing | None = None

    @property
    def ratios(self) -> dict[str, Any]:
        """Ratios of the reports by name, and "measured_speedup": how many times as fast as plain `generate` ours was.

        "expected_speedup" (Theorem 3.8) and "forward_limited_speedup" are None where no costs were measured.
        """
        reported = {name: self.ours.median_of(name) for name in REPORTED_RATIOS}
        return reported | {"measured_speedup": self.ours.measured_speedup(self.plain)}

    @property
    def plain_step(self) -> float:
        """The seconds of a plain call, its prompt included, divided by the tokens of its longest row."""
        return statistics.median(run.seconds / max(1, run.longest_row) for run in self.plain.runs)

    def to_dict(self) -> dict[str, Any]:
        """Times and ratios as JSON has them; the numbers of candidates run by run, since "auto" learns from each."""
        numbers = [report.num_draft_tokens for report in self.ours.reports]
        times = {name: timing.to_dict() for name, timing in vars(self).items() if timing is not None}
        return times | {"num_draft_tokens": numbers} | self.ratios

    def __str__(self) -> str:
        alpha, tokens, expected, limit, measured = self.ratios.values()
        lines = [
            f"medians of {len(self.ours.runs)} runs each, in turns; tokens up to and including each row's end token",
            f"plain generate {self.plain}",
            f"speculative    {self.ours}",
            f"alpha {f'{alpha:.3f}' if alpha else '-'}, {tokens:.2f} tokens a row and round",
        ]
        if expected is not None and limit is not None:
            seconds = statistics.median(map(seconds_per_step, self.ours.reports))
            lines += [
                f"{1e3 * seconds:.1f} ms a round, {1e3 * self.plain_step:.1f} ms a step of plain generate",
                f"speed-up by the times of forwards alone {limit:.2f}, by Theorem 3.8 {expected:.2f}",
            ]
        plainly = all(report.layout == PLAINLY for report in self.ours.reports)
        remark = "though both decode plainly: what differs is noise" if plainly else "the median of the turns'"
        return "\n".join([*lines, f"measured speed-up {measured:.2f}, {remark}"])


def compare(
    target: PreTrainedModel,
    strategy: SpeculativeDecoding,
    batches: Sequence[Inputs],
    options: dict[str, Any],
    repeats: int = 5,
    seed: int = 0,
    advance: Advance = lambda: None,
    draft: PreTrainedModel | None = None,
    rng: random.Random | None = None,
    should_stop: Callable[[Timing, Timing], bool] = lambda plain, ours: False,
) -> Comparison:
    """Time plain `generate` and ours in turns; with a `draft` also transformers' assisted generation with that draft.

    Each turn takes the next of `batches`, all of B rows, and number i starts from `torch.manual_seed(seed + i)`.
    `options` are of `generate`, `max_new_tokens` among them. The strategy gets times of forwards where it has none, so
    that its report has the speed-ups that follow from them. If the strategy has another draft than `draft`, a strategy
    with `draft` is timed too. `advance` is called after each run. There are `repeats` turns, fewer if `should_stop`,
    which is called after each, returns True. `rng` draws the order within a turn; without it the order rotates.
    """
    methods = {"plain": TimedMethod(PLAIN_NAME, target), "ours": TimedMethod("ours", target, strategy=strategy)}
    if draft is not None:
        methods["assisted"] = TimedMethod(ASSISTED_NAME, target, draft)
        if strategy.draft_model is not draft:
            methods["ours_with_its_draft"] = TimedMethod(SAME_DRAFT, target, draft)
    methods["ours"].prepare(batches[0])
    seeds = range(seed, seed + repeats)
    may_fail = ("assisted", "ours_with_its_draft")
    timer = Timer(methods.__getitem__, batches, options, seeds, advance, may_fail, rng)
    timer.should_stop = lambda timings: should_stop(timings["plain"], timings["ours"])
    timings = timer.time(tuple(methods)).items()
    return Comparison(**{name: timing for name, timing in timings if timing.error is None})
