"""What "auto" comes to: beside plain `generate` where drafts do not pay, and beside each fixed number where they do.

    python scripts/auto.py [useless queue paying alike long windows] [--turns 12] [--compile]

"alike" is a queue of 24 requests for 32 new tokens that begin with the same 400, "long" prompts of 1,000 tokens.
"windows" has, of a model whose layers see 128 tokens, a step of plain `generate` and a round of 5 candidates, behind
prompts of 500 and of 4,000 tokens; with --compile the round is compiled.
Methods take turns on the same random prompts, in one process and thread, and seconds are those that the thread has
worked for, so that other work on the machine counts little. Each figure is of the turns from the fourth call on: the
mean of a call, since texts that are drawn take more or fewer rounds by chance, and the median of a round.
"""

import argparse
import statistics
import time
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from grafted import RECIPES, graft

from hf_specx import Costs, DraftTargetPair, SpeculativeDecoding, SuffixDraft


QUEUES = ("queue", "alike")
USELESS = ("30M-unrelated", "30M-self", "3M-unrelated", "suffix")
PAYING = ("embedded", "30M-low", "30M-deep")
NUMBERS = range(1, 9)
FIRST, PROMPT, NEW_TOKENS, QUEUED = 3, 32, 64, 3  # calls that are not counted; tokens; batches of a queue
WINDOWS = {"30M-window, 500": 500, "30M-window, 4000": 4000}  # tokens of prompts
LONG, ALIKE, OWN = 1000, 400, 20  # tokens of prompts, of what all begin with, and after it
OPTIONS: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS}
OPTIONS |= {"eos_token_id": None, "pad_token_id": 0}


@cache
def models(pair: str) -> tuple[Any, Any]:
    """Target and draft; suffixes of random text are looked for with the target of the pair in the package."""
    source: Any = graft(RECIPES[pair]) if pair in RECIPES else DraftTargetPair.embedded()
    return source.target, SuffixDraft() if pair == "suffix" else source.draft


def prompts(pair: str, rows: int, turn: int) -> torch.Tensor:
    """Those of the pair in the package; for others random tokens."""
    if pair == "embedded":
        embedded: Any = DraftTargetPair.embedded()
        texts = [embedded.prompts[(turn + row) % len(embedded.prompts)] for row in range(rows)]
        return torch.tensor([(embedded.tokenizer(text)["input_ids"] * PROMPT)[:PROMPT] for text in texts])
    generator = torch.Generator().manual_seed(turn)
    return torch.randint(3, models(pair)[0].config.vocab_size, (rows, PROMPT), generator=generator)


def from_file(part: str, rows: int, turn: int) -> torch.Tensor:
    """Long prompts, or such as begin alike, from the texts of the pair in the package."""
    embedded: Any = DraftTargetPair.embedded()
    ids = [token for prompt in embedded.prompts for token in embedded.tokenizer(prompt)["input_ids"]]
    text = torch.tensor(ids * 4)
    if part == "long":
        return torch.stack([text[37 * turn + 101 * row :][:LONG] for row in range(rows)])
    shared_prefix = text[37 * turn :][:ALIKE]
    firsts = range(11 * turn, 11 * turn + 29 * rows, 29)
    return torch.stack([torch.cat([shared_prefix, text[first:][:OWN]]) for first in firsts])


def seconds(pair: str, strategy: SpeculativeDecoding | None, ids: torch.Tensor, rows: int, part: str) -> float:
    """Seconds of completing all prompts, `rows` at once, with a strategy or plainly."""
    options = OPTIONS | ({"max_new_tokens": NEW_TOKENS // 2} if part == "alike" else {})
    target, started = models(pair)[0], time.thread_time()
    if part in QUEUES and strategy is not None:
        list(strategy.generate_many(target, ids.tolist(), batch_size=rows, **options))
        return time.thread_time() - started
    for batch in ids.split(rows):
        target.generate(batch, attention_mask=torch.ones_like(batch), custom_generate=strategy, **options)
    return time.thread_time() - started


def cell(pair: str, rows: int, part: str, turns: int) -> dict[str, float]:
    """Mean seconds by each strategy."""
    draft = models(pair)[1]
    strategies: dict[str, Any] = {"plain": None}
    strategies["auto"] = SpeculativeDecoding(draft, costs=Costs(clock=time.thread_time))
    if part == "paying":
        strategies |= {str(number): SpeculativeDecoding(draft, num_draft_tokens=number) for number in NUMBERS}
    times: dict[str, list[float]] = {name: [] for name in strategies}
    names = list(strategies)
    make_prompts = partial(from_file, part) if part in ("alike", "long") else partial(prompts, pair)
    for turn in range(turns):
        ids = make_prompts(rows * (QUEUED if part in QUEUES else 1), turn)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            torch.manual_seed(turn)
            times[name].append(seconds(pair, strategies[name], ids, rows, part))
    return {name: statistics.fmean(of_calls[FIRST:]) for name, of_calls in times.items()}


def rounds(length: int, rows: int, turns: int, compile: bool) -> dict[str, float]:
    """Median seconds of a step, and of a round, behind prompts of a length."""
    target, draft = models("30M-window")
    strategy, times = SpeculativeDecoding(draft, num_draft_tokens=5, compile=compile), list[float]()
    clock: Any = SimpleNamespace(observe=lambda _: times.append(time.thread_time()), end=list)
    clock.put, strategy.listeners = clock.observe, (clock,)  # `generate` streams each step to it
    arguments: dict[str, Any] = {"plain": {"streamer": clock}, "auto": {"custom_generate": strategy}}
    steps: dict[str, list[float]] = {"plain": [], "auto": []}
    for turn in range(turns):
        generator = torch.Generator().manual_seed(turn)
        ids = torch.randint(3, target.config.vocab_size, (rows, length), generator=generator)
        for name in steps:
            times.clear()
            target.generate(ids, attention_mask=torch.ones_like(ids), **arguments[name], **OPTIONS)
            steps[name] += [after - before for before, after in pairwise(times[1:])]
    return {name: statistics.median(of_steps) for name, of_steps in steps.items()}


def main() -> None:
    """Print a row for each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["useless", "queue", "paying"])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--pair", nargs="+", help="only these")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| part | pair | batch | plain, ms | auto, ms | plain / auto | best fixed / auto |\n" + "| --- " * 7 + "|")
    for part in arguments.parts:
        chosen = {"paying": PAYING, "alike": ("embedded",), "long": ("embedded",), "windows": tuple(WINDOWS)}
        for pair in chosen.get(part, USELESS):
            if arguments.pair and pair not in arguments.pair:
                continue
            for rows in arguments.batch:
                if pair in WINDOWS:
                    means = rounds(WINDOWS[pair], rows, arguments.turns, arguments.compile)
                else:
                    means = cell(pair, rows, part, arguments.turns)
                plain, auto = means["plain"], means["auto"]
                best = min(means.keys() - {"plain", "auto"}, key=means.__getitem__, default="")
                fixed = f"{means[best] / auto:.3f} ({best})" if best else "-"
                times = f"{1e3 * plain:.0f} | {1e3 * auto:.0f} | {plain / auto:.3f} | {fixed}"
                print(f"| {part} | {pair} | {rows} | {times} |", flush=True)


if __name__ == "__main__":
    main()
