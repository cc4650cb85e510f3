"""Room for two models on the same devices: loaded one by one, each would be given all the free memory."""

import copy
import itertools
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import get_max_memory
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.accelerate import check_and_set_device_map, compute_module_sizes
from transformers.quantizers.auto import get_hf_quantizer

from hf_specx.common.devices import last_device
from hf_specx.common.errors import require
from hf_specx.pair_files.facts import auto_class


CACHE_TOKENS = 8192  # 8 rows of 1024 tokens; 1.1 GB for Llama 3.1 8B in bfloat16
HEADROOM = 0.9  # of the free memory of an accelerator; the rest is for activations
DeviceMap = str | int | torch.device | dict[str, Any]


class Placement(NamedTuple):
    """Where two models go.

    Attributes:
        target: arguments of `from_pretrained`: `device_map`, and `max_memory` where the map is inferred.
        home: the device with room for the draft; None is that of the target's last layers, wherever that is.
    """

    target: dict[str, Any]
    home: Any = None


def plan(
    target: PreTrainedConfig,
    draft: PreTrainedConfig,
    *,
    device_map: DeviceMap | None,
    max_memory: Mapping[Any, int | str] | None = None,
    dtype: torch.dtype | str | None = "auto",
    draft_device_map: DeviceMap | None = None,
    cache_tokens: int = CACHE_TOKENS,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
) -> Placement:
    """Leave room for the draft and for both caches where the target goes; it reads configs and allocates no memory.

    Args:
        target, draft: configs; a `quantization_config` in them is taken into account.
        device_map: the target's, as for `from_pretrained`; only "auto", "balanced", "balanced_low_0" and "sequential"
            need room to be left, others are kept as they are.
        max_memory: bytes, or text like "10GB", by number of accelerator and for "cpu", whether this machine has them
            or not. None is the free memory, on accelerators less a tenth.
        dtype, trust_remote_code, quantization_config: as for `from_pretrained`; the last is for the target only.
        draft_device_map: where the draft will go; None or "auto" is beside the target's last layers, if it fits there.
        cache_tokens: rows times tokens for which both caches get room.

    Raises:
        ValueError: an argument has an unusable value.
    """
    _check(draft_device_map, cache_tokens)
    devices = None if device_map is None else check_and_set_device_map(device_map)
    if not isinstance(devices, str):
        return Placement({} if devices is None else {"device_map": device_map})
    weights = weights_of(target, dtype, trust_remote_code, devices, quantization_config)
    cache, needed = (cache_tokens * cache_numbers(each) * _itemsize(each, dtype) for each in (target, draft))
    needed += weights_of(draft, dtype, trust_remote_code)
    limits = _limits(max_memory)
    runs = [device for device in limits if device != "cpu"] or ["cpu"]
    home = _home({device: limits[device] for device in runs}, needed, weights + cache, devices)
    asked: Any = {"": home} if draft_device_map in (None, "auto") else check_and_set_device_map(draft_device_map)
    for device in set(map(_key, asked.values())):
        limits[device] = max(0, limits.get(device, 0) - needed)
    free = sum(limits[device] for device in runs)
    # a cache is where its layer runs, which is never on the CPU or on disk where there is anything faster
    share = max(0.0, min(weights / (weights + cache), 1 - cache / max(free, 1)))
    room = limits | {device: int(share * limits[device]) for device in runs}
    uneven = min(room[device] for device in runs) < weights / len(runs)
    if devices == "auto" and uneven and sum(room[device] for device in runs) >= weights:
        devices = "sequential"  # "auto" is "balanced", and would leave the larger of two accelerators half empty
    return Placement({"device_map": devices, "max_memory": room}, home)


def beside(target: PreTrainedModel, home: Any = None) -> Any:
    """The device of a draft for a loaded target: that of its last layers, or `home` if there is room only there."""
    last = last_device(target)
    if home is None or _key(last) == home:
        return last
    told = f"the draft is on {home}, not with the target's last layers on {last}, since there is room for it there"
    warnings.warn(f"{told}; another device_map or max_memory may be faster.", UserWarning, stacklevel=2)
    return home


def _check(draft_device_map: Any, cache_tokens: int) -> None:
    require(
        draft_device_map not in ("balanced", "balanced_low_0", "sequential"),
        f"draft_device_map={draft_device_map!r} spreads the draft over devices, which makes each of its small steps "
        "wait for the way between them; give one device, or leave it out.",
    )
    told = f"cache_tokens={cache_tokens} is no number of tokens; give rows times tokens, or 0 for no room at all."
    require(cache_tokens >= 0, told)


def weights_of(
    config: PreTrainedConfig,
    dtype: torch.dtype | str | None,
    trust_remote_code: bool,
    device_map: Any = None,
    quantization_config: Any = None,
) -> int:
    """Bytes of a model's weights, as its quantiser stores them; tied ones are counted once."""
    quantizer, config, _ = get_hf_quantizer(copy.deepcopy(config), quantization_config, device_map, True, {})
    chosen = _dtype(config, dtype)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=chosen, trust_remote_code=trust_remote_code)
    if quantizer is not None:
        options = {"dtype": chosen, "device_map": device_map, "checkpoint_files": None, "use_kernels": False}
        quantizer.preprocess_model(model=model, **options)
    sizes, _ = compute_module_sizes(model, quantizer, only_modules=False)
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return sum(sizes[name] for name, _ in tensors)


def cache_numbers(config: PreTrainedConfig) -> int:
    """How many numbers a cache holds for one token, at most: sliding windows and recurrent layers are not deducted."""
    text = config.get_text_config(decoder=True)

    def of(name: str, default: int = 0) -> int:
        value = getattr(text, name, None)
        return (max(value, default=0) if isinstance(value, (list, tuple)) else value) or default

    layers = of("num_decoder_layers", of("decoder_layers", of("num_hidden_layers")))
    heads = of("num_attention_heads", 1)
    width = of("head_dim", of("hidden_size") // heads)
    latent = of("kv_lora_rank")  # multi-head latent attention keeps one vector for all heads
    kinds = 2 if config.is_encoder_decoder else 1  # self-attention and cross-attention
    own = latent + of("qk_rope_head_dim") if latent else 2 * of("num_key_value_heads", heads) * width
    return kinds * layers * own


def _dtype(config: PreTrainedConfig, dtype: torch.dtype | str | None) -> torch.dtype:
    chosen = (config.dtype if dtype in (None, "auto") else dtype) or torch.float32
    return getattr(torch, chosen) if isinstance(chosen, str) else chosen


def _itemsize(config: PreTrainedConfig, dtype: torch.dtype | str | None) -> int:
    return _dtype(config, dtype).itemsize


def _limits(max_memory: Mapping[Any, int | str] | None) -> dict[Any, int]:
    """Bytes that may be used on each device, accelerators first, without the disk."""
    free = get_max_memory(None if max_memory is None else dict(max_memory))
    share = HEADROOM if max_memory is None else 1  # accelerate has reserved some on the CPU
    limits = {device: int(size if device == "cpu" else share * size) for device, size in free.items()}
    return {device: size for device, size in limits.items() if device != "disk" and (size > 0 or device == "cpu")}


def _home(limits: dict[Any, int], needed: int, target: int, device_map: str) -> Any:
    """The device for a draft: where the target ends, among those that have room; the CPU if none has.

    Args:
        limits: bytes on each device that runs models, in order.
        needed: by the draft; `target`: by the target.
        device_map: a kind of map; all but "sequential" end on the last device.
    """
    roomy = [device for device, limit in limits.items() if limit >= needed]
    if device_map == "sequential":
        filled = zip(limits, itertools.accumulate(limits.values()), strict=True)
        end = next((device for device, size in filled if size >= target + needed), None)
        roomy += [end] if end in roomy else []
    return roomy[-1] if roomy else "cpu"


def _key(device: Any) -> Any:
    """A device by its key in `max_memory`: the number of an accelerator, "mps", "cpu" or "disk"."""
    if isinstance(device, int) or device == "disk":
        return device
    known = torch.device(device)
    return known.type if known.type in ("cpu", "mps") else known.index or 0
