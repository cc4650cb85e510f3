"""Offline, quiet and on one thread; versions in the header."""

import os
import shutil
import tempfile


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()  # of this process: others must not write there meanwhile

import pytest
import torch
import transformers

from hf_specx import Costs


torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def pytest_report_header(config):
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


@pytest.fixture(autouse=True)
def drafts_are_cheap(monkeypatch):
    """Forwards are timed as ever, but what comes of it is a draft that is worth its time.

    A tiny model is no faster than another, so that "auto" would rightly decode plainly, and equality show nothing.
    """
    measure = Costs.measure

    def timed(costs, batch, *forwards):
        measure(costs, batch, *forwards)
        costs.table[batch] = {"target": {1: 1.0, 9: 1.4}, "draft": 0.1}

    monkeypatch.setattr(Costs, "measure", timed)


def pytest_unconfigure(config):
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)
