"""Processes forked from one that has made the imports and has no threads, so that they start in a moment."""

import datetime
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import distributed
from torch.multiprocessing import start_processes


RANKS = 2

PRELOADED = ["hf_specx.pairs.pair", "transformers.models.llama.modeling_llama"]  # none of the modules beside tests
assert all(map(find_spec, PRELOADED)), "what is not there is passed over in silence"

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOADED)


def run_on_ranks(play: Callable[..., None], folder: Path, *given: object, seconds: int = 180) -> list[dict]:
    """Call a module's function on each rank, and wait for all of them; returns what it found on each.

    Args:
        play: is called with the rank, a dict for what it finds, and `given`.
        folder: an empty one.
        seconds: of a meeting that another rank never comes to.
    """
    start_processes(_on_rank, (play, str(folder), seconds, given), RANKS, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def _on_rank(rank: int, play: Callable[..., None], folder: str, seconds: int, given: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}  # as torchrun sets them
    distributed.init_process_group("gloo", f"file://{folder}/store", datetime.timedelta(seconds=seconds), RANKS, rank)
    found: dict = {}
    try:
        play(rank, found, *given)
    except Exception:
        found["error"] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    os._exit(0)  # else the process may abort as it ends, by threads of gloo (pytorch#190489)
