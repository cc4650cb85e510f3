"""The devices of models, transfers to them, their memory and names; and ranks of torch.distributed.

`model.device` is not where a model runs if its weights are offloaded: they are on "meta" between forwards.
"""

import itertools
import platform
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from transformers import PreTrainedConfig, PreTrainedModel


CPU_FACTS = Path("/proc/cpuinfo")  # on Linux; elsewhere `platform` is asked
MEMORY_FACTS = Path("/proc/meminfo")  # on Linux


def execution_device(model: PreTrainedModel) -> torch.device:
    """The device where a model's forward starts, and where its inputs must be.

    It is taken from accelerate's hooks on the model or its input embeddings; without hooks it is `model.device`.
    """
    devices = [*_devices_of(getattr(model, "_hf_hook", None)), *_of_hooks(model, "get_input_embeddings")]
    return devices[0] if devices else model.device


def last_device(model: PreTrainedModel) -> torch.device:
    """The device where a model's logits are computed; another one, if its layers are spread over devices."""
    devices = [*_of_hooks(model, "get_output_embeddings")]
    return devices[-1] if devices else execution_device(model)


def hardware(device: torch.device) -> str:
    """The name of a processor, as a key for measured times; for a CPU also the number of threads."""
    if device.type == "cpu":
        return f"{_cpu_name(CPU_FACTS)}, {torch.get_num_threads()} threads"
    get_name = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if get_name is None else get_name(device)


def to_device_async(numbers: object, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers as a tensor on a device, without waiting for the work that is queued there."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


def to_device(values: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Values on another device; waits for the copy only if that is a CPU, where they are read at once."""
    return values.to(device, dtype, non_blocking=device.type != "cpu")


def cat_on(states: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Tensors [..., N] joined on a device; neighbours that are on one other device are moved in one copy."""
    by_device = [list(group) for _, group in itertools.groupby(states, key=lambda state: state.device)]
    parts = [group[0] if len(group) == 1 else torch.cat(group, -1) for group in by_device]
    return parts[0] if len(parts) == 1 else torch.cat([to_device(x, device) for x in parts], -1)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all work that was queued."""
    if device.type == "mps":  # there is one, and torch's function takes no argument
        torch.mps.synchronize()
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def free_tokens(models: Sequence[PreTrainedModel]) -> int | None:
    """How many tokens the caches of models can hold in half of the free memory; None if that is not known."""
    num_free = _free_bytes(execution_device(models[0]))
    bytes_per_token = sum(cached_numbers(model.config) * model.dtype.itemsize for model in models)
    return None if num_free is None or not bytes_per_token else max(1, num_free // 2 // bytes_per_token)


def _free_bytes(device: torch.device) -> int | None:
    """How much memory is free; None if that is not known."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch gives it out first
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    if device.type != "cpu" or not MEMORY_FACTS.is_file():
        return None
    facts = dict(line.split(":", 1) for line in MEMORY_FACTS.read_text().splitlines())
    return 1024 * int(facts["MemAvailable"].split()[0]) if "MemAvailable" in facts else None


def cached_numbers(config: PreTrainedConfig) -> int:
    """How many numbers the self-attention of all layers caches for one token: keys and values, or latents for them.

    Windows and layers without attention are not deducted; 0 for a model that has no heads, whose states do not grow.
    """
    text_config: Any = config.get_text_config(decoder=True)
    names = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")
    count = next((number for name in names if (number := getattr(text_config, name, None))), 0)
    layers = [text_config] * count
    if getattr(text_config, "is_heterogeneous", False):  # its layers have configs of their own
        layers = [text_config.per_layer_config[number] for number in range(count)]
    return sum(map(_cached_by_layer, layers))


def _cached_by_layer(config: Any) -> int:
    """How many numbers the self-attention of one layer caches for one token."""

    def size(name: str, default: int = 0) -> int:
        value = getattr(config, name, None)
        return (max(value, default=0) if isinstance(value, list | tuple) else value) or default

    heads = size("num_attention_heads")
    if not heads:
        return 0
    latent, rope = size("kv_lora_rank"), size("qk_rope_head_dim")
    if latent and size("index_topk"):  # sparse attention, which some versions cache expanded
        return heads * (size("qk_nope_head_dim") + rope + size("v_head_dim"))
    if latent:
        return latent + rope
    head_dim = size("head_dim") or config.hidden_size // heads
    return 2 * head_dim * size("num_key_value_heads", heads)


@cache  # the file of a large machine takes long
def _cpu_name(path: Path) -> str:
    """The name of this machine's processor, as a file of the system has it."""
    facts = path.read_text(errors="replace").splitlines() if path.is_file() else []
    names = (fact.partition(":")[2].strip() for fact in facts if fact.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _of_hooks(model: PreTrainedModel, getter: str) -> Iterator[torch.device]:
    """The devices that hooks name in a model's embeddings; in all its modules if `getter` gives no embeddings."""
    try:
        part = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        part = None
    for module in (part if isinstance(part, nn.Module) else model).modules():
        yield from _devices_of(getattr(module, "_hf_hook", None))


def _devices_of(hook: object) -> Iterator[torch.device]:
    """The devices that a hook names: several for a chain of hooks, none for one that only moves outputs."""
    for inner_hook in getattr(hook, "hooks", ()):
        yield from _devices_of(inner_hook)
    device = getattr(hook, "execution_device", None)
    if device is not None:
        yield torch.device(device)


def in_group() -> bool:
    """Whether this process is in a process group of torch."""
    return distributed.is_available() and distributed.is_initialized()


def world_size() -> int:
    """How many ranks there are."""
    return distributed.get_world_size() if in_group() else 1
