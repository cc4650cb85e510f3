"""Forwards of one model that torch has compiled, one for each size that has occurred."""

import re
import threading
import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch._dynamo import lookup_backend
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .attention import grouped_queries
from .prepacked import Prepacked, use_prepacked
from .ragged import Masks
from .static import Buffers, Pool, StaticLayer


Size = tuple[Any, ...]
PLAIN = (bool, int, float, str, tuple, list, set, dict, torch.dtype, torch.device)  # constants in a trace
HELD = {"_parameters", "_buffers"}  # of a module: inputs of a trace, of which shape, dtype and device are fixed
SHARED = vars(torch.nn.Module()).keys() - HELD - {"training"}  # what every module has
OTHERS = re.compile(r"\bmodel\b")  # in the source of a guard


class Regions:
    """The compiled forwards of a model: they stay as long as it does, for all strategies and threads.

    Attributes:
        compilations: how many forwards torch has compiled so far.
    """

    def __init__(self, model: PreTrainedModel, captures: bool, traits: int = 0):
        """
        Args:
            model: not kept.
            captures: whether forwards of this thread are captured in CUDA graphs.
            traits: of the model, to see later whether it has changed; see the function.
        """
        self.name, self.captures, self.traits = type(model).__name__, captures, traits
        self.masks, self.pool, self.prepacked = Masks(model), Pool(), Prepacked()
        self.compilations, self.thread = 0, threading.current_thread()
        self.lock = threading.Lock()
        self.functions: dict[Size, Callable[..., torch.Tensor]] = {}

    def __call__(self, model: PreTrainedModel, buffers: Buffers, tokens: torch.Tensor, keep: int, **given: Any) -> Any:
        """A compiled `forward`, with its arguments."""
        # torch replays a graph in the thread alone that captured it (pytorch issue 123177)
        captures = self.captures and threading.current_thread() is self.thread
        names = (name for name in given if given[name] is not None)
        size = (*buffers[0][0].shape[::2], *tokens.shape, keep, captures, *names)
        with self.lock:
            if size not in self.functions:
                self._say()
                self.functions[size] = self._compiled("_".join(map(str, size)), captures)
        if captures:
            torch.compiler.cudagraph_mark_step_begin()
        with grouped_queries(traced=True), self.prepacked.in_use():
            logits = self.functions[size](model, self.masks, buffers, tokens, keep=keep, **given)
        return logits.clone() if captures else logits  # graphs write their outputs to the same place again

    def _compiled(self, name: str, captures: bool) -> Callable[..., torch.Tensor]:
        """`forward` with a code object of its own, since torch compiles each code object for a few sizes only."""
        code = forward.__code__.replace(co_name=f"forward_{name}")
        alone = FunctionType(code, forward.__globals__, code.co_name)
        alone.__kwdefaults__ = forward.__kwdefaults__
        options: Any = {"guard_filter_fn": on_inputs}
        compiling = WeakMethod(self._inductor)  # torch keeps every backend that it has seen

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            inductor = compiling()
            assert inductor is not None
            return inductor(graph, inputs, captures)

        return torch.compile(alone, fullgraph=True, dynamic=False, backend=backend, options=options)

    def _inductor(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], captures: bool) -> Any:
        self.compilations += 1
        use_prepacked(graph, inputs)
        options = {"triton.cudagraphs": True} if captures else None  # what mode="reduce-overhead" stands for
        inductor: Callable[..., Any] = lookup_backend("inductor")
        return inductor(graph, inputs, config_patches=options)

    def _say(self) -> None:
        if not self.functions:
            warnings.warn(
                f"compile=True compiles the forwards of {self.name} once for each size that occurs, which takes "
                "seconds for each; later calls of these sizes find them compiled.",
                UserWarning,
                stacklevel=2,
            )


REGIONS: WeakKeyDictionary[PreTrainedModel, Regions] = WeakKeyDictionary()


def regions_of(model: PreTrainedModel, device: torch.device) -> Regions:
    """The compiled forwards of a model; if it has changed since they were compiled, an empty `Regions`."""
    found, now = REGIONS.get(model), traits(model)
    if found is None or found.traits != now:
        found = REGIONS[model] = Regions(model, device.type == "cuda", now)
    found.prepacked.refresh(model)
    return found


def traits(model: PreTrainedModel) -> int:
    """A hash of what a compiled forward relies on: modules, their settings and hooks, and shapes of tensors."""
    configs = {id(config): vars(config) for config in (model.config, model.config.get_text_config(decoder=True))}
    found: list[Any] = [repr({k: v for k, v in config.items() if isinstance(v, PLAIN)}) for config in configs.values()]
    for module in model.modules():
        found.append((id(module), type(module)))
        for name, value in vars(module).items():
            if name in HELD:
                found += [(key, x.shape, x.dtype, x.device) for key, x in value.items() if x is not None]
            elif name in SHARED:
                if value and name.endswith("_hooks"):
                    found += map(id, value.values())
            elif isinstance(value, PLAIN):
                found.append((name, repr(value)))
    return hash(tuple(found))


def forward(
    model: PreTrainedModel,
    masks: Masks,
    buffers: Buffers,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    last: torch.Tensor,
    pads: torch.Tensor,
    *,
    holes: torch.Tensor | None = None,
    keep: int,
    **others: torch.Tensor,
) -> torch.Tensor:
    """One forward over buffers of fixed size; no value in it has to be known before it runs.

    Args:
        model: the model.
        masks: those of the model.
        buffers: written at the slots of the tokens.
        tokens: [R, q] int64, which go to consecutive slots.
        starts: [R] int64, the slot of each row's first one.
        offsets: [..., R, 1] int64, position minus slot.
        last: as `offsets`, the last slot whose position exists; later ones get the same position.
        pads: [R] int64, leading slots that hold no token.
        holes: [R, C] bool, other slots that are hidden.
        keep: for how many of the last tokens logits are wanted.
        others: what else the forward is given.

    Returns:
        logits [R, keep, V] in the model's dtype.
    """
    slots = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    return model(
        input_ids=tokens,
        attention_mask=masks(slots, pads, buffers[0][0].shape[2], holes),
        position_ids=offsets + torch.minimum(slots, last),
        past_key_values=Cache(layers=[StaticLayer(keys, values, slots) for keys, values in buffers]),
        use_cache=True,
        return_dict=True,
        **others,
    ).logits[:, -keep:]


def on_inputs(guards: Sequence[Any]) -> list[bool]:
    """Which guards to keep: those on inputs of forwards, and on settings of torch.

    Hundreds guard the model, and checking them takes as long as a small layer; its traits are compared once a call
    instead. Globals that a forward reads do not change, except for the registry of attention functions, where another
    copy of this package may put its patch.
    """
    return [not guard.is_global and not OTHERS.search(guard.name) for guard in guards]
