"""oneDNN's products in compiled forwards: the same numbers, of the weights as they are now, and of no others."""

import copy
import importlib.util
import threading
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear as dense_linear

from hf_specx.models import prepacked
from hf_specx.models.prepacked import WEIGHTS, PackedLinear, Prepacked, has_kernels, linear, use_prepacked


pytestmark = pytest.mark.skipif(not has_kernels(), reason="torch has no oneDNN for this processor")
DTYPES = [dtype for dtype, is_supported in prepacked.SUPPORTED.items() if not has_kernels() or is_supported()]


class Other(torch.Tensor):
    """A kind of tensor, whatever it may mean."""


class Layers(torch.nn.Module):
    """Products by all kinds of weights, of which oneDNN is to have the first three."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(8, 24), torch.nn.Linear(24, 8, bias=False)
        self.router = torch.nn.Parameter(torch.randn(16, 8))
        self.odd = torch.nn.Linear(5, 8)  # its rows are no whole numbers of 8 bytes
        self.fine = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.vector, self.none = torch.nn.Parameter(torch.randn(8)), torch.nn.Parameter(torch.randn(0, 8))
        self.register_buffer("table", torch.randn(10, 8))
        self.other = torch.nn.Parameter(torch.randn(12, 8).as_subclass(Other))
        self.later = torch.nn.Parameter(torch.randn(64)[16:].view(6, 8))  # does not lie at the start of its storage

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        kept = [self.down(self.up(x)), dense_linear(x, weight=self.router)]
        part, turned = dense_linear(x, self.router[:8]), dense_linear(x, (2 * self.router[:8]).t())
        others = [self.odd(x[..., :5]), self.fine(x.double()), dense_linear(x, self.later)]
        others += [dense_linear(x, weight) for weight in (self.table, self.other, self.vector, self.none)]
        return [*kept, part, turned, *others]


class Casting(Layers):
    """Chooses the precision of its products itself."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [self.up(x)]


def seen(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the weights that are packed from here on."""
    shapes, pack = [], torch.ops.mkldnn._reorder_linear_weight

    def packing(weight: torch.Tensor) -> torch.Tensor:
        shapes.append(weight.shape)
        return pack(weight)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", packing)
    return shapes


def compiled(model: torch.nn.Module) -> Callable[..., list[torch.Tensor]]:
    def backend(graph, inputs):
        use_prepacked(graph, inputs)
        return graph

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (8, 6), (48,), ()], ids=str)
def test_products_are_those_of_torch(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]):
    layer, x = torch.nn.Linear(96, 200, bias=bias, dtype=dtype), torch.randn(*shape, 96).to(dtype)
    with torch.no_grad(), Prepacked().in_use():
        found, expected = linear(x, layer.weight, layer.bias), layer(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


def test_only_the_models_own_weights_are_packed(monkeypatch: pytest.MonkeyPatch):
    model, x, shapes = Layers(), torch.randn(2, 3, 8), seen(monkeypatch)
    forward, own = compiled(model), Prepacked()
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            with own.in_use():
                torch.testing.assert_close(forward(x), expected)
        assert sorted(shapes) == [(8, 24), (16, 8), (24, 8)]
        torch.testing.assert_close(forward(x), expected, rtol=0, atol=0)  # none are in use


def test_forwards_that_are_not_compiled_use_the_same_weights(monkeypatch: pytest.MonkeyPatch):
    model, x, shapes = Layers(), torch.randn(2, 3, 8), seen(monkeypatch)
    with torch.no_grad():
        expected, own = model(x), Prepacked()
        for _ in range(2):
            with PackedLinear(own):
                torch.testing.assert_close(model(x), expected)
        assert sorted(shapes) == [(8, 24), (24, 8)]  # not one that is given by name
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)  # none are in use


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("hindrance", ["autocast", "autocast inside", "disabled", "another processor"])
def test_nothing_is_packed_where_it_would_not_do(monkeypatch: pytest.MonkeyPatch, hindrance: str):
    model = Casting() if hindrance == "autocast inside" else Layers()
    x, shapes = torch.randn(2, 3, 8), seen(monkeypatch)
    if hindrance == "another processor":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=hindrance == "autocast")
    allowed = torch.backends.mkldnn.flags(hindrance != "disabled", allow_tf32=False)
    with torch.no_grad(), allowed, autocast, Prepacked().in_use():
        compiled(model)(x)
        with PackedLinear(Prepacked()):
            model(x)
    assert not shapes


def negated(model: Layers) -> None:
    model.up.weight.data.neg_()


def nudged(model: Layers) -> None:
    model.up.weight.data[3, 5] = torch.nextafter(model.up.weight.data[3, 5], torch.tensor(9.0))


def replaced(model: Layers) -> None:
    model.up.weight = copy.deepcopy(model.up.weight)


def reordered(model: Layers) -> None:
    model.up.weight.data.copy_(model.up.weight.data.flip(0))


def shifted(model: Layers) -> None:
    model.up.weight.data.copy_(model.up.weight.data.roll(2, 1))


def mirrored(model: Layers) -> None:
    model.up.weight.data[:, 1:4:2].neg_()


def spoilt(model: Layers) -> None:
    model.up.weight.data[:, 2] = torch.nan


@pytest.mark.parametrize("change", [negated, nudged, reordered, shifted, mirrored, spoilt, replaced])
def test_a_changed_weight_is_packed_anew(monkeypatch: pytest.MonkeyPatch, change: Callable[[Layers], None]):
    """Though torch does not count what is written through `.data`."""
    model, x, own = Layers(), torch.randn(2, 3, 8), Prepacked()
    with torch.no_grad(), own.in_use():
        linear(x, model.up.weight), linear(x, model.router)
    shapes = seen(monkeypatch)
    change(model)
    for _ in range(2):
        own.refresh(model)
        with torch.no_grad(), own.in_use():
            torch.testing.assert_close(linear(x, model.up.weight, model.up.bias), model.up(x), equal_nan=True)
            linear(x, model.router)
    assert shapes == [(24, 8)]
    assert len(own.packs) == 2


def test_a_replacement_that_onednn_does_not_take():
    model, x, own = Layers(), torch.randn(2, 3, 8), Prepacked()
    with torch.no_grad(), own.in_use():
        for weight in (model.router, torch.randn(8, 16).t(), torch.randn(136)[8:].view(16, 8), torch.randn(16, 8)):
            model.router = torch.nn.Parameter(weight)
            own.refresh(model)
            torch.testing.assert_close(linear(x, model.router), dense_linear(x, model.router))
    assert len(own.packs) == 1


def test_two_threads_that_pack_at_once():
    """One looks for changes while the other begins."""
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(100))
    x, own, failed = torch.randn(1, 8), Prepacked(), []

    def first_call() -> None:
        try:
            with torch.no_grad(), own.in_use():
                for layer in layers:
                    linear(x, layer.weight)
                    own.refresh(layers)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=first_call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(own.packs) == 100


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        model, x, own = Layers(), torch.randn(2, 3, 8), Prepacked()
        for change in (1, -1):
            model.up.weight.mul_(change)
            own.refresh(model)
            with own.in_use():
                torch.testing.assert_close(linear(x, model.up.weight, model.up.bias), model.up(x))


def test_other_threads_and_other_models_have_none():
    model, x = Layers(), torch.randn(2, 3, 8)
    own, others, found = Prepacked(), Prepacked(), []
    with torch.no_grad(), own.in_use():
        thread = threading.Thread(target=lambda: found.append(WEIGHTS.get()))
        thread.start()
        thread.join()
        with others.in_use():
            linear(x, model.router)
        linear(x, model.up.weight)
    assert found == [None]
    assert [len(own.packs), len(others.packs)] == [1, 1]
    assert WEIGHTS.get() is None


def test_a_copy_under_another_name():
    """As in a published pair, whose folder may be called anything."""
    spec = importlib.util.spec_from_file_location("pairs.modèle-1.prepacked", prepacked.__file__)
    assert spec is not None
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    assert other.NAMESPACE != prepacked.NAMESPACE
    model, x, own = Layers(), torch.randn(2, 3, 8), Prepacked()
    with torch.no_grad(), own.in_use():
        torch.testing.assert_close(linear(x, model.router), other.linear(x, model.router))
    assert len(own.packs) == 1
