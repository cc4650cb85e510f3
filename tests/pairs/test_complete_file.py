"""Prompts to a file: whatever happens to it or to the process, the same call completes it, to the same bytes."""

import copy
import errno
import fcntl
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from completing import MANY, SAMPLED
from tiny_tokenizer import tiny_tokenizer
from transformers import LogitsProcessor
from zoo import build

from hf_specx import DraftTargetPair
from hf_specx.engine.requests import Request
from hf_specx.pairs.results_file import (
    CompletedText,
    NumberedText,
    Results,
    check_results_path,
    open_results,
    parts_of,
)


TEXTS = MANY[:12]
PAGE = resource.getpagesize()


@pytest.fixture(scope="module")
def undisturbed(pair: DraftTargetPair, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a file that was completed at once."""
    return pair.complete(TEXTS, out=tmp_path_factory.mktemp("out") / "done.jsonl", **SAMPLED).read_bytes()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of the requests that were made, less that of the call."""
    indices: list[int] = []

    def noting(ids: list[int], seed: int) -> Request:
        if seed:  # else it only shows whether any can be completed
            indices.append(seed - SAMPLED["seed"])
        return Request(ids, seed=seed)

    monkeypatch.setattr("hf_specx.pairs.complete.Request", noting)
    return indices


LEFT = {  # what an interrupted call may leave of twelve lines, and the prompts that are still to be completed
    "nothing": (lambda lines: b"", range(12)),
    "half a line": (lambda lines: b"".join(lines[:7]) + lines[7][:30], range(7, 12)),
    "a line without its end": (lambda lines: b"".join(lines[:8])[:-1], range(7, 12)),
    "noise": (lambda lines: b"".join(lines[:7]) + b"\0\0\0", range(7, 12)),
    "the others, from the end": (lambda lines: b"".join(lines[:2:-1]), range(3)),
    "all": (b"".join, []),
}


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_it_goes_on_where_it_stopped(
    pair: DraftTargetPair, undisturbed: bytes, tmp_path: Path, requests: list[int], left: str, batch_size: int
):
    cut, missing = LEFT[left]
    out = pair.complete(TEXTS[:5], out=tmp_path / "done.jsonl", **SAMPLED)  # more prompts may follow
    out.write_bytes(cut(undisturbed.splitlines(keepends=True)))
    requests.clear()
    pair.complete(iter(TEXTS), out=out, batch_size=batch_size, **SAMPLED)
    assert out.read_bytes() == undisturbed
    assert sorted(requests) == list(missing)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (TEXTS, {"max_new_tokens": 13}, "with max_new_tokens=12, now with max_new_tokens=13"),
        (TEXTS, {"do_sample": False, "temperature": 0.5}, "made without temperature, now with temperature=0.5"),
        ([*TEXTS[:-1], "other"], {}, "prompt 11 is not the one"),
        (TEXTS[:11], {}, "12 results for 11 prompts, some of them for others"),
    ],
)
def test_a_file_of_other_prompts_or_options_is_refused(
    pair: DraftTargetPair, undisturbed: bytes, tmp_path: Path, texts: list[str], options: dict, message: str
):
    out = pair.complete(TEXTS, out=tmp_path / "done.jsonl", **SAMPLED)
    with pytest.raises(ValueError, match=message):
        pair.complete(texts, out=out, **SAMPLED | options)
    assert out.read_bytes() == undisturbed


def permuted(model: torch.nn.Module) -> None:
    """Reverse all numbers of each weight but the first 64."""
    for weight in model.parameters():
        weight.data = torch.cat([weight.flatten()[:64], weight.flatten()[64:].flip(0)]).view_as(weight)


def quantised(model: torch.nn.Module, scale: float) -> None:
    """Have the weights of linear layers in buffers, as GPTQ and AWQ do."""
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            weight = part.weight.detach() * scale
            del part.weight
            part.register_buffer("weight", weight)


@pytest.mark.parametrize("difference", ["behind the first numbers", "in buffers"])
def test_a_file_of_another_model_is_refused(pair: DraftTargetPair, tmp_path: Path, difference: str):
    models = [copy.deepcopy(pair.target) for _ in range(2)]
    if difference == "in buffers":
        for model, scale in zip(models, (1.0, -1.0), strict=True):
            quantised(model, scale)
    else:
        permuted(models[1])
    one, other = (DraftTargetPair(model, pair.draft, pair.tokenizer) for model in models)
    out = one.complete(TEXTS[:2], out=tmp_path / "done.jsonl", **SAMPLED)
    with pytest.raises(ValueError, match="models="):
        other.complete(TEXTS, out=out, **SAMPLED)


def test_a_file_of_somebody_else_is_left_alone(pair: DraftTargetPair, tmp_path: Path):
    out, content = tmp_path / "done.jsonl", '{"notes": "of mine"}\n'
    out.write_text(content)
    with pytest.raises(ValueError, match="done.jsonl.arguments"):
        pair.complete(TEXTS, out=out, **SAMPLED)
    assert list(tmp_path.iterdir()) == [out]
    (tmp_path / "done.jsonl.arguments").write_text("no JSON")
    with pytest.raises(ValueError, match=r"done.jsonl is no result"):
        pair.complete(TEXTS, out=out, **SAMPLED)
    assert out.read_text() == content


def test_a_broken_line_among_others_is_named(pair: DraftTargetPair, undisturbed: bytes, tmp_path: Path):
    out, lines = tmp_path / "done.jsonl", undisturbed.splitlines(keepends=True)
    pair.complete(TEXTS, out=out, **SAMPLED)
    for change, message in ((b"oops\n", "line 3 of .*done.jsonl is no result"), (lines[0], "a second result for")):
        out.write_bytes(b"".join([*lines[:2], change, *lines[2:]]))
        with pytest.raises(ValueError, match=message):
            pair.complete(TEXTS, out=out, **SAMPLED)
        assert out.read_bytes().count(b"\n") == 13


def test_without_results_a_file_may_be_begun_anew(pair: DraftTargetPair, undisturbed: bytes, tmp_path: Path):
    out = pair.complete(TEXTS, out=tmp_path / "done.jsonl", **SAMPLED | {"seed": 1})
    out.unlink()
    assert pair.complete(TEXTS, out=out, **SAMPLED).read_bytes() == undisturbed
    out.write_bytes(b"")
    (tmp_path / "done.jsonl.arguments").write_text('{"models": ["b4')  # cut when it was written
    assert pair.complete(TEXTS, out=out, **SAMPLED).read_bytes() == undisturbed


def test_a_full_disk_loses_nothing(pair: DraftTargetPair, tmp_path: Path):
    out, texts = tmp_path / "done.jsonl", [text * 2 for text in MANY]
    expected = pair.complete(texts, out=tmp_path / "expected.jsonl", **SAMPLED).read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(expected) // 2, before[1]))  # what is longer is written in part
    try:
        with pytest.raises(OSError, match=r"File too large.*\d+ results"):
            pair.complete(texts, out=out, **SAMPLED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    whole = [line for line in out.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert 0 < len(whole) < len(texts)
    assert set(whole) <= set(expected.splitlines(keepends=True))
    pair.complete(texts, out=out, **SAMPLED)
    assert out.read_bytes() == expected


def test_a_prompt_that_cannot_be_completed_does_not_keep_others(
    pair: DraftTargetPair, undisturbed: bytes, tmp_path: Path
):
    texts = [*TEXTS, "", "word " * 200, "half \ud800"]
    with pytest.warns(UserWarning, match="refused: 3"):
        out = pair.complete(texts, out=tmp_path / "done.jsonl", max_batch_tokens=200, **SAMPLED)
    lines = out.read_bytes().splitlines(keepends=True)
    assert b"".join(lines[:12]) == undisturbed
    refused = [json.loads(line) for line in lines[12:]]
    assert [line["text"] for line in refused] == [None] * 3
    assert refused[0]["error"] == refused[2]["error"]
    assert refused[0]["error"].startswith("the prompt has no tokens")
    assert "more than there is room for: max_batch_tokens=200" in refused[1]["error"]


class Banning(LogitsProcessor):
    """Looks at the text alone, but may keep state for all that is known of it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill((torch.arange(scores.shape[1]) - input_ids[:, -1:]) % 3 == 0, -float("inf"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"max_new_token": 3}, "max_new_token"),
        ({"logits_processor": [Banning()]}, "^Banning may keep state, and .* share it; "),
        ({"stopping_criteria": [Banning()]}, "^Banning may keep state, and .* share it; "),
    ],
)
def test_options_are_refused_before_any_prompt_is_taken(
    pair: DraftTargetPair, tmp_path: Path, requests: list[int], options: dict[str, Any], message: str
):
    """What may keep state would be shared, so that a text would depend on those beside it and before it."""
    for out in (tmp_path / "done.jsonl", None):
        with pytest.raises((ValueError, TypeError), match=message):
            pair.complete(TEXTS, **SAMPLED | options, out=out)
    assert requests == []
    assert not [*tmp_path.iterdir()]


def test_models_that_take_whole_batches(tmp_path: Path):
    """An encoder-decoder: no row of it can be filled again."""
    tokenizer, target = tiny_tokenizer(), build("seq2seq", "bart")
    target.resize_token_embeddings(len(tokenizer))
    pair = DraftTargetPair(target, target, tokenizer)
    with pytest.warns(UserWarning, match="refused: 1"):
        out = pair.complete(["the cat", "", "on"], out=tmp_path / "done.jsonl", batch_size=2, max_new_tokens=5)
    texts = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    first, last = pair.complete(["the cat", "on"], max_new_tokens=5)
    assert texts == [first, None, last]


def test_calls_in_one_process_keep_off_each_other(pair: DraftTargetPair, tmp_path: Path):
    out = tmp_path / "done.jsonl"

    def texts() -> Iterator[str]:
        yield "a"
        pair.complete(TEXTS, out=out, **SAMPLED)

    with pytest.raises(ValueError, match=f"done.jsonl is in use by process {os.getpid()} on"):
        pair.complete(texts(), out=out, **SAMPLED)
    pair.complete(["a"], out=out, **SAMPLED)


def test_a_file_that_is_taken_away_meanwhile(pair: DraftTargetPair, tmp_path: Path):
    out = tmp_path / "done.jsonl"

    def texts() -> Iterator[str]:
        yield from TEXTS[:6]
        out.unlink()
        yield from TEXTS[6:]

    with pytest.raises(ValueError, match="removed"):
        pair.complete(texts(), out=out, batch_size=1, **SAMPLED)


def test_a_link_stays_one_and_a_file_that_nobody_else_may_read(
    pair: DraftTargetPair, undisturbed: bytes, tmp_path: Path
):
    (tmp_path / "done.jsonl").touch(0o600)
    (tmp_path / "done.jsonl.arguments").touch()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "done.jsonl")
    pair.complete(TEXTS, out=tmp_path / "link.jsonl", **SAMPLED)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert (tmp_path / "done.jsonl").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "done.jsonl").read_bytes() == undisturbed


def numbered(texts: list[str]) -> list[NumberedText]:
    return [NumberedText(index, text) for index, text in enumerate(texts)]


def echoed(prompt: NumberedText) -> CompletedText:
    return CompletedText(prompt, prompt.text.replace("\ud800", "?"), "stop")


def fill(results: Results, prompts: list[NumberedText]) -> list[int]:
    """Write a result for each prompt that lacks one; returns their indices."""
    missing = [*results.missing(prompts)]
    for prompt in missing:
        results.append(echoed(prompt))
    return [prompt.index for prompt in missing]


def test_results_survive_whatever_they_hold(tmp_path: Path):
    """Each is written once."""
    prompts = numbered(["\u2028\x85\r\n", "\ud800 alone", "", '"}', "🙂"])
    with open_results(tmp_path / "done.jsonl", {}) as results:
        for prompt in results.missing(prompts):
            for _ in range(2):
                results.append(echoed(prompt))
        results.finish()
    assert {path.name for path in tmp_path.iterdir()} == {"done.jsonl", "done.jsonl.arguments", "done.jsonl.lock"}
    with open_results(tmp_path / "done.jsonl", {}) as results:
        assert [*results.missing(prompts)] == []
        assert results.count_of_share() == 5


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_another_number_of_processes_goes_on(tmp_path: Path, world_size: int):
    """Three processes have left a part of their shares, one of them half a line."""
    path, texts = tmp_path / "done.jsonl", list("abcdefghij")
    for rank, count in enumerate((5, 6, 10)):
        with open_results(path, {}, rank, 3) as results:
            fill(results, numbered(texts[:count]))
    with parts_of(path)[0].open("ab") as half:  # prompts 1 and 4
        half.write(echoed(numbered(texts)[7]).line()[:20])
    missing = []
    for rank in reversed(range(world_size)):  # the first one ends last
        with open_results(path, {}, rank, world_size) as results:
            share = fill(results, numbered(texts))
            assert all(index % world_size == rank for index in share)
            missing += share
            if rank == 0:
                results.finish()
    assert sorted(missing) == [6, 7, 9]
    assert path.read_bytes() == b"".join(echoed(prompt).line() for prompt in numbered(texts))
    assert {path.name for path in tmp_path.iterdir()} == {"done.jsonl", "done.jsonl.arguments", "done.jsonl.lock"}


def test_lines_that_were_taken_up_already_are_not_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first process was killed before it had removed the file that it took them from."""
    path, prompts = tmp_path / "done.jsonl", numbered(list("abcd"))
    for rank in (0, 1):
        with open_results(path, {}, rank, 2) as results:
            fill(results, prompts)
    with monkeypatch.context() as killed, open_results(path, {}, 0, 2) as results:
        killed.setattr(os, "fsync", mock.Mock(side_effect=KeyboardInterrupt))
        assert fill(results, prompts) == []
        with pytest.raises(KeyboardInterrupt):
            results.finish()
    assert len(parts_of(path)) == 1
    with open_results(path, {}) as results:
        assert fill(results, prompts) == []
        results.finish()
    assert path.read_bytes() == b"".join(echoed(prompt).line() for prompt in prompts)
    assert parts_of(path) == []


def test_a_file_of_a_process_is_not_gone_on_with_by_another_call(tmp_path: Path):
    """Also where the first process has written nothing."""
    path, prompts = tmp_path / "done.jsonl", numbered(list("abcd"))
    for rank in (0, 1):
        with open_results(path, {"seed": 1}, rank, 2) as results:
            fill(results, prompts if rank else [])
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        opened = open_results(path, {"seed": 2}, rank, world_size)
        with pytest.raises(ValueError, match="seed=1.*seed=2"), opened:
            pass
    with open_results(path, {"seed": 1}) as results, pytest.raises(ValueError, match="prompt 1"):
        fill(results, numbered(list("axcd")))
    (tmp_path / "done.jsonl.arguments").unlink()
    with pytest.raises(ValueError, match="done.jsonl.arguments"):
        check_results_path(path)


def test_a_process_is_told_that_the_first_one_ended_early(tmp_path: Path):
    path, prompts = tmp_path / "done.jsonl", numbered(list("abcd"))
    with open_results(path, {}, 0, 2):
        pass
    with open_results(path, {}, 1, 2) as results:
        fill(results, prompts)
    with pytest.raises(ValueError, match="first process ended"):
        results.wait_for_first()
    with open_results(path, {}, 0, 2) as first:
        assert [*first.missing(prompts)] == [prompts[0], prompts[2]]
        with pytest.raises(ValueError, match="2 results for 4"):
            first.finish()


def test_a_disk_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    opened = open_results(tmp_path / "done.jsonl", {})
    with pytest.raises(ValueError, match="locked"), opened:
        pass


def test_a_file_that_another_call_has_begun_anew_is_left_to_it(tmp_path: Path):
    """Its user has deleted all files, locks among them, and the first call still runs."""
    done = echoed(NumberedText(0, "x"))
    with open_results(tmp_path / "done.jsonl", {"seed": 1}) as one:
        assert [*one.missing([done.prompt])] == [done.prompt]
        for path in tmp_path.iterdir():
            path.unlink()
        with open_results(tmp_path / "done.jsonl", {"seed": 2}), pytest.raises(ValueError, match="anew"):
            one.append(done)
    assert (tmp_path / "done.jsonl").read_bytes() == b""


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
