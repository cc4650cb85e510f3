"""Forwards as graphs of torch's functions, recorded while they run on tensors without values.

Dynamo, which follows each line of Python, takes 3.4 s for a forward of 16 layers, and this a tenth. What it cannot
record it refuses, and Dynamo traces it.
"""

import operator
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode


KINDS = torch.dtype, torch.device, torch.memory_format, torch.layout
CONSTANTS = (bool, int, float, str, type(None), type(...), *KINDS)
METHODS: dict[Any, str] = {}  # of tensors, by what they are called with
for methods in (vars(torch._C.TensorBase), vars(torch.Tensor)):
    METHODS |= {method: name for name, method in methods.items() if isinstance(method, Hashable)}
VALUES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}
Place = tuple[dict[str, Any] | None, Any]  # the name in a dictionary of a module, or the number among what is given


class Unrecorded(Exception):
    """A forward does what a graph of functions would not."""


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors in arguments, and those that objects among them have, modules aside."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
        elif not isinstance(value, torch.nn.Module):
            found += [x for x in getattr(value, "__dict__", {}).values() if isinstance(x, torch.Tensor)]
    return found


def conditions(values: Iterable[Any]) -> tuple[Any, ...]:
    """What a recorded forward relies on beside its model: constants and kinds of tensors in arguments, settings."""
    plain = [x for value in values for x in (value if isinstance(value, tuple) else [value])]
    return (*(x for x in plain if isinstance(x, CONSTANTS)), *map(kind_of, tensors_in(values)), *settings())


def kind_of(x: torch.Tensor) -> tuple[Any, ...]:
    """All that a compiled forward relies on in a tensor but its values."""
    strides = x.stride() if x.layout == torch.strided else [0] * x.ndim
    return type(x), x.dtype, x.device, x.shape, *(n for n, size in zip(strides, x.shape, strict=True) if size != 1)


def settings() -> tuple[Any, ...]:
    """What of torch's settings changes what its functions do."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


class Recorder(TorchFunctionMode):
    """Notes each call of a function of torch, with the outermost module of a kind that it was made in."""

    def __init__(self, places: dict[int, Place], fake: FakeTensorMode, kind: type[torch.nn.Module]):
        super().__init__()
        self.places, self.fake, self.kind, self.settings = places, fake, kind, settings()
        self.graph, self.nodes = Graph(), dict[int, Node]()
        self.read, self.inputs = list[Place](), list[torch.Tensor]()
        self.kept: list[torch.Tensor] = []  # so that no other tensor gets the id of one of these
        self.last: Node | None = None  # of the inputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VALUES:  # what is given has some, and any other call would ask for them
            raise Unrecorded(f"{func} gives values")
        if settings() != self.settings:
            raise Unrecorded(f"{func} is called under other settings of torch")
        found = func(*args, **(kwargs or {}))
        several = isinstance(found, list | tuple) and any(isinstance(x, torch.Tensor) for x in found)
        if several or found is None or isinstance(found, torch.Tensor):
            node = self._node_of_call(func, self._known(args), self._known(kwargs or {}))
            node.meta["nn_module_stack"] = self._module()
            for number, x in enumerate(found if several else [found]):
                if isinstance(x, torch.Tensor) and id(x) not in self.nodes and id(x) not in self.places:
                    of = self.graph.call_function(operator.getitem, (node, number)) if several else node
                    of.meta |= {"example_value": x, "nn_module_stack": node.meta["nn_module_stack"]}
                    self._note(x, of)
        return found

    def _node_of_call(self, func: Any, args: Any, kwargs: Any) -> Node:
        if getattr(func, "__name__", "") == "__get__":
            return self.graph.call_function(getattr, (*args, func.__self__.__name__))
        if getattr(func, "__name__", "") == "__set__":
            raise Unrecorded("an attribute of a tensor is set")
        name = METHODS.get(func, "")
        if name.startswith("__") and hasattr(operator, name):
            return self.graph.call_function(getattr(operator, name), args, kwargs)
        return self.graph.call_method(name, args, kwargs) if name else self.graph.call_function(func, args, kwargs)

    def _known(self, values: Any) -> Any:
        """Arguments, or what a forward gives, with nodes in place of tensors."""
        return map_aggregate(values, self._node)

    def _node(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, CONSTANTS):
                raise Unrecorded(f"{type(value).__name__} among the arguments")
            return value
        if id(value) not in self.nodes:
            if id(value) not in self.places or type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise Unrecorded("a tensor that is neither given nor the model's, or of another kind")
            with self.graph.inserting_after(self.last):
                self.last = self.graph.placeholder(f"input_{len(self.inputs)}")
            self.last.meta["example_value"] = self.fake.from_tensor(value, static_shapes=True)
            self._note(value, self.last)
            self.inputs.append(value)
            self.read.append(self.places[id(value)])
        return self.nodes[id(value)]

    def _note(self, value: torch.Tensor, node: Node) -> None:
        self.nodes[id(value)] = node
        self.kept.append(value)

    def _module(self) -> dict[str, tuple[str, type]]:
        """The outermost module of the kind in which we are, as in Dynamo's graphs."""
        frame, found = sys._getframe(2), {}
        while frame is not None:
            if frame.f_code is torch.nn.Module._call_impl.__code__ and isinstance(frame.f_locals["self"], self.kind):
                module = frame.f_locals["self"]
                found = {"": (str(id(module)), type(module))}
            frame = frame.f_back  # type: ignore[assignment]
        return found


@contextmanager
def without_default_device() -> Iterator[None]:
    """A context where `torch.device(...)` around it, or `set_default_device`, counts for nothing in this thread.

    It is a mode in which a forward is neither recorded nor traced.
    """
    with ExitStack() as stack:
        while isinstance((_get_current_function_mode_stack() or [None])[-1], DeviceContext):
            stack.enter_context(_pop_mode_temporarily())
        yield


@contextmanager
def seems_compiled() -> Iterator[None]:
    """Within it `torch.compiler.is_compiling()` is true in this thread, as it is while Dynamo traces."""
    thread, before = threading.get_ident(), torch.compiler.is_compiling
    try:
        torch.compiler.is_compiling = lambda: threading.get_ident() == thread or before()
        yield
    finally:
        torch.compiler.is_compiling = before


def unchanged(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether these are the same; tensors without values do not stay."""
    same = now.keys() == then.keys() and all(now[name] is x for name, x in then.items())
    for name in [name for name, x in now.items() if isinstance(x, FakeTensor)]:
        now.pop(name)
        now |= {name: then[name]} if name in then else {}
    return same


def record(
    function: Callable[..., tuple[torch.Tensor | None, ...]],
    given: tuple[Any, ...],
    named: dict[str, Any],
    model: torch.nn.Module,
    kind: type[torch.nn.Module],
) -> tuple[GraphModule, list[torch.Tensor], Callable[..., Any]]:
    """The graph of a call, its inputs, and what makes of the compiled graph a function for such calls.

    Raises `Unrecorded` for what a graph would not repeat, and whatever torch raises where a value is asked for.
    """
    modes = torch.overrides._len_torch_function_stack() or _get_current_dispatch_mode()
    if torch.is_grad_enabled() or modes:
        raise Unrecorded("gradients or other modes")
    states = [x for module in model.modules() for x in (vars(module), module._parameters, module._buffers)]
    before = [dict(state) for state in states]
    tensors = tensors_in([*given, *named.values()])
    places: dict[int, Place] = {id(x): (state, name) for state in states for name, x in state.items()}
    places |= {id(x): (None, number) for number, x in enumerate(tensors)}
    fake = FakeTensorMode(
        allow_non_fake_inputs=True,
        shape_env=ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False),
        static_shapes=True,
    )
    try:
        with seems_compiled(), fake, Recorder(places, fake, kind) as recorder:
            found = function(*given, **named)
    finally:
        same = [unchanged(now, then) for now, then in zip(states, before, strict=True)]
    if not all(same):
        raise Unrecorded("the forward changes its model")
    places_read, is_given = recorder.read, [x is not None for x in found]
    recorder.graph.output(recorder._known(tuple(x for x in found if x is not None)))

    def whole(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> tuple[torch.Tensor | None, ...]:
            tensors = tensors_in([*given, *named.values()])
            inputs = [tensors[name] if held is None else held[name] for held, name in places_read]
            outputs = iter(compiled(*inputs))
            return tuple(next(outputs) if there else None for there in is_given)

        return call

    return GraphModule({}, recorder.graph), recorder.inputs, whole
