"""Processes forked from one that has made the imports and has no threads, so that they start in a moment."""

import multiprocessing
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch.multiprocessing import start_processes


RANKS = 2

PRELOADED = ["hf_specx.pairs.pair", "transformers.models.llama.modeling_llama"]  # none of the modules beside tests
assert all(map(find_spec, PRELOADED)), "what is not there is passed over in silence"

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOADED)


def run_on_ranks(function: Callable[..., None], *args: Any) -> None:
    """Call a module's function on each rank, with its number before the other arguments, and wait for all of them."""
    start_processes(function, args, RANKS, start_method="forkserver")
