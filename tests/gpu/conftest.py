"""Convolutions in full float32, as products are by default, so that logits of a row hardly depend on other rows."""

import pytest
import torch


@pytest.fixture(autouse=True)
def full_precision():
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = allowed
