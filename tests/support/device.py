"""The device of tests that are marked gpu: the CUDA device, or the one that SPECX_TEST_DEVICE names."""

import os

import pytest
import torch


DEVICE = torch.device(os.environ.get("SPECX_TEST_DEVICE", "cuda"))
ABSENT = DEVICE.type == "cuda" and not torch.cuda.is_available()
on_device = [pytest.mark.gpu, pytest.mark.skipif(ABSENT, reason="there is no CUDA device")]


def moved(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same on the device."""
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
