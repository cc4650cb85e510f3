"""Linear layers of compiled forwards on a CPU: oneDNN multiplies by weights in the order that its kernels read them.

A dense weight is read far below the speed of the memory where few rows are multiplied by it: the products of a target
step take two to seven times as long in float32, by a BLAS made for other processors, and twice in bfloat16.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear as dense_linear


NAMESPACE = re.sub(r"\W", "_", __name__)  # one for each copy of this file, as a published pair has its own
SUPPORTED: dict[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: lambda: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
Place = tuple[int, torch.Size]


class Pack(NamedTuple):
    """A weight in oneDNN's order, and the marks of what it was made of."""

    weight: torch.Tensor
    marks: tuple[int, int]


class Prepacked:
    """The linear weights of one model in oneDNN's order, which take as much memory as the weights themselves.

    Each is made when a compiled forward first multiplies by it.
    """

    def __init__(self) -> None:
        self.packs: dict[Place, Pack] = {}
        self.lock = threading.Lock()

    def refresh(self, model: torch.nn.Module) -> None:
        """Forget what was made of weights that are gone or have changed since; they are read once for that."""
        with self.lock:
            now = {_place(weight): weight for weight in model.parameters()} if self.packs else {}
            same = [place for place, pack in self.packs.items() if place in now and marks(now[place]) == pack.marks]
            self.packs = {place: self.packs[place] for place in same}

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The same weight in oneDNN's order."""
        packs, place = self.packs, _place(weight)
        if place not in packs:
            packs[place] = Pack(torch.ops.mkldnn._reorder_linear_weight(weight.detach()), marks(weight))
        return packs[place].weight

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Let `linear` find these weights in this thread."""
        token = IN_USE.set(self)
        try:
            yield
        finally:
            IN_USE.reset(token)


IN_USE: ContextVar[Prepacked | None] = ContextVar("IN_USE", default=None)


@torch.library.custom_op(f"{NAMESPACE}::linear", mutates_args=())
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `torch.nn.functional.linear`: [..., I] by [O, I] to [..., O]."""
    prepacked = IN_USE.get()
    if prepacked is None:
        return dense_linear(input, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(input, prepacked.of(weight), bias, "none", [], "")


@linear.register_fake
def _(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return input.new_empty(*input.shape[:-1], len(weight))


def use_prepacked(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Let a traced forward multiply by the model's own weights with `linear`, where that is known to be faster."""
    if not has_kernels() or torch.is_autocast_enabled("cpu"):
        return
    placeholders = graph.graph.find_nodes(op="placeholder")
    own = {node for node, x in zip(placeholders, inputs, strict=True) if isinstance(x, torch.nn.Parameter) and fits(x)}
    for node in graph.graph.find_nodes(op="call_function", target=dense_linear):
        if node.args[1] in own:
            node.target = getattr(torch.ops, NAMESPACE).linear.default
    graph.recompile()


def has_kernels() -> bool:
    """Whether torch has oneDNN, may use it, and on a processor on which it was measured."""
    allowed = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return allowed and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def fits(weight: torch.Tensor) -> bool:
    """Whether oneDNN takes a weight, and `marks` does."""
    whole = weight.is_contiguous() and not weight.storage_offset()
    return (
        whole
        and weight.device.type == "cpu"
        and weight.dtype in SUPPORTED
        and SUPPORTED[weight.dtype]()
        and weight.shape[-1] * weight.element_size() % 8 == 0
    )


def marks(weight: torch.Tensor) -> tuple[int, int]:
    """By which a weight is known not to have changed: torch's count of writes, and a sum of its bits."""
    version = 0 if weight.is_inference() else weight._version
    return version, int(weight.detach().view(torch.int64).sum())


def _place(weight: torch.Tensor) -> Place:
    return weight.data_ptr(), weight.shape
