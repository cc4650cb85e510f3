"""How often `SpeculationCallback` calls a draft stale, and how soon, on simulated counts: `python scripts/stale.py`.

A call judges candidates, each kept or not, by a chance that differs from call to call around α. That is 0.7 in the
first window, and `fall` times as much after it. A draft is stale once α is below 0.8 of its start.
"""

import itertools
import statistics
from argparse import ArgumentParser

import torch

from hf_specx.training import callback


START_ALPHA = 0.7
FALLS = (1.0, 0.9, 0.8, 0.75, 0.7, 0.6, 0.5)


def first_alarm(
    run: int,
    fall: float,
    comparisons: int,
    judged: int = 200,
    spread: float = 0.05,
    window: int = 16,
    false_alarm: float = 0.01,
) -> int | None:
    """The comparison in which α is called stale, counted from 1; None if it is in none.

    Args:
        run: the seed.
        fall: α over that of the start.
        comparisons: how many there are.
        judged: candidates of a call.
        spread: standard deviation of the chance of a call.
        window, false_alarm: of the callback.
    """
    generator = torch.Generator().manual_seed(run)
    test = callback.StaleTest(window, 0.8, false_alarm)
    count = torch.tensor(float(judged), dtype=torch.float64)
    while test.num_comparisons < comparisons:
        alpha = START_ALPHA * (1.0 if test.start is None else fall)
        chance = alpha + spread * torch.randn((), generator=generator, dtype=torch.float64)
        accepted = float(torch.binomial(count, chance.clamp(0, 1), generator=generator))
        if test.add(callback.CallAcceptance(accepted, judged)):
            return test.num_comparisons
    return None


def main() -> None:
    """Print a row for each fall of α."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--comparisons", type=int, default=25)
    parser.add_argument("--judged", type=int, nargs="+", default=[30, 200])
    parser.add_argument("--spread", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--window", type=int, default=16)
    arguments = parser.parse_args()
    print("| candidates of a call | spread | α over its start | called stale | in window, median and 9 of 10 |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for judged, spread, fall in itertools.product(arguments.judged, arguments.spread, FALLS):
        settings = {"judged": judged, "spread": spread, "window": arguments.window}
        alarms = [first_alarm(run, fall, arguments.comparisons, **settings) for run in range(arguments.runs)]
        delays = sorted(alarm for alarm in alarms if alarm is not None)
        delay = f"{statistics.median(delays):.0f}, {delays[int(0.9 * len(delays))]}" if len(delays) > 9 else "-"
        print(f"| {judged} | {spread} | {fall} | {len(delays) / arguments.runs:.1%} | {delay} |", flush=True)


if __name__ == "__main__":
    main()
