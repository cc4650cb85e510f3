"""Checks that several measurements and commands share: sizes, sampling, files to be written, names of models."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hf_specx.common.errors import require
from hf_specx.hub.folders import check_writable


def check_runs(batches: Sequence[int], repeats: int = 1, name: str = "batches") -> None:
    """Whether there are batches of these sizes, an argument of this name, and timed runs of them."""
    sizes = batches and min(batches) >= 1 and len(set(batches)) == len(batches)
    told = f"{name}={list(batches)!r}: give batch sizes of 1 or more, each once, like 1 and 8."
    require(bool(sizes), told)
    require(repeats >= 1, f"repeats={repeats} is no number of timed runs; give 1 or more.")


def check_sampling(temperature: float, top_p: float, top_k: int = 0) -> None:
    """Whether tokens can be drawn in this way; greedy decoding has none of these."""
    possible = 0 < temperature < math.inf
    require(possible, f"temperature={temperature} is not above 0; give a positive number, or decode greedily.")
    told = f"top_p={top_p} is not in (0, 1]; give a number above 0 and at most 1, which keeps all tokens."
    require(0 < top_p <= 1, told)
    require(top_k >= 0, f"top_k={top_k} is negative; give 0, which keeps all tokens, or more.")


def check_out(path: Path | None) -> None:
    """Whether a file could be written at a path."""
    if path is not None:
        require(not path.is_dir(), f"{path} is a folder; name a file in it.")
        folder = path.resolve().parent
        require(folder.is_dir(), f"{path}: there is no folder {folder}; make it, or name another file.")
        writable = not path.exists() or os.access(path, os.W_OK)
        require(writable, f"{path} is there and cannot be written; name another file.")
        check_writable(folder, path)


@contextmanager
def looking_for(name: str) -> Iterator[None]:
    """Say which name it is that is not found; the Hub's client does not while it is offline."""
    try:
        yield
    except OSError as error:
        said = " ".join(str(error).split())
        told = f"{name!r} cannot be got from the Hub, and there is no folder of that name here: {said}"
        require(Path(name).is_dir(), told)
        raise
