"""Offline, quiet and on one thread; versions in the header."""

import os


os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers


torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def pytest_report_header(config):
    return f"torch {torch.__version__}, transformers {transformers.__version__}"
