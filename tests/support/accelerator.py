"""An accelerator that is none: tensors that say they are on cuda:0 compute on the CPU, and what would cost is counted.

`Accelerator` is a context in which tensors can be made on "cuda". As with CUDA, an operation whose tensors are on both
devices is refused, except for numbers (tensors without dimensions) and indices; so is a generator of the other device,
and a cumulative sum of floats under `torch.use_deterministic_algorithms`.
Counted are launches (operations that are no views), waits (for what the device has to do) and blocking sends, the
latter two by the line of code that caused them. The default generator of the CPU is also that of the device.
"""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.streamers import BaseStreamer

import hf_specx
from hf_specx.models import foreign_code


CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
DENSE = torch.contiguous_format
aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.bincount}
FREE = {aten.empty, aten.empty_like, aten.new_empty, aten.lift_fresh, aten._unsafe_view, aten._local_scalar_dense}
INDEXING = {aten.index, aten.index_put, aten.index_put_}
SKIPPED = (str(Path(torch.__file__).parent), __file__)
HOUSE, MODELS = (str(Path(module.__file__ or "").parent) for module in (hf_specx, transformers.models))
PlainGenerator = torch.Generator


class OnDevice(torch.Tensor):
    """A tensor on cuda:0; `inner` is the one on the CPU that it stands for."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnDevice":
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), **layout, device=CUDA)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on the device outside of its context")


class Generator(PlainGenerator):
    """A generator that knows its device."""

    def __new__(cls, device: Any = CPU) -> "Generator":
        made = super().__new__(cls, CPU)
        made.place = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        return self.place


class Bindings(TorchFunctionMode):
    """What torch does before it gets to an operation; some of it needs a build with CUDA, and is done here."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:  # as a copy of one is made, by its type and number
            return func(*args, **(kwargs or {}))
        args, kwargs = each(args, numbered), {name: numbered(value) for name, value in (kwargs or {}).items()}
        on_device = any(isinstance(one, OnDevice) for one in args)
        if on_device and func in BINDINGS:
            return BINDINGS[func](*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None:
            here = on_device or torch.device(kwargs.get("device") or CPU).type == "cuda"
            if generator.device.type != ("cuda" if here else "cpu"):
                raise RuntimeError(f"Expected a generator of {CUDA if here else CPU} in {func}")
        return func(*args, **kwargs)


class Accelerator(TorchDispatchMode):
    """The device while the context lasts; one at a time.

    Attributes:
        launches: operations on the device that are no views, by what they are for: see `room`.
        waits, sends: how often it was waited for, and how often something was sent to it blockingly, by line of code.
    """

    current: "Accelerator"

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.waits, self.sends = Counter[str](), Counter[str](), Counter[str]()

    def __enter__(self) -> "Accelerator":
        Accelerator.current, self.stack = self, ExitStack()
        replaced = {
            "Generator": Generator,
            "cuda._lazy_init": lambda: None,
            "cuda.default_generators": (torch.default_generator,),
            "cuda.current_device": lambda: 0,
            "cuda.synchronize": lambda device=None: self.wait(),
            "cuda.get_device_name": lambda device=None: "emulated",
            "cuda.mem_get_info": lambda device=None: (2**34, 2**34),
        }
        for name, value in replaced.items():
            self.stack.enter_context(mock.patch(f"torch.{name}", value))
        plain_tensors = (*foreign_code.PLAIN_TENSORS, OnDevice)
        self.stack.enter_context(mock.patch.object(foreign_code, "PLAIN_TENSORS", plain_tensors))
        torch._C._set_only_lift_cpu_tensors(True)  # else torch itself would send the numbers of `torch.tensor`
        self.stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        self.stack.enter_context(Bindings())
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.stack.close()

    def launch(self, count: int = 1) -> None:
        if count:
            self.launches[room()] += count

    def wait(self) -> None:
        self.waits[caller()] += 1

    def send(self) -> None:
        self.sends[caller()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation, on the tensors that those on the device stand for."""
        kwargs = kwargs or {}
        tensors: list[torch.Tensor] = []
        plain_args = each(args, partial(plain, tensors))
        plain_kwargs = {name: each(value, partial(plain, tensors)) for name, value in kwargs.items()}
        given, device = any(isinstance(x, OnDevice) for x in tensors), kwargs.get("device")
        here = given if device is None else torch.device(device).type == "cuda"
        if not given and not here:
            return func(*args, **kwargs)
        self._check(func, args, kwargs, tensors, here)
        self._count(func, args, kwargs, here)
        found = func(*plain_args, **plain_kwargs)
        if func.overloadpacket is aten.copy_:
            return args[0]
        if not here:
            return found
        known = {id(x.inner): x for x in tensors if isinstance(x, OnDevice)}  # an operation in place returns its own
        return each(found, lambda x: known[id(x)] if id(x) in known else outer(x))

    def _check(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], here: bool) -> None:
        packet = func.overloadpacket
        if packet in (aten._to_copy, aten.copy_):
            return
        sums_floats = packet is aten.cumsum and (kwargs.get("dtype") or args[0].dtype).is_floating_point
        if sums_floats and here and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        if packet in INDEXING:
            tensors = [args[0], *args[2:3]] if isinstance(args[0], OnDevice) else [*tensors, args[0]]
        if any(not isinstance(x, OnDevice) and (x.dim() or not here) for x in tensors):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found both in {func}")

    def _count(self, func: Any, args: Any, kwargs: Any, here: bool) -> None:
        packet = func.overloadpacket
        self.launch(not (func.is_view or packet in FREE))
        if packet in (aten._to_copy, aten.copy_):
            source = args[1] if packet is aten.copy_ else args[0]
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            here = isinstance(args[0], OnDevice) if packet is aten.copy_ else here
            if isinstance(source, OnDevice) and not here:
                self.wait()
            elif here and blocking and not isinstance(source, OnDevice):
                self.send()
        elif packet in WAITING:
            self.wait()
        elif packet in INDEXING:
            self.note_index(tuple(args[1]))

    def note_index(self, index: Any) -> bool:
        """Count what an index costs, of which each part has to be on the device; returns whether it is no view."""
        parts = index if isinstance(index, tuple) else (index,)
        arrays = [x for x in parts if isinstance(x, list) or (isinstance(x, torch.Tensor) and x.dim())]
        for part in parts:
            if isinstance(part, OnDevice) and (part.dtype is torch.bool or not part.dim()):
                self.wait()
        for part in arrays:
            if not isinstance(part, OnDevice):
                self.send()
        return bool(arrays)


@contextmanager
def emulated() -> Iterator[Accelerator]:
    """The device, for code without gradients."""
    with torch.no_grad(), Accelerator() as device:
        yield device


def caller() -> str:
    """The line of code, outside of torch, that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(SKIPPED):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


def room() -> str:
    """The room of the project that an operation is for; "forwards" are the layers of transformers' models."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name.startswith(HOUSE):
            return Path(name).relative_to(HOUSE).parts[0]
        if name.startswith(MODELS):
            break
        frame = frame.f_back
    return "forwards"


def each(value: Any, change: Callable) -> Any:
    """Arguments or results of an operation, with each of them changed."""
    if isinstance(value, list | tuple):
        return type(value)(each(one, change) for one in value)
    return change(value)


def numbered(value: Any) -> Any:
    """An argument; for "cuda" alone torch asks a build with CUDA which one that is."""
    return CUDA if isinstance(value, str | torch.device) and str(value) == "cuda" else value


def plain(tensors: list[torch.Tensor], value: Any) -> Any:
    """An argument of an operation as it is on the CPU; `tensors` collects those that are given."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return inner(value)
    return CPU if isinstance(value, torch.device) else value


def inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value


def outer(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, torch.Tensor) else value


def on_device(model: nn.Module) -> nn.Module:
    """A copy of a model with its weights and buffers on the device."""
    moved, shared = copy.deepcopy(model), dict[int, OnDevice]()  # tied weights stay tied
    for module in moved.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = shared.setdefault(id(tensor), as_parameter(tensor))
    return moved


class Launches(BaseStreamer):
    """Notes, as a streamer of plain `generate` or a listener of ours, what has been launched after each step."""

    def __init__(self) -> None:
        self.after: list[Counter[str]] = []

    def put(self, value: Any) -> None:
        self.after.append(Counter(Accelerator.current.launches))

    observe = put

    def end(self) -> None:
        """Nothing more is launched for a step."""


def launched(model: Any, inputs: dict[str, torch.Tensor], strategy: Any = None, **settings: Any) -> dict[str, float]:
    """What a round of a call launches on the device, or a step of plain `generate`, by rooms.

    By three behind the first one, so that what a call launches once does not count, nor rounds with fewer candidates.
    """
    noted = Launches()
    if strategy is not None:
        strategy.listeners = (noted,)
    with emulated():
        there = {name: x.to("cuda:0") for name, x in inputs.items()}
    with emulated():
        torch.manual_seed(0)
        how = {"streamer": noted} if strategy is None else {"custom_generate": strategy}
        model.generate(**there, **settings, **how)
    return {name: (number - noted.after[1][name]) / 3 for name, number in noted.after[4].items()}


def as_parameter(tensor: torch.Tensor) -> OnDevice:
    made = OnDevice(tensor.detach())
    made._is_param = isinstance(tensor, nn.Parameter)  # torch takes a subclass for one by this mark
    return made


def waiting(name: str) -> Callable:
    """A method that waits for the device."""

    def call(tensor: OnDevice, *args: Any, **kwargs: Any) -> Any:
        Accelerator.current.wait()
        return each(getattr(tensor.inner, name)(*args, **kwargs), outer)

    return call


def get_item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    if not isinstance(tensor, OnDevice):
        raise RuntimeError("indices should be on the device of the indexed tensor, which is cpu")
    Accelerator.current.launch(Accelerator.current.note_index(index))
    return OnDevice(tensor.inner[each(index, inner)])


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    if not isinstance(tensor, OnDevice):
        return tensor.__setitem__(index, value)
    device = Accelerator.current
    device.launch()
    gathers = device.note_index(index)
    if isinstance(value, torch.Tensor) and not isinstance(value, OnDevice) and value.dim():
        if gathers:
            raise RuntimeError("the values are not on the device of the tensor that they are put into")
        device.send()
    tensor.inner[each(index, inner)] = inner(value)


def new_tensor(tensor: torch.Tensor, data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype or tensor.dtype, device=device or tensor.device)


def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """One kernel, which torch chooses by the device."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if not all(isinstance(x, OnDevice) for x in given):
        raise RuntimeError("Expected all tensors to be on the same device in attention")
    Accelerator.current.launch()
    found = nn.functional.scaled_dot_product_attention(*map(inner, args), **{k: inner(v) for k, v in kwargs.items()})
    return OnDevice(found)


def rms_norm(given: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: Any = None) -> torch.Tensor:
    """One kernel; on the CPU torch computes it step by step."""
    if not isinstance(weight, OnDevice):
        raise RuntimeError("Expected all tensors to be on the same device in rms_norm")
    Accelerator.current.launch()
    return OnDevice(nn.functional.rms_norm(given.inner, shape, weight.inner, eps))


BINDINGS: dict[Any, Callable] = {
    torch.nonzero: waiting("nonzero"),
    torch.Tensor.__invert__: torch.bitwise_not,
    torch.Tensor.contiguous: lambda tensor: tensor if tensor.is_contiguous() else tensor.clone(memory_format=DENSE),
    torch.Tensor.__getitem__: get_item,
    torch.Tensor.__setitem__: set_item,
    torch.Tensor.__deepcopy__: lambda tensor, memo: tensor.clone(),
    torch.Tensor.copy_: aten.copy_,
    torch.Tensor.new_tensor: new_tensor,
    nn.functional.scaled_dot_product_attention: attention,
    nn.functional.rms_norm: rms_norm,
}
for name in ("tolist", "nonzero", "__int__", "__index__", "__float__"):
    BINDINGS[getattr(torch.Tensor, name)] = waiting(name)
