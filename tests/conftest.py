"""Offline, quiet and on one thread, here and in processes that tests start; versions in the header."""

import contextlib
import gc
import os
import shutil
import tempfile
import weakref
from typing import Any


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # two threads that share a core with another process wait for each other
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()  # of this process: others must not write there meanwhile

import pytest
import torch
import transformers

from hf_specx.drafting import costs, round_timer
from hf_specx.engine import run
from hf_specx.models import compiled, compiled_forwards


torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def pytest_report_header(config):
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def pytest_collection_finish(session):
    """Else a tenth of the time, of large batches a third, goes into looking for garbage in what was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards and rounds are timed as ever, but what comes of it is a draft that is worth its time.

    For tests that leave the number of candidates to "auto": a tiny draft is no faster than its target, so that "auto"
    would rightly decode plainly, and equality would show nothing.
    """

    def paying(*seen: object) -> dict:
        return {"target": {1: 1.0, 9: 1.4}, "draft": 0.1}

    monkeypatch.setattr(costs, "time_forwards", paying)
    monkeypatch.setattr(run, "assumed_times", paying)
    monkeypatch.setattr(round_timer.RoundTimer, "_ratios", lambda timer, rows: (1.0, 1.0))
    monkeypatch.setattr(round_timer.RoundTimer, "has_seen_plain", lambda timer, rows: True)


@pytest.fixture
def timed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No size tells what forwards cost, as where they are compiled: they are timed before the first token."""
    monkeypatch.setattr(run, "assumed_times", lambda *models: None)


def pytest_unconfigure(config):
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch):
    """`compile=True` without a compiler: what torch has traced runs as it is."""
    monkeypatch.setattr(compiled_forwards, "lookup_backend", lambda name: lambda graph, inputs, config_patches: graph)
    monkeypatch.setattr(compiled_forwards, "in_one_file", contextlib.nullcontext)
    monkeypatch.setattr(
        compiled_forwards, "IDLE_FORWARDS", 4
    )  # so that both idle rows and fewer ones are seen in a call
    monkeypatch.setattr(compiled, "has_compiler", lambda device_type: True)
    monkeypatch.setattr(compiled_forwards, "COMPILED_FORWARDS", weakref.WeakKeyDictionary())


@pytest.fixture
def untraced(traced: None, monkeypatch: pytest.MonkeyPatch):
    """`traced`, of which tracing takes nearly all the time, without it: buffers, idle rows and sizes are the same."""

    def counted(forwards: compiled_forwards.CompiledForwards, function: Any, name: str, captures: bool) -> Any:
        forwards.compilations += 1
        return function

    monkeypatch.setattr(compiled_forwards.CompiledForwards, "_compiled", counted)
