"""Ways to complete many prompts, in turns: `python scripts/many_prompts.py [TURNS [BATCH_SIZE [PAIR]]]`, one thread.

48 prompts of 32 tokens, sampled, with limits spread from 16 to 128 new tokens, and with limits that are all 72. Limits
stand for ends that nobody knows beforehand: a batch goes on to the largest in it, and only tokens within the limits
count. Compared are plain batches, our batches, our queue (`generate_many`) and transformers' own queue
(`generate_batch`, continuous batching, without speculation). Printed are the medians of tokens per second, and of the
ratios to plain batches of the same turn. `PAIR` is "embedded", or a grafted one such as "30M".
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig

from hf_specx import DraftTargetPair, Request, SpeculativeDecoding
from hf_specx.measure.inputs import BenchPair, load_bench_pair


PROMPTS, PROMPT_TOKENS, EVEN = 48, 32, 72
SPREAD = [16 + (number * 41) % 113 for number in range(PROMPTS)]  # 16 to 128, in no order
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}


class Ways:
    """The ways to complete prompts [N, L] ids up to the limits, each a function that returns its seconds."""

    def __init__(self, pair: BenchPair, batch_size: int):
        self.target: PreTrainedModel = pair.target
        self.batch_size = batch_size
        self.ids = pair.inputs(PROMPTS, PROMPT_TOKENS, 128, seed=0)["input_ids"]
        self.batched, self.queued = SpeculativeDecoding(pair.draft), SpeculativeDecoding(pair.draft)

    def all(self) -> dict[str, Callable[[list[int]], object]]:
        return {
            "plain batches": self.plain_batches,
            "our batches": self.our_batches,
            "our queue": self.our_queue,
            "generate_batch": self.generate_batch,
        }

    def _batches(self, limits: list[int], **options: Any) -> None:
        for first in range(0, PROMPTS, self.batch_size):
            rows = slice(first, first + self.batch_size)
            ids = self.ids[rows]
            given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max(limits[rows])}
            self.target.generate(ids, **given, **SAMPLED, **options)  # type: ignore[operator]

    def plain_batches(self, limits: list[int]) -> None:
        self._batches(limits)

    def our_batches(self, limits: list[int]) -> None:
        self._batches(limits, custom_generate=self.batched)

    def our_queue(self, limits: list[int]) -> None:
        asked = [Request(ids, limit) for ids, limit in zip(self.ids, limits, strict=True)]
        found = list(self.queued.generate_many(self.target, asked, batch_size=self.batch_size, **SAMPLED))
        assert sum(len(done.tokens) for done in found) == sum(limits)

    def generate_batch(self, limits: list[int]) -> None:
        config = GenerationConfig(**SAMPLED | {"max_new_tokens": max(limits)})
        blocks = ContinuousBatchingConfig(num_blocks=self.batch_size * 16, max_batch_tokens=256)
        given = {"generation_config": config, "continuous_batching_config": blocks}
        with self.target.continuous_batching_context_manager(**given) as manager:  # type: ignore[operator]
            for ids, limit in zip(self.ids.tolist(), limits, strict=True):
                manager.add_request(ids, max_new_tokens=limit)
            emitted, done = 0, 0
            while done < PROMPTS:
                result = manager.get_result(timeout=60)
                if result is not None and result.is_finished():
                    emitted, done = emitted + len(result.generated_tokens), done + 1
            assert emitted == sum(limits), emitted


def seconds(way: Callable[[list[int]], object], limits: list[int], seed: int) -> float:
    """The time of one call."""
    torch.manual_seed(seed)
    started = time.perf_counter()
    way(limits)
    return time.perf_counter() - started


def main() -> None:
    """Measure, and print a line for each way."""
    torch.set_num_threads(1)
    given = dict(zip(("turns", "batch_size", "pair"), sys.argv[1:], strict=False))
    turns, batch_size, name = (
        int(given.get("turns", 5)),
        int(given.get("batch_size", 8)),
        given.get("pair", "embedded"),
    )
    pair = load_bench_pair(name if name == "embedded" else f"grafted-{name}", "float32", [], load)
    ways = Ways(pair, batch_size).all()
    for told, limits in (("16 to 128", SPREAD), (f"all {EVEN}", [EVEN] * PROMPTS)):
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(-1, turns):  # the first warms up
            for name, way in ways.items():
                taken[name].append(seconds(way, limits, turn + 1))
        for name, times in taken.items():
            ratios = [plain / own for plain, own in zip(taken["plain batches"][1:], times[1:], strict=True)]
            speed = sum(limits) / statistics.median(times[1:])
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"limits {told}: {name:15} {speed:5.0f} tokens/s, {statistics.median(ratios):.2f} ({spread})")


def load(name: str, dtype: str) -> DraftTargetPair:
    """The pair in the package."""
    return DraftTargetPair.embedded()


if __name__ == "__main__":
    main()
