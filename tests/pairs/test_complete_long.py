"""Very many prompts to a file: each exactly once, and memory does not grow with their number."""

import json
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from completing import SAMPLED, load, save

from hf_specx import DraftTargetPair
from hf_specx.cli.prompts import FilePrompts
from hf_specx.pairs.results_file import CompletedText, NumberedText


pytestmark = pytest.mark.slow

MIB = 2**20
PAGE = resource.getpagesize()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> DraftTargetPair:
    return load(save(tmp_path_factory.mktemp("pair")))


def in_memory() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def watched(texts: Iterable[str], seen: list[int]) -> Iterator[str]:
    """Texts that are made or read one by one; memory is looked at after every hundredth."""
    for number, text in enumerate(texts):
        if number % 100 == 0:
            seen.append(in_memory())
        yield text


def test_ten_thousand_prompts(pair: DraftTargetPair, tmp_path: Path):
    """From the thousandth prompt on, memory grows by less than 16 MiB: were each to leave one position's logits, which
    are 16 kB, it would be 140."""
    seen: list[int] = []
    texts = watched((f"x{number} = {'(' * (number % 23)}" for number in range(10_000)), seen)
    out = pair.complete(texts, out=tmp_path / "done.jsonl", **SAMPLED | {"max_new_tokens": 6, "batch_size": 16})
    assert [json.loads(line)["index"] for line in out.open()] == list(range(10_000))
    assert max(seen[10:]) - seen[10] < 16 * MIB


def test_a_million_lines_are_never_held(pair: DraftTargetPair, tmp_path: Path):
    """A file of 120 MB of which all but 64 prompts are done: what is kept of it is 8 bytes a prompt, less than 48 MiB
    with all that comes and goes."""
    prompts, out, number, seen = tmp_path / "prompts.txt", tmp_path / "done.jsonl", 10**6, [in_memory()]
    pair.complete(["x"], out=out, **SAMPLED)  # says what the results were made with
    with prompts.open("w") as given, out.open("wb") as done:
        for index in range(number):
            text = f"line {index} {'x' * 108}"
            given.write(f"{text}\n")
            if index % (number // 64) != 5:
                done.write(CompletedText(NumberedText(index, text), "y", "length").line())
    pair.complete(watched(FilePrompts(prompts), seen), out=out, **SAMPLED)
    assert max(seen) - seen[0] < 48 * MIB
    with out.open() as lines:
        assert all(json.loads(line)["index"] == index for index, line in enumerate(lines))
    assert index == number - 1
