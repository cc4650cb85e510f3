"""Real processes that complete prompts to a file: killed at random moments, in use by another one, of a launch."""

import random
import re
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from completing import MANY, SAMPLED, SECONDS, Gate, ended, launch, start
from counting import reads_only
from forking import context

from hf_specx import DraftTargetPair
from hf_specx.pairs.results_file import open_results, parts_of


@pytest.fixture(scope="module")
def undisturbed(pair: DraftTargetPair, folder: Path) -> bytes:
    """The bytes of a file that one process has completed at once."""
    return pair.complete(MANY, out=folder / "undisturbed.jsonl", **SAMPLED).read_bytes()


def lines(out: Path) -> int:
    """How many lines the files of all processes have, each counted once."""
    return len({line for each in files(out) for line in each.read_bytes().splitlines(True) if line.endswith(b"\n")})


def files(out: Path) -> list[Path]:
    return [each for each in (out, *parts_of(out)) if each.exists()]


def wait_for_lines(out: Path, number: int, process: BaseProcess) -> None:
    """Until a process has written so many lines, or has ended."""
    while lines(out) < number and process.is_alive():
        process.join(0.002)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(folder: Path, undisturbed: bytes, tmp_path: Path, kills: int):
    """A process is killed once it has got on, and another one is started in its place."""
    out, moments, hit = tmp_path / "done.jsonl", random.Random(kills), 0
    for _ in range(kills):
        victim = start(folder, out, batch_size=3)
        wait_for_lines(out, min(lines(out) + moments.randint(0, 3), len(MANY) - 1), victim)
        victim.join(moments.uniform(0, 0.01))
        victim.kill()
        hit += ended(victim) == -9
        assert lines(out) <= len(MANY)
    assert ended(start(folder, out, batch_size=3)) == 0
    assert out.read_bytes() == undisturbed
    assert hit >= kills / 2


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_one_of_several_is_killed_at_random_moments(folder: Path, undisturbed: bytes, tmp_path: Path, kills: int):
    """The others complete their shares and say that not all is done, or are killed too, as launchers do.

    Another number of processes goes on.
    """
    out, moments, hit = tmp_path / "done.jsonl", random.Random(kills), 0
    for number in range(kills):
        running = launch(folder, out, 2 + number % 2, batch_size=3)
        victim = running.pop(moments.randrange(len(running)))
        wait_for_lines(out, lines(out) + moments.randint(1, 3), victim)  # all have met by then
        victim.join(moments.uniform(0, 0.01))
        victim.kill()
        hit += ended(victim) == -9
        for process in running:
            if number % 3 != 1:
                process.kill()
            assert ended(process) in (0, 1, -9)
    assert [ended(process) for process in launch(folder, out, 2, batch_size=3)] == [0, 0]
    assert out.read_bytes() == undisturbed
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "done.jsonl",
        "done.jsonl.arguments",
        "done.jsonl.lock",
    ]
    assert hit >= 2


@pytest.mark.parametrize("dies", [False, True])
def test_a_second_call_is_told_who_writes_the_file(
    pair: DraftTargetPair, folder: Path, undisturbed: bytes, tmp_path: Path, dies: bool
):
    """Before any model runs; once the first one has ended, however it did, the same call goes on."""
    out, gate, forwards = tmp_path / "done.jsonl", Gate(), []
    first = start(folder, out, gate, batch_size=2)
    gate.taken.get(timeout=SECONDS)
    message = (
        rf"done\.jsonl is in use by process {first.pid} on \S+, since 2.*; wait until it has ended, or name another"
    )
    handle = pair.target.register_forward_pre_hook(reads_only(lambda *_: forwards.append(1)))
    for options in (SAMPLED, SAMPLED | {"seed": 6}):  # nor is the file begun anew by another call
        with pytest.raises(ValueError, match=message):
            pair.complete(MANY, out=out, **options)
    handle.remove()
    assert forwards == []
    assert [ended(process) for process in launch(folder, out, 2)] == [1, 1]
    first.kill() if dies else gate.open()
    assert ended(first) == (-9 if dies else 0)
    pair.complete(MANY, out=out, **SAMPLED)
    assert out.read_bytes() == undisturbed


def hold(out: Path, gate: Gate) -> None:
    with open_results(out, {"seed": 1}, rank=1, world_size=2):
        gate.pass_through(0)


def test_a_process_that_was_left_alone_keeps_its_file(tmp_path: Path):
    """The first process of its launch has ended: another call waits for it, whatever the number of its processes."""
    out, gate = tmp_path / "done.jsonl", Gate()
    with open_results(out, {"seed": 1}, world_size=2):
        pass
    other = context.Process(target=hold, args=(out, gate))
    other.start()
    gate.taken.get(timeout=SECONDS)
    message = rf"{re.escape(str(out))}\.rank1 is in use by process {other.pid} on"
    for rank, world_size in ((0, 1), (1, 2)):
        with pytest.raises(ValueError, match=message), open_results(out, {"seed": 1}, rank, world_size):
            pass
    gate.open()
    assert ended(other) == 0
    with open_results(out, {"seed": 2}) as results:
        results.finish()
    assert '"seed": 2' in (tmp_path / "done.jsonl.arguments").read_text()
