"""Graphs compiled for a CPU with few calls of a compiler: equal parts once, and the C++ of several in one file.

This is the only file that reaches into torch's compiler. With a torch that is not `KNOWN` each kernel is compiled by
torch itself, in a file of its own.
"""

import importlib.util
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._guards import tracing
from torch.fx.node import map_arg
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._device import DeviceContext


KNOWN = "2.13" <= torch.__version__ < "2.15"  # versions of torch whose kernels are collected; compared as versions


@contextmanager
def in_one_file() -> Iterator[None]:
    """Within it the C++ kernels that torch writes are collected; at its end all are compiled, in one file.

    Torch compiles each alone, and most of that time goes into its headers: 21 take 1.4 s in one file, in place of 11.
    Dynamo holds a lock around a backend, so there is one such context at a time.
    """
    if not KNOWN:
        yield
        return
    from torch._inductor import async_compile, config
    from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture, PyCodeCache

    compile_class: Any = async_compile.AsyncCompile
    thread, bind, wait = threading.get_ident(), compile_class.cpp_pybinding, compile_class.wait
    sources: list[str] = []
    libraries: list[ModuleType] = []
    waiting: list[tuple[Any, dict[str, Any]]] = []

    class Later(CppPythonBindingsCodeCache):
        @classmethod
        def load_async(cls, main_code: str, *args: Any, **kwargs: Any) -> Callable[[], ModuleType]:
            number = len(sources)
            sources.append(main_code)
            return lambda: libraries[number]

    def bind_later(compiler: Any, argtypes: list[str], source: str) -> Any:
        if threading.get_ident() != thread:
            return bind(compiler, argtypes, source)
        return LambdaFuture(Later.load_pybinding_async(argtypes, source))

    def wait_later(compiler: Any, scope: dict[str, Any]) -> None:
        if threading.get_ident() != thread:
            return wait(compiler, scope)
        waiting.append((compiler, scope))

    # whatever torch itself has kernels for need not be tried, by a file for each kind of vectors
    is_sure = config.cpp.vec_isa_ok is None and torch.backends.cpu.get_cpu_capability() == "AVX512"
    patches = {"cpp.vec_isa_ok": True} if is_sure else {}
    try:
        compile_class.cpp_pybinding, compile_class.wait = bind_later, wait_later
        with config.patch(patches):
            yield
            if sources:
                first = CppPythonBindingsCodeCache.load(one_file(sources))
                libraries += [first, *(sibling(first, number) for number in range(1, len(sources)))]
        for compiler, scope in waiting:
            scope |= {name: x.result() for name, x in scope.items() if isinstance(x, LambdaFuture)}
            wait(compiler, scope)
    except BaseException:
        PyCodeCache.cache_clear()  # modules may be in it that lack their kernels
        raise
    finally:
        compile_class.cpp_pybinding, compile_class.wait = bind, wait


@contextmanager
def without_default_device() -> Iterator[None]:
    """A context where `torch.device(...)` around it, or `set_default_device`, counts for nothing in this thread.

    It is a mode in which Dynamo does not trace all that a forward calls.
    """
    with ExitStack() as stack:
        while isinstance((_get_current_function_mode_stack() or [None])[-1], DeviceContext):
            stack.enter_context(_pop_mode_temporarily())
        yield


def one_file(sources: list[str]) -> str:
    """The C++ of several extension modules, each of one function `kernel`; the n-th becomes `kernel<n>` from 1 on."""
    lines = [line for source in sources for line in source.splitlines()]
    parts = ["#define PY_SSIZE_T_CLEAN", *dict.fromkeys(line for line in lines if line.startswith("#include"))]
    for number, source in enumerate(sources):
        names = {name: f"{name}{number or ''}" for name in ("kernel", "PyInit_kernel")}
        parts += [f"#define {name} {new}" for name, new in names.items()]
        parts += [f"namespace part{number} {{", re.sub("(?m)^#include.*", "", source), "}"]
        parts += [f"#undef {name}" for name in names]
    return "\n".join(parts)


def sibling(first: ModuleType, number: int) -> ModuleType:
    """Another extension module of the file that the first one is in."""
    spec: Any = importlib.util.spec_from_file_location(f"{first.__name__}{number}", first.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def signature(part: Any) -> tuple[str, list[Any]]:
    """A key that parts share if one can stand for the other, and examples of the inputs of a part."""
    numbers: dict[torch.fx.Node, str] = {}
    storages: dict[int, int] = {}
    lines: list[tuple[Any, ...]] = []
    inputs = []
    for node in part.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        if node.op == "placeholder":
            x = node.meta["example_value"]
            inputs.append(x)
            storage = storages.setdefault(x.untyped_storage()._cdata, len(storages))  # which inputs share memory
            lines.append((type(x), x.dtype, x.shape, x.stride(), x.storage_offset(), x.requires_grad, storage))
        else:
            lines.append((node.op, node.target, *map_arg((node.args, node.kwargs), numbers.__getitem__)))
    return repr(lines), inputs


def compile_part(part: Any, inputs: list[Any], compiler: Callable[..., Any]) -> Callable[..., Any]:
    """What a compiler makes of a part for such inputs; it gives what the part gives."""
    (output,) = part.graph.find_nodes(op="output")
    gives_tuple = isinstance(output.args[0], tuple)
    if not gives_tuple:
        output.args = (output.args,)
        part.recompile()
    with tracing(None):  # what torch knows of the whole trace does not hold for a part
        compiled = compiler(part, inputs)
    return compiled if gives_tuple else lambda *inputs: compiled(*inputs)[0]
