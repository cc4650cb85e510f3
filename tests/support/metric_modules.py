"""The `evaluate` modules, loaded by path into the caches of this process, and the scripts behind them."""

import os
import sys
from pathlib import Path
from types import ModuleType

import evaluate

from hf_specx import metrics


def load(name: str) -> evaluate.Metric:
    data = Path(os.environ["HF_MODULES_CACHE"]) / "data"
    return evaluate.load(metrics.path(name), keep_in_memory=True, cache_dir=str(data))


def script(name: str) -> ModuleType:
    """What `evaluate.load` imported."""
    return sys.modules[type(load(name)).__module__]
