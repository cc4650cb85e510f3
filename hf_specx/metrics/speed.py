"""How fast: plain `generate` and speculation in turns, on the prompts of a check.

It is measured for a report only, since it depends on the clock, unlike all else in a check; nothing is judged by it.
"""

import statistics
import time
from typing import Any

import torch

from hf_specx.bench.inputs import emitted

from .settings import PLAIN_GREEDY, PLAIN_SAMPLED
from .texts import Subject


PREFERRED = ("block", "token", "coupled", "greedy")  # the first of them that is checked is timed
TURNS = 3  # after one that warms up


def measure_speed(subject: Subject) -> dict[str, Any]:
    """Time plain `generate` and speculation, at the first batch size of a check.

    Returns:
        Plain values: "verification", "batch", "num_draft_tokens", "turns"; "plain" and "ours", tokens per second in
        the median; "times_plain", the median of ours / plain within a turn, with the "least" and the "most".
    """
    settings, batch = subject.settings, subject.settings.batch_sizes[0]
    way = next(name for name in PREFERRED if name in settings.verifications)
    plain = PLAIN_GREEDY if way == "greedy" else PLAIN_SAMPLED
    calls = {name: subject.call(name) for name in (plain, way)}
    batches = settings.batches(way, batch, len(subject.prompts))
    turns = []
    for turn in range(1 + TURNS):
        inputs = subject.encoded(batches[turn % len(batches)])
        rates = {}
        for name, options in calls.items():
            torch.manual_seed(settings.run_seed("speed", batch, turn))
            start = time.perf_counter()
            output = subject.target.generate(**inputs, **options)  # type: ignore[operator]
            texts = emitted(subject.target, inputs, output, options)  # waits for the device
            rates[name] = sum(map(len, texts)) / (time.perf_counter() - start)
        turns.append(rates)
    ratios = [rates[way] / rates[plain] for rates in turns[1:]]
    return {
        "verification": way,
        "batch": batch,
        "num_draft_tokens": settings.num_draft_tokens,
        "turns": TURNS,
        "plain": statistics.median(rates[plain] for rates in turns[1:]),
        "ours": statistics.median(rates[way] for rates in turns[1:]),
        "times_plain": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }
