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
    results, error = [], None
    try:
        results = list(work())
    except Exception as raised:  # the others wait for this part, so they must be told
        error = raised
    error_message = None if error is None else f"{type(error).__name__}: {error}"
    all_results = gather_object([(results, error_message)])
    if error is not None:
        raise error
    failures = [f"process {rank} failed with {message}" for rank, (_, message) in enumerate(all_results) if message]
    if failures:
        raise RuntimeError("; ".join(failures))
    return [result for part, _ in all_results for result in part]


def processes() -> PartialState:
    """The state of this process among those of `accelerate launch` or `torchrun`; without an accelerator it uses gloo.

    A process group that starts here is destroyed at exit; else the process may abort then (pytorch#190489).
    """
    had_group = in_group()
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())
    if in_group() and not had_group:
        atexit.register(state.destroy_process_group)
    return state
