"""Processes that a launcher has started to do one piece of work together."""

import atexit
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env

from hf_specx.common.devices import in_group


def gathered(work: Callable[[], Iterable[Any]]) -> list[Any]:
    """The results of all processes, each of which does its part of the work; an error in one is raised in all."""
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
