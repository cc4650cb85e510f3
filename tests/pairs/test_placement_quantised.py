"""Where a quantised target goes, by a method that needs no library: what it takes is what its quantiser says."""

import copy
import warnings
from typing import Any

import pytest
import torch
from tiny import tiny
from transformers.integrations.accelerate import _get_device_map
from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_specx.pairs.placement import Sketch, plan


TOKENS = 64
LARGE, SMALL = tiny(num_hidden_layers=8), tiny(num_hidden_layers=2)
TARGET, DRAFT = (Sketch(model.config, "auto", TOKENS, False) for model in (LARGE, SMALL))
ALL = TARGET.weights + TARGET.cache + DRAFT.weights + DRAFT.cache
LAYER = [sum(p.numel() for p in model.parameters()) for model in LARGE.model.layers]
SMALLER = sum(LAYER) * 7 // 2  # bytes that half a byte for a number saves, where it took four


class EighthsConfig(QuantizationConfigMixin):
    """Of a method that stores an eighth of each number."""

    def __init__(self, **_: Any):
        self.quant_method = "eighths"


class Eighths(HfQuantizer):
    """Weights of layers take half a byte each, once the model was made ready."""

    is_trainable, quantized_element_size = False, 0.5

    def is_serializable(self) -> bool:
        return True

    def param_needs_quantization(self, model: torch.nn.Module, param_name: str, **_: Any) -> bool:
        return "layers" in param_name and model.is_quantized


@pytest.fixture
def eighths(monkeypatch: pytest.MonkeyPatch) -> EighthsConfig:
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "eighths", Eighths)
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "eighths", EighthsConfig)
    return EighthsConfig()


def test_a_quantised_target_takes_less(eighths: EighthsConfig):
    """On loading, or as it was saved; the draft is as it is."""
    assert Sketch(LARGE.config, "auto", 0, False, quantization_config=eighths).weights == TARGET.weights - SMALLER
    saved = copy.deepcopy(LARGE.config)
    saved.quantization_config = eighths.to_dict()
    assert Sketch(saved, "auto", 0, False).weights == TARGET.weights - SMALLER
    limits = {0: ALL - SMALLER + LAYER[0], "cpu": 2 * ALL}
    asked = {"device_map": "auto", "max_memory": limits, "cache_tokens": TOKENS}
    with pytest.warns(UserWarning, match="slower memory"):
        plan(LARGE.config, SMALL.config, **asked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        place = plan(LARGE.config, SMALL.config, quantization_config=eighths, **asked)
        assert place == plan(saved, SMALL.config, **asked)
    assert place.draft == {"device_map": {"": 0}}


def test_a_quantised_target_goes_where_the_loader_puts_it(eighths: EighthsConfig):
    """Over two accelerators, by sizes as the quantiser has them, and into the memory that it leaves."""
    sketch = Sketch(LARGE.config, "auto", TOKENS, False, "sequential", eighths)
    room = {0: (TARGET.weights - SMALLER) // 2, 1: TARGET.weights, "cpu": 0}
    placed = sketch.mapped("sequential", room)
    assert placed == _get_device_map(sketch.model, "sequential", dict(room), sketch.quantizer)
    assert placed != _get_device_map(sketch.model, "sequential", dict(room), None)
    used = sketch.weights_on(placed)
    assert used.total() == TARGET.weights - SMALLER
    assert used[0] <= room[0]
