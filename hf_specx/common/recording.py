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
# where a tensor is from: a dictionary of a module and its name there, or None and its number among the arguments
Source = tuple[dict[str, Any] | None, Any]


class Unrecorded(Exception):
    """A forward does what a graph of functions would not."""


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors in arguments, and those that objects among them have, modules aside."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
        elif not isinstance(value, torch.nn.Module):
            tensors += [x for x in getattr(value, "__dict__", {}).values() if isinstance(x, torch.Tensor)]
    return tensors


def conditions(values: Iterable[Any]) -> tuple[Any, ...]:
    """What a recorded forward relies on beside its model: constants and kinds of tensors in arguments, settings."""
    flat = [x for value in values for x in (value if isinstance(value, tuple) else [value])]
    constants = [x for x in flat if isinstance(x, CONSTANTS)]
    return (*constants, *map(kind_of, tensors_in(values)), *settings())


def kind_of(x: torch.Tensor) -> tuple[Any, ...]:
    """All that a compiled forward relies on in a tensor but its values."""
    strides = x.stride() if x.layout == torch.strided else [0] * x.ndim
    return type(x), x.dtype, x.device, x.shape, *(n for n, size in zip(strides, x.shape, strict=True) if size != 1)


def settings() -> tuple[Any, ...]:
    """The settings of torch that change what its functions do."""
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

    def __init__(self, sources: dict[int, Source], fake: FakeTensorMode, kind: type[torch.nn.Module]):
        super().__init__()
        self.sources, self.fake, self.kind, self.settings = sources, fake, kind, settings()
        self.graph = Graph()
        self.nodes: dict[int, Node] = {}  # by the id of a tensor
        self.inputs: list[torch.Tensor] = []
        self.input_sources: list[Source] = []
        self.alive: list[torch.Tensor] = []  # so that no other tensor gets the id of one of these
        self.last_input: Node | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VALUES:  # of arguments, which have some; of any other tensor torch itself refuses
            raise Unrecorded(f"{func} gives values")
        if settings() != self.settings:
            raise Unrecorded(f"{func} is called under other settings of torch")
        result = func(*args, **(kwargs or {}))
        is_several = isinstance(result, list | tuple) and any(isinstance(x, torch.Tensor) for x in result)
        if is_several or result is None or isinstance(result, torch.Tensor):
            node = self._node_of_call(func, self._as_nodes(args), self._as_nodes(kwargs or {}))
            node.meta["nn_module_stack"] = self._module()
            for number, x in enumerate(result if is_several else [result]):
                if isinstance(x, torch.Tensor) and id(x) not in self.nodes and id(x) not in self.sources:
                    output = self.graph.call_function(operator.getitem, (node, number)) if is_several else node
                    output.meta |= {"example_value": x, "nn_module_stack": node.meta["nn_module_stack"]}
                    self._add(x, output)
        return result

    def _node_of_call(self, func: Any, args: Any, kwargs: Any) -> Node:
        if getattr(func, "__name__", "") == "__get__":
            return self.graph.call_function(getattr, (*args, func.__self__.__name__))
        if getattr(func, "__name__", "") == "__set__":
            raise Unrecorded("an attribute of a tensor is set")
        name = METHODS.get(func, "")
        if name.startswith("__") and hasattr(operator, name):
            return self.graph.call_function(getattr(operator, name), args, kwargs)
        if name:
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(func, args, kwargs)

    def _as_nodes(self, values: Any) -> Any:
        """Arguments, or outputs of a forward, with nodes in place of tensors."""
        return map_aggregate(values, self._node)

    def _node(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, CONSTANTS):
                raise Unrecorded(f"{type(value).__name__} among the arguments")
            return value
        if id(value) not in self.nodes:
            if id(value) not in self.sources or type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise Unrecorded("a tensor that is neither an argument nor the model's, or of another kind")
            with self.graph.inserting_after(self.last_input):
                self.last_input = self.graph.placeholder(f"input_{len(self.inputs)}")
            self.last_input.meta["example_value"] = self.fake.from_tensor(value, static_shapes=True)
            self._add(value, self.last_input)
            self.inputs.append(value)
            self.input_sources.append(self.sources[id(value)])
        return self.nodes[id(value)]

    def _add(self, value: torch.Tensor, node: Node) -> None:
        self.nodes[id(value)] = node
        self.alive.append(value)

    def _module(self) -> dict[str, tuple[str, type]]:
        """The outermost module of the kind that is running, as in the `nn_module_stack` of Dynamo's graphs."""
        frame, stack = sys._getframe(2), {}
        while frame is not None:
            if frame.f_code is torch.nn.Module._call_impl.__code__ and isinstance(frame.f_locals["self"], self.kind):
                module = frame.f_locals["self"]
                stack = {"": (str(id(module)), type(module))}
            frame = frame.f_back  # type: ignore[assignment]
        return stack


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
    """Whether two states of a module are the same; tensors without values are taken out of the one that it has now."""
    is_same = now.keys() == then.keys() and all(now[name] is x for name, x in then.items())
    for name in [name for name, x in now.items() if isinstance(x, FakeTensor)]:
        now.pop(name)
        if name in then:
            now[name] = then[name]
    return is_same


def record(
    function: Callable[..., tuple[torch.Tensor | None, ...]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: torch.nn.Module,
    kind: type[torch.nn.Module],
) -> tuple[GraphModule, list[torch.Tensor], Callable[..., Any]]:
    """The graph of a call, its inputs, and what makes of the compiled graph a function for such calls.

    Args:
        function: what is called, with `args` and `kwargs`; it gives tensors or None.
        model: whose tensors are read in each call.
        kind: the class of its layers.

    Raises:
        Unrecorded: for what a graph would not repeat; or whatever torch raises where a value is asked for.
    """
    modes = torch.overrides._len_torch_function_stack() or _get_current_dispatch_mode()
    if torch.is_grad_enabled() or modes:
        raise Unrecorded("gradients or other modes")
    states = [x for module in model.modules() for x in (vars(module), module._parameters, module._buffers)]
    before = [dict(state) for state in states]
    tensors = tensors_in([*args, *kwargs.values()])
    sources: dict[int, Source] = {id(x): (state, name) for state in states for name, x in state.items()}
    sources |= {id(x): (None, number) for number, x in enumerate(tensors)}
    fake = FakeTensorMode(
        allow_non_fake_inputs=True,
        shape_env=ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False),
        static_shapes=True,
    )
    try:
        with seems_compiled(), fake, Recorder(sources, fake, kind) as recorder:
            results = function(*args, **kwargs)
    finally:
        are_same = [unchanged(now, then) for now, then in zip(states, before, strict=True)]
    if not all(are_same):
        raise Unrecorded("the forward changes its model")
    input_sources, are_tensors = recorder.input_sources, [x is not None for x in results]
    recorder.graph.output(recorder._as_nodes(tuple(x for x in results if x is not None)))

    def with_sources(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
            tensors = tensors_in([*args, *kwargs.values()])
            inputs = [tensors[name] if state is None else state[name] for state, name in input_sources]
            outputs = iter(compiled(*inputs))
            return tuple(next(outputs) if is_tensor else None for is_tensor in are_tensors)

        return call

    return GraphModule({}, recorder.graph), recorder.inputs, with_sources
