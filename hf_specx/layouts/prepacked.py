"""Linear layers of compiled forwards on a CPU: oneDNN multiplies by weights stored in the order its kernels read them.

The prompts of such a call, which are not compiled, are read by the same weights.

With few rows a product with a weight in its usual order is far slower than reading the weight from memory: those of a
target step take two to five times as long in float32, where BLAS is made for other processors, and twice in bfloat16.
"""

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear as dense_linear
from torch.overrides import TorchFunctionMode


# one for each copy of this file, as a published pair has its own
NAMESPACE = f"hf_specx_{hashlib.sha256(__name__.encode()).hexdigest()[:16]}"
SUPPORTED: dict[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: lambda: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
Location = tuple[int, torch.Size, tuple[int, ...]]


class Pack(NamedTuple):
    """A weight in oneDNN's order, and the `mark` of the weight that it was made from."""

    weight: torch.Tensor
    mark: torch.Tensor


class Prepacked:
    """The linear weights of one model in oneDNN's order, which take as much memory as the weights themselves.

    Each is made when a forward first multiplies by it.
    """

    def __init__(self) -> None:
        self.packs: dict[Location, Pack] = {}
        self.lock = threading.Lock()

    def refresh(self, model: torch.nn.Module) -> None:
        """Forget packs of weights that no longer exist or have changed, by `mark`, which reads each weight."""
        with self.lock:
            now = {location(weight): weight for weight in model.parameters()} if self.packs else {}
            same = [x for x, pack in self.packs.items() if x in now and torch.equal(mark(now[x]), pack.mark)]
            self.packs = {x: self.packs[x] for x in same}

    def of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """A weight in oneDNN's order; None if oneDNN does not take it."""
        found = self.packs.get(location(weight))
        if found is None:
            with self.lock:
                found = self.packs.get(location(weight))
                if found is None and fits(weight):
                    found = Pack(torch.ops.mkldnn._reorder_linear_weight(weight.detach()), mark(weight))
                    self.packs[location(weight)] = found
        return None if found is None else found.weight

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A context in which `linear` uses these weights, in this thread or asyncio task alone."""
        before = IN_USE.set(self)
        try:
            yield
        finally:
            IN_USE.reset(before)


IN_USE: ContextVar[Prepacked | None] = ContextVar("IN_USE", default=None)


class PackedLinear(TorchFunctionMode):
    """A context in which forwards that are not compiled multiply by prepacked weights, in this thread alone."""

    def __init__(self, prepacked: Prepacked):
        super().__init__()
        self.prepacked = prepacked
        self.usable = has_kernels() and not torch.is_autocast_enabled("cpu")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is dense_linear and self.usable and not kwargs and self._fits(*args[:2]):
            return multiplied(self.prepacked, *args)
        return func(*args, **kwargs or {})

    @staticmethod
    def _fits(input: torch.Tensor, weight: torch.Tensor) -> bool:
        """As `use_prepacked` decides for the parameters of a trace."""
        plain = type(weight) is torch.nn.Parameter and type(input) is torch.Tensor
        return plain and input.dtype == weight.dtype and not torch.is_autocast_enabled("cpu")


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `torch.nn.functional.linear`: [..., I] by [O, I] to [..., O]."""
    return multiplied(IN_USE.get(), input, weight, bias)


def multiplied(
    prepacked: Prepacked | None, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same, by the weight in oneDNN's order if there is one."""
    packed = None if prepacked is None else prepacked.of(weight)
    if packed is None:
        return dense_linear(input, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.default(input, packed, bias, "none", [], "")


def linear_shape(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor of the shape that `linear` returns, for tracing."""
    return input.new_empty(*input.shape[:-1], len(weight))


if not hasattr(getattr(torch.ops, NAMESPACE), "linear"):  # else it was registered when this file was loaded before
    # `custom_op` would add the time of a small product to each call
    torch.library.define(f"{NAMESPACE}::linear", "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor")
    torch.library.impl(f"{NAMESPACE}::linear", "cpu", linear)
    torch.library.register_fake(f"{NAMESPACE}::linear", linear_shape)


def use_prepacked(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Let a traced forward use `linear` for the parameters of the model, where that is known to be faster."""
    from torch.amp.autocast_mode import _enter_autocast  # torch's own, which other calls do not depend on

    calls = functools.partial(graph.graph.find_nodes, op="call_function")
    if not has_kernels() or torch.is_autocast_enabled("cpu") or calls(target=_enter_autocast):
        return
    own = set()
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if type(value) is torch.nn.Parameter and fits(value):
            own.add(node)
    for node in calls(target=dense_linear):
        if (node.args[1] if len(node.args) > 1 else node.kwargs["weight"]) in own:
            node.target = getattr(torch.ops, NAMESPACE).linear.default
    graph.recompile()


def has_kernels() -> bool:
    """Whether torch has oneDNN and may use it, on a kind of processor on which it was measured."""
    allowed = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return allowed and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def fits(weight: torch.Tensor) -> bool:
    """Whether oneDNN and `mark` can take a weight."""
    return (
        weight.ndim == 2
        and weight.numel() > 0
        and weight.is_contiguous()
        and not weight.storage_offset()
        and weight.device.type == "cpu"
        and weight.dtype in SUPPORTED
        and SUPPORTED[weight.dtype]()
        and weight.shape[1] * weight.element_size() % 8 == 0
    )


def mark(weight: torch.Tensor) -> torch.Tensor:
    """Bytes [N] that change if a weight [O, I] does; torch's version counter does not see every write.

    The sums of its rows, which change with signs and the order of rows, and the sums of its columns read as integers
    of 8 bytes, which change with any bit and the order of columns.
    """
    rows, columns = weight.detach().sum(1), weight.detach().view(torch.int64).sum(0)
    return torch.cat([rows.view(torch.uint8), columns.view(torch.uint8)])


def location(weight: torch.Tensor) -> Location:
    """Where a weight lies in memory: address, shape and strides."""
    return weight.data_ptr(), weight.shape, weight.stride()
