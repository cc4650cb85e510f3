"""Offline, quiet and on one thread; versions in the header."""

import os
import shutil
import tempfile


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()  # of this process: others must not write there meanwhile

import torch
import transformers


torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def pytest_report_header(config):
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def pytest_unconfigure(config):
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)
