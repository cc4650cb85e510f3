"""Place two models on the same devices; loaded one after another, each would be given all the free memory."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import get_max_memory
from transformers import PreTrainedConfig
from transformers.integrations.accelerate import check_and_set_device_map, compute_module_sizes
from transformers.quantizers.auto import get_hf_quantizer

from hf_specx.common.devices import cached_numbers
from hf_specx.common.errors import require
from hf_specx.common.load_model import auto_class


CACHE_TOKENS = 8192  # 8 rows of 1024 tokens; 1.1 GB for Llama 3.1 8B in bfloat16
HEADROOM = 0.9  # of the free memory of an accelerator; the rest is for activations
Dtype = torch.dtype | str | None
DeviceMap = str | int | torch.device | dict[str, Any]


class Placement(NamedTuple):
    """The arguments that place the target and the draft on devices."""

    target: dict[str, Any]  # arguments of `from_pretrained`: `device_map`, and `max_memory` where the map is inferred
    draft_device: str | None = None  # the draft's device; None is that of the target's last layers, once it is loaded


def plan(
    target: PreTrainedConfig | None,
    draft: PreTrainedConfig | None,
    device_map: DeviceMap | None,
    draft_device_map: DeviceMap | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    cache_tokens: int = CACHE_TOKENS,
    dtype: Dtype = "auto",
    quantization_config: Any = None,
    trust_remote_code: bool = False,
) -> Placement:
    """The `Placement` with which a draft and both caches have room beside a target; it allocates no memory itself.

    Args:
        target, draft: configs; a `quantization_config` in them is taken into account. None takes no room.
        device_map: the target's, as for `from_pretrained`; room is left in one that is inferred, such as "auto".
        draft_device_map: the device that is asked for the draft; None or "auto" is beside the target's last layers.
        max_memory: bytes, or text like "10GB", by number of accelerator and for "cpu", whether this machine has them
            or not. None is the free memory, on accelerators less a tenth.
        cache_tokens: rows times tokens for which both caches get room.
    """
    require(
        draft_device_map not in ("balanced", "balanced_low_0", "sequential"),
        f"draft_device_map={draft_device_map!r} spreads the draft over devices, which makes each of its small steps "
        "wait for the way between them; give one device, or leave it out.",
    )
    require(
        cache_tokens >= 0,
        f"cache_tokens={cache_tokens} is no number of tokens; give rows times tokens, or 0 for no room at all.",
    )
    devices = None if device_map is None else check_and_set_device_map(device_map)
    if target is None or not isinstance(devices, str):
        return Placement({} if devices is None else {"device_map": device_map})
    weights = weights_of(target, dtype, trust_remote_code, devices, quantization_config)
    cache = cache_tokens * cache_bytes(target, dtype)
    draft_bytes = 0
    if draft is not None:
        draft_bytes = weights_of(draft, dtype, trust_remote_code) + cache_tokens * cache_bytes(draft, dtype)
    limits = _limits(max_memory)
    computing = [device for device in limits if device != "cpu"] or ["cpu"]  # where layers run
    draft_devices = [device for device in computing if limits[device] >= draft_bytes]
    if draft_device_map not in (None, "auto"):
        asked: Any = check_and_set_device_map(draft_device_map)
        draft_devices = [_key(device) for device in asked.values()]
    elif draft_devices:  # else the draft will be on the CPU
        too_small = [device for device in computing if device not in draft_devices]
        limits |= dict.fromkeys(too_small, 0)  # wherever the target ends, the draft fits
    limits |= {device: max(0, limits[device] - draft_bytes) for device in draft_devices if device in limits}
    max_weights = _beside_cache(limits, computing, weights, cache)
    used = [max_weights[device] for device in computing if max_weights[device]]
    if devices == "auto" and sum(used) >= weights > len(used) * min(used):
        devices = "sequential"  # "auto" is "balanced", and would leave the larger of two accelerators half empty
    return Placement({"device_map": devices, "max_memory": max_weights}, None if draft_devices else "cpu")


def _beside_cache(limits: dict[Any, int], computing: list[Any], weights: int, cache: int) -> dict[Any, int]:
    """The bytes for the target's weights on each device: some are left for its cache, on devices that run layers."""
    free = sum(limits[device] for device in computing)
    share = max(0.0, min(weights / (weights + cache), 1 - cache / max(free, 1)))
    return limits | {device: int(share * limits[device]) for device in computing}


def weights_of(
    config: PreTrainedConfig, dtype: Dtype, trust: bool, device_map: Any = None, quantised: Any = None
) -> int:
    """Bytes of a model's weights, as its quantiser stores them; tied ones are counted once."""
    quantizer, config, _ = get_hf_quantizer(copy.deepcopy(config), quantised, device_map, True, {})
    chosen = _dtype(config, dtype)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=chosen, trust_remote_code=trust)
    if quantizer is not None:
        options = {"dtype": chosen, "device_map": device_map, "checkpoint_files": None, "use_kernels": False}
        quantizer.preprocess_model(model=model, **options)
    return compute_module_sizes(model, quantizer)[0][""]


def cache_bytes(config: PreTrainedConfig, dtype: Dtype) -> int:
    """The bytes of a cache for one token, at most: sliding windows and recurrent layers are not deducted."""
    kinds = 2 if config.is_encoder_decoder else 1  # self-attention and cross-attention
    return kinds * cached_numbers(config) * _dtype(config, dtype).itemsize


def _dtype(config: PreTrainedConfig, dtype: Dtype) -> torch.dtype:
    chosen = (config.dtype if dtype in (None, "auto") else dtype) or torch.float32
    return getattr(torch, chosen) if isinstance(chosen, str) else chosen


def _limits(max_memory: Mapping[Any, int | str] | None) -> dict[Any, int]:
    """Bytes that may be used on each device, accelerators first, without the disk."""
    free = get_max_memory(None if max_memory is None else dict(max_memory))
    share = HEADROOM if max_memory is None else 1  # accelerate has reserved some on the CPU
    limits = {device: int(size if device == "cpu" else share * size) for device, size in free.items()}
    return {device: size for device, size in limits.items() if device != "disk" and (size > 0 or device == "cpu")}


def _key(device: Any) -> Any:
    """A device by its key in `max_memory`: the number of an accelerator, "mps", "cpu" or "disk"."""
    if isinstance(device, int) or device == "disk":
        return device
    device = torch.device(device)
    return device.type if device.type in ("cpu", "mps") else device.index or 0
