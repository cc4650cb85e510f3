"""What looking for suffixes costs: `python scripts/suffix_cost.py [POOL_TOKENS]`; some minutes on a CPU.

32 rows of 4,000 tokens are looked for in one another and in a pool of 10 million tokens, round by round, beside a
forward of a target of 163M parameters over the same rows. Tokens are those of the standard library's source, so that
matches are what they are in text. Printed are medians of a round, and the memory of the pool.
"""

import resource
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from hf_specx import DraftTargetPair, SuffixDraft, SuffixPool
from hf_specx.bench.grafted import graft
from hf_specx.bench.recipes import RECIPES
from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Judgement
from hf_specx.drafting.drafter import Reading
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.rules import GreedyRule


ROWS, LENGTH, ROUNDS, CANDIDATES = 32, 4000, 100, 8


class Never:
    """No row ends."""

    def cut(self, batch: Batch, tokens: list[list[int]], num_new: list[int]) -> tuple[list[int], list[bool]]:
        return num_new, [False] * len(num_new)

    def update(self, batch: Batch, new: list[int], ended: list[bool]) -> list[int]:
        return []


def library(tokens: int) -> list[list[int]]:
    """Token ids of the standard library's files, again and again with other ids until there are enough."""
    tokenizer = DraftTargetPair.embedded().tokenizer
    assert tokenizer is not None
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    known = [tokenizer(file.read_text(errors="replace"))["input_ids"] for file in files]
    texts, shift = list(known), 0
    while sum(map(len, texts)) < tokens:
        shift += 1
        texts += [[(token + shift) % len(tokenizer) for token in text] for text in known]
    return texts


def judged(draft: Draft, following: torch.Tensor) -> Judgement:
    """Candidates are kept as far as they are what follows, [R, K + 1]."""
    same = (draft.tokens == following[:, : draft.tokens.shape[1]]).cumprod(-1)
    accepted = torch.minimum(same.sum(-1), torch.tensor(draft.lengths))
    none = torch.zeros(draft.tokens.shape)
    undefined = torch.zeros(len(following), draft.tokens.shape[1] + 1, dtype=torch.bool)
    return Judgement(accepted, following.gather(1, accepted[:, None])[:, 0], none, none, undefined)


def main() -> None:
    """Measure, and print a line for each figure."""
    torch.set_num_threads(1)
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    texts = library(wanted + ROWS * 2 * LENGTH)
    flat = torch.tensor([token for text in texts[:200] for token in text][: ROWS * 2 * LENGTH]).view(ROWS, -1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool, started = SuffixPool(max_tokens=wanted), time.perf_counter()
    pool.add(*texts[200:])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(
        f"pool: {wanted} tokens in {time.perf_counter() - started:.1f} s, at most {grown / wanted:.0f} bytes a token"
    )
    draft, batch = SuffixDraft(CANDIDATES, pool=pool), Batch(flat[:, :LENGTH], None, 0)
    no_target: Any = None  # suffixes are found in the text alone
    draft.read(Reading(batch, no_target, int(flat.max()) + 1, GreedyRule(), Processors([])))
    seconds, kept = [], 0
    for _ in range(ROUNDS):
        started = time.perf_counter()
        proposed = draft.propose(batch, [CANDIDATES] * ROWS)
        seconds.append(time.perf_counter() - started)
        columns = torch.tensor(batch.counts)[:, None] + LENGTH + torch.arange(proposed.tokens.shape[1] + 1)
        proposed = batch.take(proposed)
        done = batch.append(proposed, judged(proposed, flat.gather(1, columns)), Never())
        started = time.perf_counter()
        draft.observe(done)
        seconds[-1] += time.perf_counter() - started
        kept += sum(done.accepted)
    lookup = statistics.median(seconds)
    target = graft(RECIPES["163M"])[0]
    ids = torch.randint(3, target.config.vocab_size, (ROWS, LENGTH // 16))  # its first forward is not measured
    with torch.no_grad():
        cache = target(ids, use_cache=True, logits_to_keep=1).past_key_values
        forwards = []
        for _ in range(5):
            started = time.perf_counter()
            cache = target(ids[:, :1], past_key_values=cache, use_cache=True).past_key_values
            forwards.append(time.perf_counter() - started)
    forward = statistics.median(forwards)
    print(f"lookup of {ROWS} rows: {1e3 * lookup:.2f} ms a round, {1e6 * lookup / ROWS:.0f} us a row, {kept} kept")
    print(f"forward of the 163M target, one token a row after {LENGTH // 16}: {1e3 * forward:.0f} ms")
    print(f"lookup / forward: {100 * lookup / forward:.2f} %")


if __name__ == "__main__":
    main()
