"""What a call does outside of the models' forwards: the time of its rounds there, and the memory that it allocates."""

import dataclasses
import statistics
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from hf_specx.cache.slots import MARGIN
from hf_specx.common.devices import execution_device, synchronize
from hf_specx.engine.report import SpeculationReport

from .bare import BareModel
from .cells import SHORT, Cell
from .contenders import Contender
from .inputs import BenchPair
from .timer import Advance, spread


FLOAT = 4  # bytes


class ForwardTimes:
    """Seconds of each forward of a target and its draft, by hooks that wait for the device before and after."""

    def __init__(self, target: PreTrainedModel, draft: PreTrainedModel):
        self.target = target
        self.forwards: list[tuple[PreTrainedModel, float]] = []
        self.handles: list[Any] = []
        for model in (target, draft):
            self.handles.append(model.register_forward_pre_hook(self._begin))
            self.handles.append(model.register_forward_hook(self._end))

    def _begin(self, module: Any, args: Any) -> None:
        synchronize(execution_device(module))
        self.started = time.perf_counter()

    def _end(self, module: Any, args: Any, output: Any) -> None:
        synchronize(execution_device(module))
        self.forwards.append((module, time.perf_counter() - self.started))

    @property
    def rounds(self) -> list[float]:
        """Seconds of each round's forwards, which end with the target's; each model's first reads the prompts."""
        found, seconds, read = [], 0.0, set()
        for model, taken in self.forwards:
            if model not in read:
                read.add(model)
                continue
            seconds += taken
            if model is self.target:
                found.append(seconds)
                seconds = 0.0
        return found

    def __enter__(self) -> "ForwardTimes":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self.handles:
            handle.remove()


def round_seconds(report: SpeculationReport) -> list[float]:
    """Of each step after the one that reads the prompts."""
    laps = report.laps
    return [sum(phases) for phases in zip(*(laps[phase][1:] for phase in ("draft", "target", "verify")), strict=True)]


def compare_contexts(cell: Cell, pair: BenchPair, advance: Advance) -> dict[str, Any]:
    """Seconds of a round outside of its forwards, after prompts of `SHORT` tokens and of the cell's, in turns.

    Returns:
        By contender: {"outside_short", "outside_long"} in seconds a round, and "ratio" of the second to the first.
    """
    found = {}
    for name in cell.contenders:
        contender = Contender(name, pair.target, pair.draft)
        seconds: dict[int, list[float]] = {SHORT: [], cell.prompt_tokens: []}
        for run in range(-1, cell.repeats):
            for prompt_tokens, noted in seconds.items():
                torch.manual_seed(cell.seed + max(run, 0))
                inputs = pair.inputs(cell.batch, prompt_tokens, cell.new_tokens, cell.seed)
                with ForwardTimes(pair.target, pair.draft) as forwards:
                    contender(inputs, cell.options)
                report = contender.report
                assert report is not None
                both = zip(round_seconds(report), forwards.rounds, strict=True)
                if run >= 0:
                    noted.append(statistics.median(whole - taken for whole, taken in both))
                advance()
        short, long = seconds.values()
        ratio = statistics.median(long) / statistics.median(short)
        found[name] = {"outside_short": spread(short), "outside_long": spread(long), "ratio": ratio}
    return {"contenders": found}


class LiveMemory(TorchDispatchMode):
    """Bytes of the storages that operations make, while they live.

    Attributes:
        live, peak: now, and at most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in given:
                self._note(tensor.untyped_storage())
        return output

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.known:
            return
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)

        def forget(gone: object) -> None:
            self.live -= size
            del self.known[key]

        self.known[key] = weakref.ref(storage, forget)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Bytes that a function has allocated at most at one time, beyond what there was before."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with LiveMemory() as memory:
        function()
    return memory.peak


def measure_memory(cell: Cell, pair: BenchPair, advance: Advance) -> dict[str, Any]:
    """The peak of each contender beyond models, keys and values.

    Keys and values are counted as one slot for each token of the longest row's prompt and text, and `MARGIN` for
    candidates after them.

    Returns:
        By contender: "peak" and "kv" in bytes, "beyond" in floats, and "limit", the 16 B γ V floats that are allowed.
    """
    inputs = pair.inputs(cell.batch, cell.prompt_tokens, cell.new_tokens, cell.seed)
    device, vocab_size = execution_device(pair.target), pair.target.config.vocab_size
    slots = cell.batch * (cell.prompt_tokens + cell.new_tokens + MARGIN)
    kv = int(slots * sum(_kv_bytes(model, inputs["input_ids"]) for model in (pair.target, pair.draft)))
    found = {}
    for name in cell.contenders:
        contender = Contender(name, pair.target, pair.draft)
        warm = dataclasses.replace(cell, new_tokens=4)
        contender(inputs, warm.options)
        advance()
        torch.manual_seed(cell.seed)
        peak = peak_bytes(lambda run=contender: run(inputs, cell.options), device)  # type: ignore[misc]
        advance()
        report = contender.report
        assert report is not None
        limit = 16 * cell.batch * max(1, report.num_draft_tokens) * vocab_size
        found[name] = {"peak": peak, "kv": kv, "beyond": (peak - kv) / FLOAT, "limit": limit}
    return {"contenders": found}


@torch.no_grad()
def _kv_bytes(model: PreTrainedModel, input_ids: torch.Tensor) -> float:
    bare = BareModel(model)
    bare.forward(input_ids[:1, :2], 1)
    return bare.kv_bytes()
