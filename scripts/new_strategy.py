"""What a new strategy in each call is worth: `python scripts/new_strategy.py [TURNS [TOKENS ...]]`; minutes on a CPU.

Plain `generate`, a new `SpeculativeDecoding(draft)` in each call, and one that is kept take turns on the embedded
pair, at batch 1 and 8, with 32, 64 and 256 new tokens unless others are named. Figures are medians over turns, and
each ratio is taken within its turn.
"""

import statistics
import sys
import time

import torch

from hf_specx import DraftTargetPair, SpeculativeDecoding
from hf_specx.bench.inputs import encode


BATCHES, LENGTHS, TURNS = (1, 8), (32, 64, 256), 10


def measure(pair: DraftTargetPair, batch: int, tokens: int, turns: int) -> str:
    """Times of one batch size and length, as a line."""
    assert pair.tokenizer is not None
    inputs = encode(pair.tokenizer, pair.target, pair.prompts[:batch], tokens)
    options = {"do_sample": True, "top_k": 0, "min_new_tokens": tokens, "max_new_tokens": tokens}
    kept, seconds = SpeculativeDecoding(pair.draft), dict[str, list[float]]()
    for turn in range(-1, turns):  # the first warms up
        ways = {"plain": None, "new": SpeculativeDecoding(pair.draft), "kept": kept}
        names = list(ways)[turn % 3 :] + list(ways)[: turn % 3]
        for name in names:
            torch.manual_seed(turn)
            started = time.perf_counter()
            pair.target.generate(**inputs, **options, custom_generate=ways[name])  # type: ignore[operator]
            if turn >= 0:
                seconds.setdefault(name, []).append(time.perf_counter() - started)
    plain, new, old = (seconds[name] for name in ("plain", "new", "kept"))
    over_plain, over_kept = ([x / y for x, y in zip(a, new, strict=True)] for a in (plain, old))
    return (
        f"batch {batch}, {tokens} tokens: plain {statistics.median(plain):.2f} s, new {statistics.median(new):.2f} s; "
        f"new is {statistics.median(over_plain):.2f} times as fast as plain, "
        f"{statistics.median(over_kept):.2f} times as fast as a kept one"
    )


def main() -> None:
    """Print a line for each batch size and length."""
    given = [int(word) for word in sys.argv[1:]]
    pair = DraftTargetPair.embedded()
    for batch in BATCHES:
        for tokens in given[1:] or LENGTHS:
            print(measure(pair, batch, tokens, given[0] if given else TURNS), flush=True)


if __name__ == "__main__":
    main()
