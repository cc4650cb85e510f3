"""Very many prompts to a file: each exactly once, and memory does not grow with their number."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from completing import SAMPLED

from hf_specx import DraftTargetPair


PAGE = resource.getpagesize()


@pytest.mark.slow
def test_ten_thousand_prompts(pair: DraftTargetPair, tmp_path: Path):
    """From the thousandth prompt on, memory grows by less than 16 MiB: were each to leave one position's logits, which
    are 16 kB, it would be 140."""
    seen: list[int] = []  # bytes in memory, after every hundredth

    def texts() -> Iterator[str]:
        for number in range(10_000):
            if number % 100 == 0:
                seen.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE)
            yield f"x{number} = {'(' * (number % 23)}"

    out = pair.complete(texts(), out=tmp_path / "done.jsonl", **SAMPLED | {"max_new_tokens": 6, "batch_size": 16})
    assert [json.loads(line)["index"] for line in out.open()] == list(range(10_000))
    assert max(seen[10:]) - seen[10] < 16 * 2**20
