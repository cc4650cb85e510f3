"""Processes that use a Hub on loopback: functions of a test module run there, one process and one cache a client."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


HOME = "home"  # of every client below its own folder, since the cache's place is settled once where all are forked
PACKAGE = "hf_specx"


class Failed(Exception):
    """What went wrong in a client: "TheError: its message"."""


class NoPackage:
    """An importer for which the package is not installed."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name.partition(".")[0] == PACKAGE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


class Client:
    """A process with a cache of its own, empty at first; it keeps what its modules hold from call to call.

    Args:
        folder: where the process is, and below which its cache is.
        package: whether `hf_specx` can be imported.
    """

    def __init__(self, folder: Path, package: bool = True):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        elsewhere = os.environ.get("HF_MODULES_CACHE")
        self.pool = ProcessPoolExecutor(1, context, _settle, (str(folder), package, elsewhere))

    def start(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Have a module's function called; all that goes in and out is pickled."""
        return self.pool.submit(_call, function, args)

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a module's function and wait for its result.

        Raises:
            Failed: if it raised.
        """
        return self.start(function, *args).result()

    @property
    def cached(self) -> dict[str, int]:
        """Sizes of files in the Hub's cache, without its bookkeeping."""
        root = self.folder / HOME / "hub"
        return {p.name: p.stat().st_size for p in root.glob("models--*/blobs/*")}


def _settle(folder: str, package: bool, elsewhere: str | None) -> None:
    """Begin a client; `elsewhere` is where the code of repositories lies that its parent has run."""
    os.chdir(folder)
    sys.path[:] = [place for place in sys.path if place != elsewhere]  # it was handed down
    if not package:
        sys.meta_path.insert(0, NoPackage())


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except Exception as error:  # not every exception can be pickled
        raise Failed(f"{type(error).__name__}: {error}") from error
