"""Any number of requests, in batches whose rows are filled again as they end."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .decode import rounds
from .places import Places
from .requests import Completion, Waiting
from .run import Run


@torch.no_grad()
def complete_all(
    waiting: Waiting,
    start: Callable[..., tuple[Run, Any]],
    end: Callable[[Run], None],
    batch_size: int,
    logprobs: bool,
) -> Iterator[Completion]:
    """What becomes of each request, as soon as it is done.

    Rows are filled again as long as the next request fits beside the others. If it does not, they are completed
    first, and another batch begins.

    Args:
        waiting: the requests.
        start: gives the run of a batch, from what `generate` prepared.
        end: is told of each run that is over.
        batch_size: the most rows of a batch.
        logprobs: whether completions have those of their tokens.
    """
    while entries := waiting.take_while_fits(batch_size):
        places = Places(entries, waiting, logprobs)
        prompt = places.prompt()
        seeds = places.seeds if prompt.generation_config.do_sample else None
        run, _ = start(prompt, None, entries[0].processors, places.stopping, seeds, places)
        for _ in rounds(run):
            yield from places.handed_on()
        run.finish()
        end(run)
    yield from waiting.hand_on()


def in_order(completions: Iterator[Completion]) -> Iterator[Completion]:
    """Completions in the order in which their requests were given."""
    early: dict[int, Completion] = {}
    number = 0
    for completion in completions:
        early[completion.index] = completion
        while number in early:
            yield early.pop(number)
            number += 1
