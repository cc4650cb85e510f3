"""How fast: plain `generate` and each number of candidates in turns, with what theory and the forwards predict.

It is measured for a report only, since it depends on the clock, unlike all else in a check; nothing is judged by it.
"""

import statistics
from typing import Any

from hf_specx.bench.contenders import Contender
from hf_specx.bench.inputs import Inputs
from hf_specx.bench.timer import Advance, Timer, Timing, speedups, spread
from hf_specx.bench.ways import PLAIN_NAME
from hf_specx.scheduling.costs import Costs
from hf_specx.scheduling.draft_length import expected_speedup
from hf_specx.strategy import SpeculativeDecoding

from .settings import REPEATS, TIMED
from .texts import Subject


PREFERRED = ("block", "token", "coupled", "greedy")  # the first of them that is checked is timed


def measure_speed(subject: Subject, advance: Advance) -> dict[str, Any]:
    """Time plain `generate` and 1 to 8 candidates a round, on the prompts, sampling and first batch size of a check.

    Args:
        subject: what is checked.
        advance: called after each run, `TIMED_RUNS` times.

    Returns:
        Plain values: "verification", "batch", "new_tokens", "repeats"; "alpha" (mean of sum min(p, q) over the judged
        candidates of all runs) and "cost_coefficient"; "plain", tokens per second; and "numbers", for each number:
        "num_draft_tokens", "tokens_per_second", "times_plain" (its median over that of plain), "speedup" (times plain
        in the same turn), "tokens_per_round" (mean), "expected" (Theorem 3.8, at that α) and "forward_limited" (by the
        measured tokens a round). What was measured turn by turn has its "median", "min" and "max".
    """
    settings, batch = subject.settings, subject.settings.batch_sizes[0]
    way = next(name for name in PREFERRED if name in settings.verifications)
    rows = settings.batches(way, batch, len(subject.prompts))
    batches = [subject.encoded(indices) for indices in rows[:REPEATS]]
    strategies = strategies_of(subject, way, batches[0])
    contenders = {str(n): Contender(str(n), subject.target, strategy=strategy) for n, strategy in strategies.items()}
    contenders[PLAIN_NAME] = Contender(PLAIN_NAME, subject.target)
    names = [str(number) if number else PLAIN_NAME for number in TIMED]
    seeds = [settings.run_seed("speed", batch, run) for run in range(REPEATS)]
    options = settings.generation(sampled=way != "greedy")
    timings = Timer(contenders.__getitem__, batches, options, seeds, advance).time(names)
    plain, costs = timings.pop(PLAIN_NAME), strategies[1].costs
    reports = [report for timing in timings.values() for report in timing.reports]
    judged = sum(report.judged for report in reports)
    alpha = sum(float(report.overlap) for report in reports) / judged if judged else 0.0
    return {
        "verification": way,
        "batch": batch,
        "new_tokens": settings.new_tokens,
        "repeats": REPEATS,
        "alpha": alpha,
        "cost_coefficient": costs.cost_coefficient(batch),
        "plain": spread(plain.rates),
        "numbers": [
            number_figures(int(number), timing, plain, alpha, batch, costs) for number, timing in timings.items()
        ],
    }


def strategies_of(subject: Subject, way: str, inputs: Inputs) -> dict[int, SpeculativeDecoding]:
    """By number of candidates; they begin with one table of costs, and learn apart."""
    strategies = {number: subject.strategy(way, number) for number in TIMED if number}
    strategies[1].calibrate(subject.target, inputs["input_ids"])
    for number, strategy in strategies.items():
        if number > 1:
            strategy.costs = strategies[1].costs.apart()
    return strategies


def number_figures(
    number: int, timing: Timing, plain: Timing, alpha: float, batch: int, costs: Costs
) -> dict[str, Any]:
    """What `measure_speed` says of a number of candidates."""
    tokens = statistics.mean(report.tokens_per_round for report in timing.reports)
    return {
        "num_draft_tokens": number,
        "tokens_per_second": spread(timing.rates),
        "times_plain": timing.times(plain),
        "speedup": spread(speedups(timing.rates, plain.rates)),
        "tokens_per_round": tokens,
        "expected": expected_speedup(alpha, number, costs.cost_coefficient(batch)),
        "forward_limited": costs.forward_limited_speedup(batch, tokens, number),
    }
