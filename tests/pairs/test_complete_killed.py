"""Real processes that share a file: killed at random moments, made slow, left alone by the others."""

import random
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from completing import MANY, SAMPLED, SECONDS, Gate, ended, start
from forking import context

from hf_specx import DraftTargetPair
from hf_specx.pairs.results_file import open_results


@pytest.fixture(scope="module")
def undisturbed(pair: DraftTargetPair, folder: Path) -> bytes:
    """The bytes of a file that one process has completed at once."""
    return pair.complete(MANY, out=folder / "undisturbed.jsonl", **SAMPLED).read_bytes()


def lines(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def wait_for_lines(out: Path, number: int, process: BaseProcess) -> None:
    """Until a process has written so many lines, or has ended."""
    while lines(out) < number and process.is_alive():
        process.join(0.002)


@pytest.mark.parametrize(
    ("kills", "processes"),
    [(3, 1), (3, 2), pytest.param(20, 1, marks=pytest.mark.slow), pytest.param(20, 3, marks=pytest.mark.slow)],
)
def test_killed_at_random_moments(folder: Path, undisturbed: bytes, tmp_path: Path, kills: int, processes: int):
    """One after another is killed once it has got on, and another one is started in its place."""
    out, moments, hit = tmp_path / "done.jsonl", random.Random(kills), 0
    running = [start(folder, out, batch_size=3) for _ in range(processes)]
    for _ in range(kills):
        victim = running.pop(0)
        wait_for_lines(out, min(lines(out) + moments.randint(0, 3), len(MANY) - 1), victim)
        victim.join(moments.uniform(0, 0.01))
        victim.kill()
        hit += ended(victim) == -9
        assert lines(out) <= len(MANY)
        running.append(start(folder, out, batch_size=3))
    assert [ended(process) for process in running] == [0] * processes
    assert out.read_bytes() == undisturbed
    assert hit >= kills / 2


@pytest.mark.parametrize("dies", [False, True])
def test_others_take_what_a_slow_process_leaves(folder: Path, undisturbed: bytes, tmp_path: Path, dies: bool):
    """It is stopped in its first forward, and the other one completes all prompts but those that it has taken."""
    out, gate = tmp_path / "done.jsonl", Gate()
    slow = start(folder, out, gate, batch_size=2)
    taken = gate.taken.get(timeout=SECONDS)
    assert taken <= 2 + 1
    fast = start(folder, out, batch_size=8)
    wait_for_lines(out, len(MANY) - taken, fast)
    assert slow.is_alive()
    assert fast.is_alive()  # it waits for the rest
    assert lines(out) == len(MANY) - taken
    slow.kill() if dies else gate.open()
    assert (ended(slow), ended(fast)) == (-9 if dies else 0, 0)
    assert out.read_bytes() == undisturbed


def hold(out: Path, gate: Gate) -> None:
    with open_results(out, {"seed": 1}):
        gate.pass_through(0)


def test_nobody_begins_a_file_anew_that_another_process_is_at(tmp_path: Path):
    """Not even before it has taken a prompt."""
    out, gate = tmp_path / "done.jsonl", Gate()
    other = context.Process(target=hold, args=(out, gate))
    other.start()
    gate.taken.get(timeout=SECONDS)
    with pytest.raises(ValueError, match="was made with seed=1, now with seed=2"), open_results(out, {"seed": 2}):
        pass
    gate.open()
    assert ended(other) == 0
    with open_results(out, {"seed": 2}):
        assert '"seed": 2' in (tmp_path / "done.jsonl.arguments").read_text()
