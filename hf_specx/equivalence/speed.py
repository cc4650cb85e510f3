"""How fast: plain generation and each number of candidates in turns, beside what theory and forwards predict.

It is made for a report only, as it goes by the clock, unlike all else in a check; nothing is judged by it.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from hf_specx.common.devices import execution_device, synchronize
from hf_specx.drafting.costs import Costs
from hf_specx.drafting.draft_length import expected_speedup
from hf_specx.engine.report import SpeculationReport
from hf_specx.measure.bench import Timing, emitted_per_row, prompt_width
from hf_specx.measure.turns import COMPILING, spread
from hf_specx.strategy import SpeculativeDecoding

from .settings import REPEATS, TIMED
from .texts import Subject


PREFERRED = ("block", "token", "coupled", "greedy")  # the first of them that is checked is timed
WARM_UP = 8  # new tokens of the run that is not counted


def measure_speed(subject: Subject, advance: Callable[[], object]) -> dict[str, Any]:
    """Time plain `generate` and 1 to 8 candidates a round, on the prompts, sampling and first batch size of a check.

    All of them take turns, in an order that rotates, with the same prompts and seed in a turn.

    Args:
        subject: what is checked.
        advance: called after each run, `TIMED_RUNS` times.

    Returns:
        Plain values: "verification", "batch", "new_tokens", "repeats"; "alpha" (mean of sum min(p, q) over the judged
        candidates of all runs) and "cost_coefficient"; "plain", tokens a second; and "numbers", for each number:
        "num_draft_tokens", "tokens_per_second", "speedup" (times plain in the same turn), "tokens_per_round" (mean),
        "expected" (Theorem 3.8, at that α) and "forward_limited" (by the tokens a round that were met). What was
        measured has its "median", "min" and "max".
    """
    turns = Turns(subject)
    for run in range(-1, REPEATS):
        shift = max(run, 0) % len(TIMED)
        for number in (*TIMED[shift:], *TIMED[:shift]):
            turns.take(number, run)
            advance()
    return turns.found()


class Turns:
    """The runs, and what is timed in them.

    Attributes:
        strategies: by number of candidates; None for plain. They share one table of costs.
        timings, reports: of each number.
    """

    def __init__(self, subject: Subject):
        self.subject, self.batch = subject, subject.settings.batch_sizes[0]
        self.way = next(name for name in PREFERRED if name in subject.settings.verifications)
        self.options = subject.settings.generation(sampled=self.way != "greedy")
        self.places = subject.settings.batches(self.way, self.batch, len(subject.prompts))
        self.timings = {number: Timing() for number in TIMED}
        self.reports: dict[int, list[SpeculationReport]] = {number: [] for number in TIMED}
        self.strategies: dict[int, SpeculativeDecoding | None] = {0: None}
        self.costs = self._strategies()

    def _strategies(self) -> Costs:
        first = self.subject.strategy(self.way)
        first.calibrate(self.subject.target, self.subject.encoded(self.places[0])["input_ids"])
        for number in TIMED[1:]:
            strategy = self.subject.strategy(self.way, number)
            strategy.costs = first.costs.apart()
            self.strategies[number] = strategy
        return first.costs

    def take(self, number: int, run: int) -> None:
        """Run number `run` with so many candidates, in which nothing is compiled; -1 warms up."""
        strategy, options = self.strategies[number], dict(self.options)
        compiled = strategy is not None and strategy.compile
        if run < 0 and not compiled:
            options["max_new_tokens"] = min(WARM_UP, options["max_new_tokens"])
        inputs = self.subject.encoded(self.places[max(run, 0) % len(self.places)])
        for _ in range(COMPILING if compiled else 1):
            seconds, tokens = self._run(strategy, inputs, options, max(run, 0))
            if strategy is None or strategy.report is None or not strategy.report.compilations:
                break  # else a size had not occurred before
        if run < 0:
            return
        self.timings[number].seconds.append(seconds)
        self.timings[number].tokens.append(tokens)
        if strategy is not None and strategy.report is not None:
            self.reports[number].append(strategy.report)

    def _run(
        self, strategy: SpeculativeDecoding | None, inputs: dict[str, torch.Tensor], options: dict[str, Any], run: int
    ) -> tuple[float, int]:
        """Seconds of a call, and its tokens over all rows, up to and with each row's end."""
        target, extra = self.subject.target, {} if strategy is None else {"custom_generate": strategy}
        device = execution_device(target)
        torch.manual_seed(self.subject.settings.run_seed("speed", self.batch, run))
        synchronize(device)
        started = time.perf_counter()
        output = target.generate(**inputs, **options, **extra)  # type: ignore[operator]
        synchronize(device)
        seconds = time.perf_counter() - started
        ends = options.get("eos_token_id", target.generation_config.eos_token_id)
        return seconds, sum(emitted_per_row(output, prompt_width(target, inputs), ends))

    def found(self) -> dict[str, Any]:
        """What `measure_speed` returns."""
        reports = [report for each in self.reports.values() for report in each]
        judged = sum(report.judged for report in reports)
        alpha = sum(float(report.overlap) for report in reports) / judged if judged else 0.0
        return {
            "verification": self.way,
            "batch": self.batch,
            "new_tokens": self.subject.settings.new_tokens,
            "repeats": REPEATS,
            "alpha": alpha,
            "cost_coefficient": self.costs.cost_coefficient(self.batch),
            "plain": spread(self.timings[0].rates),
            "numbers": [self._of_number(number, alpha) for number in TIMED[1:]],
        }

    def _of_number(self, number: int, alpha: float) -> dict[str, Any]:
        rates, beside = self.timings[number].rates, self.timings[0].rates
        tokens = statistics.mean(report.tokens_per_round for report in self.reports[number])
        return {
            "num_draft_tokens": number,
            "tokens_per_second": spread(rates),
            "speedup": spread([ours / plain for ours, plain in zip(rates, beside, strict=True)]),
            "tokens_per_round": tokens,
            "expected": expected_speedup(alpha, number, self.costs.cost_coefficient(self.batch)),
            "forward_limited": self.costs.forward_limited_speedup(self.batch, tokens, number),
        }
