"""Ways to complete many prompts, in turns: `python scripts/many_prompts.py [TURNS [BATCH_SIZE [PAIR [PROMPTS]]]]`.

48 prompts of 32 tokens, sampled, with limits spread from 16 to 128 new tokens, and with limits that are all 72; one
thread. Limits stand for ends that nobody knows beforehand: a batch goes on to the largest in it, and only tokens
within the limits count. Compared are plain batches, our batches, our queue (`generate_many`), the same with compiled
forwards and a fixed number of candidates, and transformers' own queue (`generate_batch`, continuous batching, without
speculation). Forwards are timed and compiled in a turn before those that count.

Printed are the medians of tokens per second, and of the ratios to plain batches of the same turn. For our queues there
is also the share of what their forwards allow: the time of bare forwards that read the prompts in whole batches and
then emit all tokens in rounds of whole batches, at the tokens and the candidates a round that the call had, over its
own time. What is missing to 1 are rounds in which few rows are left, prompts that are read one by one, and all else
that is no forward. `PAIR` is "embedded", or a grafted one such as "30M".
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig

from hf_specx import DraftTargetPair, Request, SpeculativeDecoding
from hf_specx.bench.bare import BareModel
from hf_specx.bench.inputs import BenchPair, load_bench_pair


PROMPT_TOKENS, EVEN = 32, 72
CANDIDATES = 4  # where forwards are compiled, since another number would compile another forward
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}


class Ways:
    """The ways to complete prompts [N, L] ids up to the limits."""

    def __init__(self, pair: BenchPair, batch_size: int, prompts: int):
        self.target: PreTrainedModel = pair.target
        self.draft: PreTrainedModel = pair.draft
        self.batch_size = batch_size
        self.ids = pair.inputs(prompts, PROMPT_TOKENS, 128, seed=0)["input_ids"]
        self.batched, self.queued = SpeculativeDecoding(pair.draft), SpeculativeDecoding(pair.draft)
        self.compiled = SpeculativeDecoding(pair.draft, compile=True, num_draft_tokens=CANDIDATES)
        for strategy in (self.batched, self.queued):
            strategy.calibrate(self.target, self.ids[:batch_size])

    def all(self) -> dict[str, Callable[[list[int]], object]]:
        return {
            "plain batches": self.plain_batches,
            "our batches": self.our_batches,
            "our queue": partial(self.our_queue, self.queued),
            "our queue, compiled": partial(self.our_queue, self.compiled),
            "generate_batch": self.generate_batch,
        }

    def _batches(self, limits: list[int], **options: Any) -> None:
        for first in range(0, len(limits), self.batch_size):
            rows = slice(first, first + self.batch_size)
            ids = self.ids[rows]
            given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max(limits[rows])}
            self.target.generate(ids, **given, **SAMPLED, **options)  # type: ignore[operator]

    def plain_batches(self, limits: list[int]) -> None:
        self._batches(limits)

    def our_batches(self, limits: list[int]) -> None:
        self._batches(limits, custom_generate=self.batched)

    def our_queue(self, strategy: SpeculativeDecoding, limits: list[int]) -> None:
        asked = [Request(ids, limit) for ids, limit in zip(self.ids, limits, strict=True)]
        found = list(strategy.generate_many(self.target, asked, batch_size=self.batch_size, **SAMPLED))
        assert sum(len(done.tokens) for done in found) == sum(limits)

    def generate_batch(self, limits: list[int]) -> None:
        config = GenerationConfig(**SAMPLED | {"max_new_tokens": max(limits)})
        blocks = ContinuousBatchingConfig(num_blocks=self.batch_size * 16, max_batch_tokens=256)
        given = {"generation_config": config, "continuous_batching_config": blocks}
        with self.target.continuous_batching_context_manager(**given) as manager:  # type: ignore[operator]
            for ids, limit in zip(self.ids.tolist(), limits, strict=True):
                manager.add_request(ids, max_new_tokens=limit)
            emitted, done = 0, 0
            while done < len(limits):
                result = manager.get_result(timeout=60)
                if result is not None and result.is_finished():
                    emitted, done = emitted + len(result.generated_tokens), done + 1
            assert emitted == sum(limits), emitted


def allowed(ways: Ways, rows: int) -> float:
    """Seconds of bare forwards for what the last queue has done, if all of its rounds had `rows` rows."""
    report = ways.queued.report
    assert report is not None
    number = round(report.mean_draft_tokens)
    step = forward_seconds(ways.target, rows, number + 1) + number * forward_seconds(ways.draft, rows, 1)
    read = sum(forward_seconds(model, rows, PROMPT_TOKENS, held=0) for model in (ways.target, ways.draft))
    return len(ways.ids) / rows * read + report.emitted / report.mean_acceptance_length / rows * step


@torch.no_grad()
def forward_seconds(model: PreTrainedModel, rows: int, count: int, held: int = 64) -> float:
    """Seconds of a forward of `count` tokens in each of `rows` rows after `held` others."""
    taken = []
    for _ in range(9):
        bare = BareModel(model)
        if held:
            bare.forward(torch.ones(rows, held, dtype=torch.int64), 1)
        started = time.perf_counter()
        bare.forward(torch.ones(rows, count, dtype=torch.int64), count if held else 1)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def seconds(way: Callable[[list[int]], object], limits: list[int], seed: int) -> float:
    """The time of one call."""
    torch.manual_seed(seed)
    started = time.perf_counter()
    way(limits)
    return time.perf_counter() - started


def main() -> None:
    """Measure, and print a line for each way."""
    torch.set_num_threads(1)
    given = dict(zip(("turns", "batch_size", "pair", "prompts"), sys.argv[1:], strict=False))
    turns, batch_size, prompts = (
        int(given.get(*default)) for default in (("turns", 5), ("batch_size", 8), ("prompts", 48))
    )
    name = str(given.get("pair", "embedded"))
    pair = load_bench_pair(name if name == "embedded" else f"grafted-{name}", "float32", load)
    ways = Ways(pair, batch_size, prompts)
    spread = [16 + (number * 41) % 113 for number in range(prompts)]  # 16 to 128, in no order
    for told, limits in (("16 to 128", spread), (f"all {EVEN}", [EVEN] * prompts)):
        taken: dict[str, list[float]] = {name: [] for name in ways.all()}
        for turn in range(-1, turns):  # the first warms up
            for name, way in ways.all().items():
                taken[name].append(seconds(way, limits, turn + 1))
        for name, times in taken.items():
            ratios = [plain / own for plain, own in zip(taken["plain batches"][1:], times[1:], strict=True)]
            speed, ends = sum(limits) / statistics.median(times[1:]), f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"limits {told}: {name:19} {speed:5.0f} tokens/s, {statistics.median(ratios):.2f} ({ends})", flush=True
            )
        share = allowed(ways, batch_size) / statistics.median(taken["our queue"][1:])
        print(f"limits {told}: our queue has {share:.2f} of what its forwards allow", flush=True)


def load(name: str, dtype: str) -> DraftTargetPair:
    """The pair in the package."""
    return DraftTargetPair.embedded()


if __name__ == "__main__":
    main()
