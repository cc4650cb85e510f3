"""Weights of few bits, made of a target when it is loaded: by bitsandbytes, or by torchao."""

import importlib
from importlib.util import find_spec
from typing import Any

import torch
from transformers import BitsAndBytesConfig, TorchAoConfig

from hf_specx.common.errors import require


def quantization_config(kind: str) -> Any:
    """The `quantization_config` of `from_pretrained` for "4bit".

    By bitsandbytes in NF4, which computes in bfloat16; where that is not installed, by torchao in groups of int4.

    Raises:
        ValueError: another kind, or neither package is installed.
    """
    require(kind == "4bit", f"--quantize {kind} is unknown; give 4bit.")
    if find_spec("bitsandbytes") is not None:
        computing: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        return BitsAndBytesConfig(load_in_4bit=True, **computing)
    require(
        find_spec("torchao") is not None,
        "--quantize 4bit needs bitsandbytes or torchao, and neither is installed; pip install bitsandbytes.",
    )
    return TorchAoConfig(importlib.import_module("torchao.quantization").Int4WeightOnlyConfig())
