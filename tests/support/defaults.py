"""torch's default device and dtype for a while, as `torch.set_default_device` and `set_default_dtype` set them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def defaults(device: str = "meta", dtype: torch.dtype = torch.float16) -> Iterator[None]:
    """By default a device that has no values and a dtype that rounds: neither is the models'."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
