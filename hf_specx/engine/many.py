"""Any number of requests, in batches whose rows are filled again as they end."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .decode import rounds
from .in_order import decode_call
from .places import Places
from .plan import Plan
from .report import SpeculationReport
from .requests import Completion, Waiting
from .run import Run


Start = Callable[..., tuple[Run, Plan]]
End = Callable[[Run, SpeculationReport | None], SpeculationReport]


@torch.no_grad()
def complete_all(waiting: Waiting, start: Start, end: End, batch_size: int, logprobs: bool) -> Iterator[Completion]:
    """What becomes of each request, as soon as it is done.

    Rows are filled again as long as the next request fits beside the others. If it does not, or rows cannot be filled
    again, they are completed first, and another batch begins. A request whose processors or criteria keep state is a
    batch of its own.

    Args:
        waiting: the requests.
        start: gives the run of a batch, from what `generate` prepared.
        end: is told of each run that is over and of the report so far; gives the report of both.
        batch_size: the most rows of a batch.
        logprobs: whether completions have those of their tokens.
    """
    report: SpeculationReport | None = None
    while entries := waiting.take_while_fits(batch_size):
        places = Places(entries, waiting, logprobs)
        run: Run | None
        if entries[0].stateful:
            run = _complete_one(places, start)
        else:
            prompt, inputs_tensor = places.prompt()
            seeds = places.seeds if prompt.generation_config.do_sample else None
            run, _ = start(prompt, inputs_tensor, entries[0].processors, places.stopping, seeds, places)
            for _ in rounds(run):
                yield from places.handed_on()
                run.lap("handing on")
            run.finish()
        if run is not None:
            report = end(run, report)
        yield from places.handed_on()
    yield from waiting.hand_on()
    if waiting.failed is not None:
        raise waiting.failed


def _complete_one(places: Places, start: Start) -> Run | None:
    """Complete a request in a batch of one, as any call of `generate`; None if its own processors do not allow it."""
    (entry,) = places.entries
    prompt, inputs_tensor = places.prompt()
    prompt.max_new_tokens, prompt.limits = entry.limit, None
    seeds: Any = places.seeds if prompt.generation_config.do_sample else None
    try:
        run, plan = start(prompt, inputs_tensor, entry.processors, entry.stopping, seeds)
    except ValueError as error:
        if entry.alike:
            raise
        places.waiting.refuse(entry.index, error)
        return None
    run.report.layout_reason += f"; requests one by one: {', '.join(entry.stateful)} keeps state"
    run.listeners = (*run.listeners, places)
    text = decode_call(run, plan.in_order)
    tokens = text[0, run.batch.width :].tolist()
    places.close(0, tokens, places.stopping.by_limit(run.batch, 0))
    return run


def in_order(completions: Iterator[Completion]) -> Iterator[Completion]:
    """Completions in the order in which their requests were given."""
    early: dict[int, Completion] = {}
    number = 0
    for completion in completions:
        early[completion.index] = completion
        while number in early:
            yield early.pop(number)
            number += 1
