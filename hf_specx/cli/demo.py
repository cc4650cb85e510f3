"""`specx generate --demo`: what speculative sampling is worth here, in about two minutes."""

import copy
import itertools
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from hf_specx.bench.contenders import Contender
from hf_specx.bench.inputs import Inputs
from hf_specx.bench.timer import Timer, Timing
from hf_specx.bench.ways import PLAIN_NAME, STOCK_NAME
from hf_specx.common.errors import require
from hf_specx.common.tokenizers import same_tokens
from hf_specx.hub.known_pairs import is_embedded

from .coloured import legend
from .console import progress


if TYPE_CHECKING:
    from .session import Session


DEMO_BATCHES = (1, 8)
EMBEDDED_FIRST = 1  # of the prompts of the pair in the package: the one whose text is shown, which reads well
SPECULATIVE = "speculative"
WORDS = {
    PLAIN_NAME: "plain generate",
    STOCK_NAME: "transformers' assisted decoding",
    SPECULATIVE: "speculative sampling",
}
NEXT = "Two models of your own: specx tune TARGET DRAFT --file PROMPTS, or specx generate --target T --draft D."


def show_demo(session: "Session") -> list[dict[str, Any]]:
    """Generate for one prompt and show that plain generate gives the same, then time all ways at batch 1 and 8.

    Returns:
        What `Session.run` returns for each batch, with the times of all ways as its comparison.
    """
    console, own = session.console, session.pair.prompts
    require(bool(own), f"--demo: {session.name!r} has no prompts of its own; give some as arguments.")
    first = EMBEDDED_FIRST if is_embedded(session.name) else 0
    console.print(legend(), soft_wrap=True)
    runs, timings = [], []
    for size in DEMO_BATCHES:
        batch = list(itertools.islice(itertools.cycle(own), first, first + size))
        run, inputs = session.run(batch, show=size == 1)
        if size == 1:
            console.print(Text(f"\n{same_text(session, batch)}\n"), soft_wrap=True)
        timings.append(time_ways(session, inputs))
        runs.append(run | {"comparison": {way: timing.to_dict() for way, timing in timings[-1].items()}})
    table = Table("", *(f"batch {size}" for size in DEMO_BATCHES), show_edge=False)
    for way, words in WORDS.items():
        table.add_row(words, *(cell_of(timing, way) for timing in timings))
    console.print(table)
    gains = [timing[SPECULATIVE].times(timing[PLAIN_NAME]) for timing in timings]
    said = " and ".join(f"{gain:.2f} times at batch {size}" for gain, size in zip(gains, DEMO_BATCHES, strict=True))
    summary = (
        f"\nHere speculative sampling was {said} as fast as plain generate (medians of {session.repeats} turns), "
    )
    console.print(Text(f"{summary}with the same distribution of texts.", "bold"), soft_wrap=True)
    console.print(Text(NEXT), soft_wrap=True)
    return runs


def same_text(session: "Session", prompts: list[str]) -> str:
    """A sentence that says whether plain generate and ours gave one text: greedily, or from one seed."""
    coupled = copy.copy(session.pair.strategy)
    coupled.verification = "coupled"
    plain, ours = (session.generate(prompts, **how)[1] for how in ({}, {"custom_generate": coupled}))
    sampled = session.options["do_sample"]
    how = f'From seed {session.seed}, verification="coupled"' if sampled else "Greedy speculative decoding"
    same = plain.tolist() == ours.tolist()
    verdict = "the same text, token by token" if same else "different texts (which rounding can do in half precision)"
    return f"{how} and plain generate gave {verdict}."


def time_ways(session: "Session", inputs: Inputs) -> dict[str, Timing]:
    """The runs of all ways that take a batch of this size."""
    pair, rows = session.pair, len(inputs["input_ids"])
    target, draft = pair.target, next(iter(pair.models[1:]), None)
    ways = {
        PLAIN_NAME: Contender(PLAIN_NAME, target),
        SPECULATIVE: Contender(SPECULATIVE, target, strategy=pair.strategy),
    }
    if rows == 1 and draft is not None and same_tokens(pair.tokenizer, pair.draft_tokenizer):
        ways[STOCK_NAME] = Contender(STOCK_NAME, target, draft)
    with progress(f"batch {rows}, all ways in turns", len(ways) * (1 + session.repeats)) as advance:
        seeds = range(session.seed, session.seed + session.repeats)
        return Timer(ways.__getitem__, [inputs], session.arguments, seeds, advance).time(tuple(ways))


def cell_of(timings: dict[str, Timing], way: str) -> str:
    """Tokens per second, and the speed compared with plain `generate`."""
    if way not in timings:
        return "does not take it"
    times = timings[way].times(timings[PLAIN_NAME])
    return f"{timings[way].tokens_per_second:.0f} tokens/s, {times:.2f} times"
