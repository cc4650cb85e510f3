"""oneDNN's products in compiled forwards: the same numbers, of the weights as they are now, and of no others."""

import copy
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear as dense_linear

from hf_specx.models import packed_weights
from hf_specx.models.packed_weights import PackedLinear, PackedWeights, has_kernels, linear, use_packed_weights


pytestmark = pytest.mark.skipif(not has_kernels(), reason="torch has no oneDNN for this processor")
DTYPES = [dtype for dtype, is_supported in packed_weights.SUPPORTED.items() if not has_kernels() or is_supported()]


class Layers(torch.nn.Module):
    """Products by all kinds of weights, of which oneDNN is to have the first three."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(8, 24), torch.nn.Linear(24, 8, bias=False)
        self.router = torch.nn.Parameter(torch.randn(16, 8))
        self.odd = torch.nn.Linear(5, 8)  # its rows are no whole numbers of 8 bytes
        self.fine = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.vector = torch.nn.Parameter(torch.randn(8))
        self.register_buffer("table", torch.randn(10, 8))
        self.later = torch.nn.Parameter(torch.randn(64)[16:].view(6, 8))  # does not lie at the start of its storage

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        packed = [self.down(self.up(x)), dense_linear(x, weight=self.router), dense_linear(x, self.router[:8])]
        others = [self.odd(x[..., :5]), self.fine(x.double())]
        return packed + others + [dense_linear(x, weight) for weight in (self.later, self.table, self.vector)]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    shapes, pack = [], torch.ops.mkldnn._reorder_linear_weight

    def packing(weight: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return pack(weight)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", packing)
    return shapes


def compiled(model: torch.nn.Module) -> Callable[..., list[torch.Tensor]]:
    def backend(graph, inputs):
        use_packed_weights(graph, inputs)
        return graph

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (8, 6), (48,), ()], ids=str)
def test_products_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, ...]):
    layer, x = torch.nn.Linear(96, 200, bias=bool(shape), dtype=dtype), torch.randn(*shape, 96).to(dtype)
    with torch.no_grad(), PackedWeights().in_use():
        output, expected = linear(x, layer.weight, layer.bias), layer(x)
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected)


@torch.no_grad()
@pytest.mark.parametrize("traced", [True, False])
def test_only_the_models_own_weights_are_packed(traced: bool, packed: list):
    """Also by forwards that are not compiled, as of prompts; these not where weights are given by name."""
    model, x, weights = Layers(), torch.randn(2, 3, 8), PackedWeights()
    expected, forward = model(x), compiled(model) if traced else model
    for _ in range(2):
        with weights.in_use() if traced else PackedLinear(weights):
            torch.testing.assert_close(forward(x), expected)
    assert sorted(packed) == [(8, 24), *[(16, 8)] * traced, (24, 8)]
    torch.testing.assert_close(forward(x), expected, rtol=0, atol=0)  # none are in use


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("hindrance", ["autocast", "disabled", "another processor"])
def test_nothing_is_packed_where_it_would_not_do(monkeypatch: pytest.MonkeyPatch, hindrance: str, packed: list):
    model, x = Layers(), torch.randn(2, 3, 8)
    if hindrance == "another processor":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=hindrance == "autocast")
    with torch.backends.mkldnn.flags(hindrance != "disabled", allow_tf32=False), autocast, PackedWeights().in_use():
        compiled(model)(x)
        with PackedLinear(PackedWeights()):
            model(x)
    assert not packed


CHANGES: dict[str, Callable[[torch.nn.Linear], object]] = {
    "negated": lambda layer: layer.weight.data.neg_(),
    "nudged": lambda layer: layer.weight.data[3, 5].add_(1e-6),
    "shifted": lambda layer: layer.weight.data.copy_(layer.weight.data.roll(2, 1)),
    "replaced": lambda layer: setattr(layer, "weight", copy.deepcopy(layer.weight)),
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_packed_anew(change: str, inference: bool, packed: list):
    """Though torch does not count what is written through `.data`."""
    with torch.inference_mode(inference), torch.no_grad():
        model, x, weights = Layers(), torch.randn(2, 3, 8), PackedWeights()
        with weights.in_use():
            for _ in range(2):
                linear(x, model.up.weight), linear(x, model.router)
            packed.clear()
            CHANGES[change](model.up)
            for _ in range(2):
                weights.refresh(model)
                torch.testing.assert_close(linear(x, model.up.weight, model.up.bias), model.up(x))
                linear(x, model.router)
    assert packed == [(24, 8)]
    assert len(weights.packs) == 2


@torch.no_grad()
def test_a_copy_under_another_name():
    """As in a published pair, whose folder may be called anything."""
    spec = importlib.util.spec_from_file_location("pairs.modèle-1.packed_weights", packed_weights.__file__)
    assert spec is not None
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    assert other.NAMESPACE != packed_weights.NAMESPACE
    model, x, weights = Layers(), torch.randn(2, 3, 8), PackedWeights()
    with weights.in_use():
        torch.testing.assert_close(linear(x, model.router), other.linear(x, model.router))
    assert len(weights.packs) == 1
