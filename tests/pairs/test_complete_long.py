"""Very many prompts to a file: each exactly once, and memory does not grow with their number."""

import json
import resource
from collections.abc import Iterator
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


class Watched:
    """Texts that are made or read one by one; memory is looked at after every hundredth from `first` on."""

    def __init__(self, texts, first: int):
        self.texts, self.first = texts, first
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[str]:
        for number, text in enumerate(self.texts):
            if number >= self.first and number % 100 == 0:
                self.seen.append(in_memory())
            yield text

    @property
    def grown(self) -> int:
        return max(self.seen) - self.seen[0]


def test_ten_thousand_prompts(pair: DraftTargetPair, tmp_path: Path):
    """From the thousandth prompt on, memory grows by less than 16 MiB: were each to leave one position's logits, which
    are 16 kB, it would be 140."""
    texts = Watched((f"x{number} = {'(' * (number % 23)}" for number in range(10_000)), first=1000)
    out = pair.complete(texts, out=tmp_path / "done.jsonl", **SAMPLED | {"max_new_tokens": 6, "batch_size": 16})
    assert [json.loads(line)["index"] for line in out.open()] == list(range(10_000))
    assert texts.grown < 16 * MIB
    assert pair.report.accepted > 0


def test_a_million_lines_are_never_held(pair: DraftTargetPair, tmp_path: Path):
    """A file of 120 MB of which all but 64 prompts are done: what is kept of it is 8 bytes a prompt, less than 48 MiB
    with all that comes and goes."""
    prompts, out, number = tmp_path / "prompts.txt", tmp_path / "done.jsonl", 10**6
    pair.complete(["x"], out=out, **SAMPLED)  # says what the results were made with
    with prompts.open("w") as given, out.open("wb") as done:
        for index in range(number):
            text = f"line {index} {'x' * 108}"
            given.write(f"{text}\n")
            if index % (number // 64) != 5:
                done.write(CompletedText(NumberedText(index, text), "y", "length").line())
    assert prompts.stat().st_size > 118_000_000
    texts = Watched(FilePrompts(prompts), first=0)
    before = in_memory()
    pair.complete(texts, out=out, **SAMPLED)
    assert max(texts.seen) - before < 48 * MIB
    with out.open() as lines:
        assert all(json.loads(line)["index"] == index for index, line in enumerate(lines))
    assert index == number - 1
