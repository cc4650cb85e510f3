"""Linear layers of compiled forwards on a CPU: oneDNN multiplies by weights stored in the order its kernels read them.

The prompts of such a call are read by the same weights. A product of 6 rows with a weight of 2048 by 512 in its usual
order takes 2.7 times as long in float32 and 2.6 in bfloat16, a forward of 6 tokens of the target in the package 9.0 ms
in place of 7.3 (one thread of an AMD EPYC with AVX-512, torch 2.13).
"""

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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
Location = tuple[int, torch.Size, tuple[int, ...]]  # of a weight in memory: address, shape and strides


class PackedWeights:
    """The linear weights of one model in oneDNN's order, each made when a forward first multiplies by it."""

    def __init__(self) -> None:
        self.packs: dict[Location, tuple[torch.Tensor, torch.Tensor]] = {}  # with the `mark` of what each is made from
        self.lock = threading.Lock()

    def refresh(self, model: torch.nn.Module) -> None:
        """Forget packs of weights that no longer exist or have changed, by `mark`, which reads each weight."""
        with self.lock:
            now = {location(weight): weight for weight in model.parameters()} if self.packs else {}
            same = [x for x, (_, then) in self.packs.items() if x in now and torch.equal(mark(now[x]), then)]
            self.packs = {x: self.packs[x] for x in same}

    def multiply(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As `torch.nn.functional.linear`, by the weight in oneDNN's order if oneDNN takes it."""
        here = location(weight)
        pack = self.packs.get(here)
        if pack is None:
            if not fits(weight):
                return dense_linear(input, weight, bias)
            with self.lock:
                if here not in self.packs:
                    self.packs[here] = torch.ops.mkldnn._reorder_linear_weight(weight.detach()), mark(weight)
                pack = self.packs[here]
        return torch.ops.mkldnn._linear_pointwise.default(input, pack[0], bias, "none", [], "")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A context in which `linear` uses these weights, in this thread or asyncio task alone."""
        before = WEIGHTS.set(self)
        try:
            yield
        finally:
            WEIGHTS.reset(before)


WEIGHTS: ContextVar[PackedWeights | None] = ContextVar("WEIGHTS", default=None)


class PackedLinear(TorchFunctionMode):
    """A context in which forwards that are not compiled multiply by packed_weights weights, in this thread alone."""

    def __init__(self, packed_weights: PackedWeights):
        super().__init__()
        self.packed_weights, self.usable = packed_weights, has_kernels()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is dense_linear and self.usable and not kwargs and not torch.is_autocast_enabled("cpu"):
            input, weight, *_ = args
            plain = type(weight) is torch.nn.Parameter and type(input) is torch.Tensor
            if plain and input.dtype == weight.dtype:
                return self.packed_weights.multiply(*args)
        return func(*args, **kwargs or {})


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `torch.nn.functional.linear`, by the weights that are in use."""
    packed_weights = WEIGHTS.get()
    multiply = dense_linear if packed_weights is None else packed_weights.multiply
    return multiply(input, weight, bias)


if not hasattr(getattr(torch.ops, NAMESPACE), "linear"):  # else it was registered when this file was loaded before
    # `custom_op` would add the time of a small product to each call
    torch.library.define(f"{NAMESPACE}::linear", "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor")
    torch.library.impl(f"{NAMESPACE}::linear", "cpu", linear)
    torch.library.register_fake(
        f"{NAMESPACE}::linear", lambda x, weight, _=None: x.new_empty(*x.shape[:-1], len(weight))
    )


def use_packed_weights(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Let a traced forward use `linear` for the parameters of the model, where that is known to be faster."""
    calls = functools.partial(graph.graph.find_nodes, op="call_function")
    if not has_kernels() or torch.is_autocast_enabled("cpu") or switches_modes(graph):
        return
    placeholders = zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True)
    weights = {node for node, value in placeholders if type(value) is torch.nn.Parameter and fits(value)}
    for node in calls(target=dense_linear):
        if (node.args[1] if len(node.args) > 1 else node.kwargs["weight"]) in weights:
            node.target = getattr(torch.ops, NAMESPACE).linear.default
    graph.recompile()


def switches_modes(graph: torch.fx.GraphModule) -> bool:
    """Whether a traced forward enters autocast, or has gradients computed or not, for a part of itself."""
    from torch.amp.autocast_mode import _enter_autocast  # torch's own, which other calls do not depend on

    switches = (_enter_autocast, torch._C._set_grad_enabled)
    return any(node.target in switches for node in graph.graph.nodes)


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

    Sums of its rows change with signs and the order of rows, and those of its columns as integers with any bit.
    """
    rows, columns = weight.detach().sum(1), weight.detach().view(torch.int64).sum(0)
    return torch.cat([rows.view(torch.uint8), columns.view(torch.uint8)])


def location(weight: torch.Tensor) -> Location:
    return weight.data_ptr(), weight.shape, weight.stride()
