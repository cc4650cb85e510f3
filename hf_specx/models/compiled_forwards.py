"""Forwards of one model that torch has compiled, one for each size that has occurred, and their buffers of fixed size.

A compiled forward is made for one batch, one capacity and one query length. So that few of them serve all calls, sizes
are rounded up, and idle rows stay until there are as many as others.

On a CPU layers that are alike are compiled once, see `by_layers`. On CUDA the whole forward is one graph.
"""

import re
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch._dynamo import lookup_backend
from torch.fx.passes.split_module import split_module
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specx.common.kernels import compile_part, in_one_file, signature, without_default_device

from .attention import TILED, Masks, TreeAttention
from .foreign_code import global_readers, identity_of
from .layers import RingLayer, SlotLayer, Slots
from .packed_weights import PackedWeights, switches_modes, use_packed_weights
from .runner import HiddenStates
from .slots import CACHE, LayersKeysValues, Pool


IDLE_FORWARDS = 200  # twice as long as one of fewer rows, before that is compiled, which takes about as much time
EXACT = 9  # query lengths up to this one are not rounded up
PLAIN = (bool, int, float, str, tuple, list, set, dict, torch.dtype, torch.device)  # constants in a trace
HELD = {"_parameters", "_buffers"}  # of a module: inputs of a trace, of which shape, dtype and device are fixed
SHARED = vars(torch.nn.Module()).keys() - HELD - {"training"}  # what every module has
OTHERS = re.compile(r"\b(model|hidden)\b")  # in the source of a guard
SLOW = (
    "compile=True compiles the forwards of {} once for each size that occurs, which takes seconds for each; later "
    "calls of these sizes find them compiled."
)
UNCOMPILED = (
    "compile=True leaves the forwards of {} as they are: a hook or a replaced forward reads a global variable, whose "
    "changes a compiled forward would not see; keep the value in an attribute or an argument of it."
)


def row_bucket(rows: int) -> int:
    """The next power of two."""
    return 1 << (rows - 1).bit_length()


def capacity_bucket(slots: int) -> int:
    """The next power of two from 64 on, or three quarters of it."""
    whole = max(64, 1 << (slots - 1).bit_length())
    return whole * 3 // 4 if whole > 64 and slots <= whole * 3 // 4 else whole


def length_bucket(count: int) -> int:
    """The query length itself up to `EXACT`; beyond, up to a quarter more: four sizes between powers of two."""
    step = max(1, 1 << (count - 2).bit_length() >> 3) if count > EXACT else 1
    return -(-count // step) * step


class CompiledForwards:
    """The compiled forwards of a model: they stay as long as it does, for all strategies and threads.

    Those of the thread that made this are captured in CUDA graphs, if `captures`. They run as they are unless this
    `compiles`.
    """

    def __init__(self, model: PreTrainedModel, captures: bool, traits: int):
        self.captures, self.traits, self.compiles = captures, traits, True
        self.masks, self.pool, self.packed_weights = Masks(model), Pool(), PackedWeights()
        self.modules = list(model.modules())[1:]  # so that no other module gets the id of one of these
        self.compilations, self.thread = 0, threading.current_thread()
        self.sizes, self.idle = set[tuple[int, int]](), 0  # rows and slots of buffers so far; time lost by idle rows
        self.lock = threading.Lock()
        self.functions: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def rows(self, count: int, present: int, capacity: int) -> int:
        """Rows of the buffers of `capacity` slots for `count` decoding ones, where `present` are there.

        Once others have ended it is a size that was there before, until a smaller one pays for being compiled.
        """
        wanted = row_bucket(count)
        sizes = [rows for rows, slots in list(self.sizes) if slots == capacity and wanted <= rows <= present]
        if sizes and wanted not in sizes:
            self.idle += present // wanted - 1  # what the forward takes longer by
            if self.idle < IDLE_FORWARDS:
                return min(sizes)
            self.idle = 0
        self.sizes.add((wanted, capacity))
        return wanted

    def run(self, function: Any, size: tuple[Any, ...], *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
        """What a function gives once it is compiled for this size; guards on its model or `hidden` are not checked."""
        if not self.compiles:
            return function(*args, **kwargs)
        # torch replays a graph in the thread alone that captured it (pytorch issue 123177)
        captures = self.captures and threading.current_thread() is self.thread
        # torch guards the settings too, but compiles a code object for few of them
        key = (function, *size, captures, *settings(), *ALL_ATTENTION_FUNCTIONS.values())
        with self.lock:
            if key not in self.functions:
                name = f"{function.__name__}_{len(self.functions)}"
                self.functions[key] = self._compiled(function, name, captures)
            compiled = self.functions[key]
        if captures:
            torch.compiler.cudagraph_mark_step_begin()
        with self.packed_weights.in_use(), without_default_device():
            outputs = compiled(*args, **kwargs)
        # which graphs write to the same place again
        return tuple(None if x is None else x.clone() for x in outputs) if captures else outputs

    def _compiled(self, function: Any, name: str, captures: bool) -> Callable[..., Any]:
        """A function with a code object of its own, since torch compiles each code object for a few sizes only."""
        code = function.__code__.replace(co_name=name)
        alone = FunctionType(code, function.__globals__, code.co_name)
        alone.__kwdefaults__ = function.__kwdefaults__
        options: Any = {"guard_filter_fn": on_inputs}
        reference = weakref.ref(self)  # torch keeps every backend that it has seen

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            forwards = reference()
            assert forwards is not None
            return forwards._compile(graph, inputs, captures)

        return torch.compile(alone, fullgraph=True, dynamic=False, backend=backend, options=options)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], captures: bool) -> Callable[..., Any]:
        self.compilations += 1
        use_packed_weights(graph, inputs)
        on_cpu = all(x.device.type == "cpu" for x in inputs)
        # the first is what mode="reduce-overhead" stands for; parts give each other what they were compiled for
        patches = {"triton.cudagraphs": captures, "size_asserts": not on_cpu}
        inductor: Any = lookup_backend("inductor")
        inductor = partial(inductor, config_patches=patches)
        if not on_cpu:
            return inductor(graph, inputs)
        with in_one_file():
            return inductor(graph, inputs) if switches_modes(graph) else by_layers(graph, inductor)


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


def by_layers(graph: torch.fx.GraphModule, compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A traced forward in parts, one for each layer and one for what is before and behind; equal ones compiled once.

    For the target in the package the whole as one took more than twice as long to compile, and 2 to 4 % less to run.
    """
    merge_tiles(graph.graph)
    part_numbers, count, last = {}, 0, ""
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            layer = layer_of(node)
            count, last = count + (layer != last), layer
            part_numbers[node] = count
            if node.target is TILED:  # where the mask is from, so that layers are alike
                part_numbers[node] = max(part_numbers.get(x, 0) for x in node.all_input_nodes)
    parts = split_module(graph, None, part_numbers.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
    compiled: dict[str, Callable[..., Any]] = {}
    for name in [node.target for node in parts.graph.nodes if node.op == "call_module"]:
        part = getattr(parts, name)
        kind, inputs = signature(part)
        if kind not in compiled:
            compiled[kind] = compile_part(part, inputs, compiler)
        delattr(parts, name)
        setattr(parts, name, compiled[kind])
    return parts.forward


def merge_tiles(graph: torch.fx.Graph) -> None:
    """Have the additive mask once, where each layer has made its own."""
    first: dict[str, torch.fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=TILED):
        same = first.setdefault(repr((node.args, node.kwargs)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def layer_of(node: torch.fx.Node) -> str:
    """The path of the decoder layer that an operation was traced in; empty outside of layers."""
    modules = node.meta.get("nn_module_stack", {}).values()
    return next((path for path, kind in modules if issubclass(kind, GradientCheckpointingLayer)), "")


COMPILED_FORWARDS: weakref.WeakKeyDictionary[PreTrainedModel, CompiledForwards] = weakref.WeakKeyDictionary()


def compiled_forwards_of(model: PreTrainedModel, device: torch.device) -> CompiledForwards:
    """The compiled forwards of a model; if it has changed since they were compiled, an empty `CompiledForwards`."""
    forwards, traits_now = COMPILED_FORWARDS.get(model), traits(model)
    compiles = not global_readers(model)
    if forwards is None or (forwards.traits, forwards.compiles) != (traits_now, compiles):
        warnings.warn((SLOW if compiles else UNCOMPILED).format(type(model).__name__), UserWarning, stacklevel=2)
        forwards = COMPILED_FORWARDS[model] = CompiledForwards(model, device.type == "cuda", traits_now)
        forwards.compiles = compiles
    forwards.packed_weights.refresh(model)
    return forwards


def traits(model: PreTrainedModel) -> int:
    """A hash of what a compiled forward relies on: modules, their settings and hooks, and kinds of tensors."""
    configs = {id(config): vars(config) for config in (model.config, model.config.get_text_config(decoder=True))}
    facts: list[Any] = [repr({k: v for k, v in config.items() if isinstance(v, PLAIN)}) for config in configs.values()]
    numbers: dict[int, int] = {}  # of tensors by id: those of tied ones are the same
    for module in model.modules():
        facts.append((id(module), type(module)))
        for name, value in vars(module).items():
            if name in HELD or isinstance(value, torch.Tensor):
                for key, x in value.items() if name in HELD else [(name, value)]:
                    if x is not None:
                        facts.append((key, *kind_of(x), numbers.setdefault(id(x), len(numbers))))
            elif name in SHARED:
                if value and name.endswith("_hooks"):
                    # a trace reaches a hook by the key of its registration
                    facts += [(key, identity_of(hook)) for key, hook in list(value.items()) if not reads_states(hook)]
            elif isinstance(value, PLAIN):
                facts.append((name, repr(value)))
            elif name == "forward":  # in the place of that of its class
                facts.append(identity_of(value))
    return hash(tuple(facts))


def kind_of(x: torch.Tensor) -> tuple[Any, ...]:
    """All that a compiled forward relies on in a tensor but its values."""
    strides = x.stride() if x.layout == torch.strided else [0] * x.ndim
    return type(x), x.dtype, x.device, x.shape, *(n for n, size in zip(strides, x.shape, strict=True) if size != 1)


def reads_states(hook: Any) -> bool:
    """Whether a hook of a module is one of `HiddenStates`, which comes and goes with forwards."""
    return getattr(getattr(hook, "func", None), "__func__", None) is HiddenStates._record


def forward(
    model: PreTrainedModel,
    hidden: HiddenStates | None,
    masks: Masks,
    buffers: LayersKeysValues,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    last: torch.Tensor,
    pads: torch.Tensor,
    *,
    gaps: torch.Tensor | None = None,
    node_depths: torch.Tensor | None = None,
    node_mask: torch.Tensor | None = None,
    capacity: int,
    ring: int,
    keep: int,
    **others: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One forward over buffers of `capacity` slots, or a `ring` of less; no value in it is known before it runs.

    Gives logits [R, keep, V], and hidden states [R, keep, H] where it runs in the context of `hidden`. Tokens [R, q]
    go to consecutive slots from `starts` [R] on. The first `pads` [R] slots, and `gaps` [R, C], have no token.
    `offsets` [..., R, 1] are positions minus slots, and `last` the last slots whose positions exist: later ones get
    the same. Nodes of a tree have `node_depths` [R, q] and `node_mask` [R, q, q], as in `TreeAttention`.
    """
    slots = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    columns, tree = slots, None  # by position
    if node_depths is not None and node_mask is not None:
        columns, tree = starts[:, None] + node_depths, TreeAttention(starts[:, None], node_depths, node_mask)
    cache_slots = Slots(ring=ring)
    cache_slots.set_write_slots(slots, 0, capacity)
    layers: list[Any] = [(RingLayer if x.shape[2] < capacity else SlotLayer)(cache_slots, x, y) for x, y in buffers]
    for states in hidden.outputs if hidden is not None else ():
        states.clear()  # so that torch knows it as an argument before it meets the hooks, which come and go
    logits = model(
        input_ids=tokens,
        attention_mask=masks(slots, pads, capacity, gaps, ring, tree),
        position_ids=offsets + torch.minimum(columns, last),
        **{CACHE: Cache(layers=layers)},
        use_cache=True,
        return_dict=True,
        **others,
    ).logits
    return logits[:, -keep:], None if hidden is None else hidden.last(keep)


def on_inputs(guards: Sequence[Any]) -> list[bool]:
    """Which guards to keep: those on inputs of forwards, and on settings of torch.

    Hundreds guard the model, and checking them takes as long as a small layer; its traits are compared once a call
    instead. Globals that a forward reads do not change, except for the registry of attention functions.
    """
    return [not guard.is_global and not OTHERS.search(guard.name) for guard in guards]
