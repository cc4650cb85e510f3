"""One fingerprint of a model: the same for equal ones, and another wherever a byte of a tensor is another."""

import copy
from collections.abc import Callable

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from tiny import tiny

from hf_specx.common.fingerprint import COLUMNS, fingerprint_of, model_fingerprint, module_tensors


ROW = 8 * COLUMNS  # bytes that are summed together


def of(weight: torch.Tensor) -> str:
    module = torch.nn.Module()
    module.register_buffer("weight", weight)
    return fingerprint_of({}, module_tensors(module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1, 7, ROW + 3, 40 * ROW + 5])
def test_each_number_of_a_tensor_counts(dtype: torch.dtype, size: int):
    zeros = torch.zeros(size)
    before = of(zeros.to(dtype))
    assert of(zeros.to(dtype)) == before
    for place in {0, size // 3, size // 2, size - 1}:
        other = zeros.clone()
        other[place] = 1
        assert of(other.to(dtype)) != before


ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all but the beginning": lambda x: torch.cat([x.flatten()[:64], x.flatten()[64:].flip(0)]).view_as(x),
    "two rows": lambda x: x[[0, 2, 1, *range(3, len(x))]],
    "two numbers": lambda x: torch.cat([x.flatten()[:-2], x.flatten()[-2:].flip(0)]).view_as(x),
}


@pytest.mark.parametrize("width", [256, 257, 512, 1024])
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_numbers_counts(order: str, width: int):
    """Though their sum is the same."""
    weight = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    assert of(ORDERS[order](weight)) != of(weight)


def test_shape_precision_and_strides():
    weight = torch.arange(12.0)
    assert of(weight) != of(weight.view(3, 4)) != of(weight.view(4, 3))
    assert of(weight) != of(weight.bfloat16())
    assert of(weight.view(3, 4).T) == of(weight.view(3, 4).T.contiguous())
    assert of(weight[1:]) == of(weight[1:].clone())


def in_buffers(model: torch.nn.Module) -> torch.nn.Module:
    """A model whose linear layers hold their weights in buffers, as GPTQ and AWQ have them."""
    model = copy.deepcopy(model)
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            weight = part.weight.detach()
            del part.weight
            part.register_buffer("weight", weight)
    return model


def test_weights_in_buffers_count():
    model = in_buffers(tiny())
    other = copy.deepcopy(model)
    dict(other.named_buffers())["model.layers.1.mlp.up_proj.weight"][-1, -1] += 1
    assert model_fingerprint(copy.deepcopy(model)) == model_fingerprint(model) != model_fingerprint(other)


def test_a_buffer_that_is_not_saved_counts():
    """As rotary frequencies."""
    model, other = tiny(), tiny()
    other.model.rotary_emb.inv_freq.mul_(0.5)
    assert model_fingerprint(model) == model_fingerprint(tiny()) != model_fingerprint(other)


@pytest.mark.filterwarnings("ignore")  # of torch, whose form this is
def test_layers_that_torch_has_quantised():
    """Their weights are neither parameters nor buffers."""
    models = []
    for last in (0.0, 0.0, 1.0):
        model = tiny()
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[-1, -1] += last
        models.append(torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8))
    one, same, other = map(model_fingerprint, models)
    assert one == same != other


class Packed(torch.Tensor):
    """A tensor that holds others, as those of torchao."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor):
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return args[0] if function is torch.ops.aten.detach.default else NotImplemented


def test_tensors_that_hold_others():
    def packed(number: int, scale: float) -> str:
        return of(Packed(torch.full((8, 8), number, dtype=torch.int8), torch.full((8,), scale)))

    assert packed(1, 0.5) == packed(1, 0.5)
    assert len({packed(1, 0.5), packed(2, 0.5), packed(1, 0.25)}) == 3


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_what_is_offloaded_counts(where: str, tmp_path):
    prints = []
    for number, last in enumerate((0.0, 0.0, 1.0)):
        model = tiny()
        with torch.no_grad():
            model.lm_head.weight[-1, -1] += last
        folder = tmp_path / str(number)
        cpu_offload(model) if where == "cpu" else disk_offload(model, folder)
        assert model.lm_head.weight.is_meta
        prints.append(model_fingerprint(model))
    assert prints[0] == prints[1] == model_fingerprint(tiny()) != prints[2]


def test_weights_that_are_nowhere_are_told_by_their_name():
    model = tiny().to("meta")
    before = model_fingerprint(model)
    model.name_or_path = "org/other"
    assert model_fingerprint(model) != before


def test_settings_count_but_for_who_saved_them():
    def settings(**changes) -> str:
        return fingerprint_of({"width": 8, "text_config": {"a": 1} | changes} | changes, [])

    assert settings() == settings(transformers_version="9", _name_or_path="x", none=None)
    assert settings() != settings(rope_theta=1e5)


def test_adapters_count_as_far_as_they_are_in_use():
    """PEFT's layers have these attributes; their weights are the same whichever is active."""
    model = tiny()
    layer = model.model.layers[0]
    layer.active_adapters, layer.disable_adapters, layer.scaling = ["a"], False, {"a": 1.0, "b": 1.0}
    fingerprints = [model_fingerprint(model)]
    for name, value in (("active_adapters", ["b"]), ("scaling", {"a": 1.0, "b": 0.5}), ("disable_adapters", True)):
        setattr(layer, name, value)
        fingerprints.append(model_fingerprint(model))
    assert len(set(fingerprints)) == 4
