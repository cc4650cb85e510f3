"""Where a model runs. Its own `device` is that of its first weight, which is "meta" between forwards if offloaded."""

import platform
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel


CPU_FACTS = Path("/proc/cpuinfo")  # Linux; elsewhere Python knows


def execution_device(model: PreTrainedModel) -> torch.device:
    """Where a model's first forward runs, and where its inputs belong.

    accelerate's hooks know, on the model or on its input embeddings. A model without any is where its weights are.
    """
    found = [*_named(getattr(model, "_hf_hook", None)), *_of_hooks(model, "get_input_embeddings")]
    return found[0] if found else model.device


def last_device(model: PreTrainedModel) -> torch.device:
    """Where a model's logits are made: not where its forward starts, if its layers lie on several devices."""
    found = [*_of_hooks(model, "get_output_embeddings")]
    return found[-1] if found else execution_device(model)


def hardware(device: torch.device) -> str:
    """The name of a processor, for tables of times, which hold nowhere else; a CPU's with the number of threads."""
    if device.type == "cpu":
        return f"{_cpu_name()}, {torch.get_num_threads()} threads"
    named = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if named is None else named(device)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def _cpu_name() -> str:
    facts = CPU_FACTS.read_text(errors="replace").splitlines() if CPU_FACTS.is_file() else []
    names = (fact.partition(":")[2].strip() for fact in facts if fact.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _of_hooks(model: PreTrainedModel, getter: str) -> Iterator[torch.device]:
    """The devices that hooks name in a model's embeddings, or in all of it where it does not say which they are."""
    try:
        part = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        part = None
    for module in (part if isinstance(part, nn.Module) else model).modules():
        yield from _named(getattr(module, "_hf_hook", None))


def _named(hook: object) -> Iterator[torch.device]:
    """The devices that a hook names: a chain of hooks has several, and one that only returns outputs none."""
    for each in getattr(hook, "hooks", ()):
        yield from _named(each)
    device = getattr(hook, "execution_device", None)
    if device is not None:
        yield torch.device(device)
