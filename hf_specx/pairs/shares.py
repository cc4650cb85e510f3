"""Processes that complete prompts together: each takes the next one when it has room for it."""

import atexit
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from torch.distributed.distributed_c10d import _get_default_store

from hf_specx.common.errors import require
from hf_specx.engine.ranks import in_group

from .results import NumberedText
from .results_file import ResultsFile


LOOK_EVERY = 0.2  # seconds, at the end, for prompts that other processes leave
CALLS = itertools.count()  # of `turns`, the same on every process


class Claims:
    """The prompts of a file that are left to this process; iterate again while `left`.

    Args:
        texts: all prompts, read one by one as they are needed; the same on every process.
        results: where results are.

    Attributes:
        count: prompts that were read.
    """

    def __init__(self, texts: Iterable[str], results: ResultsFile):
        self.texts, self.results, self.count = iter(texts), results, 0
        self.ended = False
        self.elsewhere: list[NumberedText] = []  # other processes were at them

    def __iter__(self) -> Iterator[NumberedText]:
        """Those that nobody is at, each locked for this process."""
        for text in self.texts:
            require(isinstance(text, str), f"prompt {self.count} is of type {type(text).__name__}; give strings.")
            prompt = NumberedText(self.count, text)
            self.count += 1
            if self.results.claim(prompt):
                yield prompt
            elif not self.results.is_done(prompt):
                self.elsewhere = [*self._open(), prompt]
        self.ended = True
        for prompt in self.elsewhere:
            if self.results.claim(prompt):
                yield prompt

    def _open(self) -> list[NumberedText]:
        return [prompt for prompt in self.elsewhere if not self.results.is_done(prompt)]

    def left(self) -> bool:
        """Whether a prompt has no result yet; those that other processes are at are waited for, for a while."""
        self.results.read_on()
        self.elsewhere = self._open()
        if self.ended and self.elsewhere:
            time.sleep(LOOK_EVERY)
        return not self.ended or bool(self.elsewhere)


def turns(count: int) -> Iterator[int]:
    """The numbers below `count`, each for the one process that comes to it first."""
    state, key = processes(), f"hf_specx/turns/{next(CALLS)}"
    if not in_group():  # one process, or several on a kind of device that torch has no group for
        return iter(range(state.process_index, count, state.num_processes))
    store = _get_default_store()
    return itertools.takewhile(lambda number: number < count, (store.add(key, 1) - 1 for _ in itertools.count()))


def gathered(work: Callable[[], Iterable[Any]]) -> list[Any]:
    """The results of all processes, each of which does its part of the work.

    Args:
        work: gives any number of results.

    Raises:
        Exception: the process's own error, as it was.
        RuntimeError: another process failed.
    """
    processes()
    done, error = [], None
    try:
        done = list(work())
    except Exception as raised:  # the others wait for this part, so they must be told
        error = raised
    every = gather_object([(done, None if error is None else f"{type(error).__name__}: {error}")])
    if error is not None:
        raise error
    failed = [f"process {number} failed with {message}" for number, (_, message) in enumerate(every) if message]
    if failed:
        raise RuntimeError("; ".join(failed))
    return [item for part, _ in every for item in part]


def processes() -> PartialState:
    """The state of this process among those of `accelerate launch` or `torchrun`; without an accelerator it uses gloo.

    A process group that starts here is destroyed at exit; else the process may abort then (pytorch#190489).
    """
    found = in_group()
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())
    if in_group() and not found:
        atexit.register(state.destroy_process_group)
    return state
