"""Plan on which devices two models go, together: planned one by one, each would be given all the free memory."""

import copy
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.integrations.accelerate import (
    _get_device_map,
    check_and_set_device_map,
    compute_module_sizes,
    get_max_memory,
)
from transformers.quantizers.auto import get_hf_quantizer

from hf_specx.common.errors import require
from hf_specx.pair_files.facts import auto_class
from hf_specx.scheduling.draft_length import FIXED_DRAFT_TOKENS


CACHE_TOKENS = 8192  # 8 rows of 1024 tokens; 1.1 GB for Llama 3.1 8B in bfloat16
HEADROOM = 0.9  # of the free memory of an accelerator; the rest is for activations
PASSES = 9  # the cache of offloaded layers stays on accelerators, which may offload more layers
STORES = ("cpu", "disk")  # with an accelerator in the map, weights here are run there
DeviceMap = str | int | torch.device | dict[str, Any]


class Placement(NamedTuple):
    """Where two models go.

    Attributes:
        target, draft: arguments of `from_pretrained`: `device_map`, and `max_memory` where the map is inferred.
        reason: why the draft goes there, in words; "" where there was nothing to choose.
    """

    target: dict[str, Any]
    draft: dict[str, Any]
    reason: str = ""


class Trial(NamedTuple):
    """What it would cost to put the draft on a device.

    Attributes:
        device_map: the target's.
        device: the draft's.
        last: the device on which the target's last layers run.
        slow: bytes that a round reads from memory other than an accelerator's; the draft's count once a candidate.
        left: bytes that stay free on the draft's device.
        room: bytes that the target's weights may take, by device.
    """

    device_map: Any
    device: Any
    last: Any
    slow: float
    left: float
    room: dict[Any, int]


class Sketch:
    """A model without weights.

    Attributes:
        model: on the meta device, with the modules that the quantiser makes.
        sizes: bytes of each parameter and buffer, by name; tied ones are counted once.
        weights: the sum of `sizes`.
        cache: bytes that its cache needs at most.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype | str | None,
        cache_tokens: int,
        trust_remote_code: bool,
        device_map: Any = None,
        quantization_config: Any = None,
    ):
        self.quantizer, config, _ = get_hf_quantizer(copy.deepcopy(config), quantization_config, device_map, True, {})
        chosen = (config.dtype if dtype in (None, "auto") else dtype) or torch.float32
        with torch.device("meta"):
            self.model = auto_class(config).from_config(config, dtype=chosen, trust_remote_code=trust_remote_code)
        self.cache = cache_tokens * cache_numbers(config) * self.model.dtype.itemsize
        if self.quantizer is not None:
            self.quantizer.preprocess_model(
                model=self.model,
                dtype=self.model.dtype,
                device_map=device_map,
                checkpoint_files=None,
                use_kernels=False,
            )
        sizes, _ = compute_module_sizes(self.model, self.quantizer, only_modules=False)
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        self.sizes = {name: sizes[name] for name, _ in tensors}
        self.weights = sum(self.sizes.values())

    def mapped(self, device_map: Any, room: dict[Any, int]) -> dict[str, Any]:
        """The device of each part, as `from_pretrained` chooses it, if it may use `room` bytes on each device."""
        placed = _get_device_map(self.model, device_map, dict(room), self.quantizer)
        return {name: _plain(device) for name, device in placed.items()}

    def weights_on(self, placed: Mapping[str, Any]) -> Counter[Any]:
        """Bytes of weights on each device."""
        used: Counter[Any] = Counter()
        for name, size in self.sizes.items():
            used[_device_of(name, placed)] += size
        return used

    def cache_on(self, used: Counter[Any]) -> Counter[Any]:
        """Bytes of the cache on each device, in proportion to `used`, the bytes of weights that run there."""
        runs = _running(used)
        shares: Counter[Any] = Counter()
        for device, size in used.items():
            shares[device if device in runs else runs[0]] += math.ceil(self.cache * size / self.weights)
        return shares

    def last_device(self, placed: Mapping[str, Any]) -> Any:
        """The device on which the last module runs."""
        head = self.model.get_output_embeddings()
        names = [name for name, module in self.model.named_modules() if head is None or module is head]
        device, runs = _device_of(names[-1], placed), _running(placed.values())
        return device if device in runs else runs[0]


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
    """Choose the devices of the two models of a pair; it reads the configs only, and allocates no memory.

    The target gets what the draft leaves, with room on each device for weights and for the cache of what runs there.
    The draft goes to the device by which a round reads least from slower memory, and among equals to that of the
    target's last layers. A `UserWarning` says if it is elsewhere, or anything is in slower memory.

    Args:
        target, draft: configs; a `quantization_config` in them is taken into account.
        device_map: the target's, as for `from_pretrained`: "auto", "balanced", "balanced_low_0" or "sequential"; a
            device, which is the draft's too; a dict, which is left as it is; or None for no plan.
        max_memory: bytes, or text like "10GB", by number of accelerator and for "cpu", whether this machine has them
            or not. None is the free memory, on accelerators less a tenth.
        dtype, trust_remote_code, quantization_config: as for `from_pretrained`; the last is for the target only.
        draft_device_map: a device or a dict; None or "auto" lets this function choose.
        cache_tokens: rows times tokens for which both caches get room.

    Raises:
        ValueError: an argument has an unusable value.
    """
    _check(draft_device_map, cache_tokens)
    given = {} if draft_device_map in (None, "auto") else {"device_map": draft_device_map}
    devices = None if device_map is None else check_and_set_device_map(device_map)
    if devices is None:
        return Placement({}, given)
    if isinstance(devices, dict) and devices.keys() == {""}:
        return Placement({"device_map": device_map}, given or {"device_map": device_map})
    large = Sketch(target, dtype, cache_tokens, trust_remote_code, devices, quantization_config)
    small = Sketch(draft, dtype, cache_tokens, trust_remote_code)
    limits, reason = _limits(max_memory), ""
    if given:
        used = small.weights_on(small.mapped(check_and_set_device_map(draft_device_map), {}))
        found = _try(large, devices, limits, used + small.cache_on(used))
    else:
        found = _best(large, devices, limits, small.weights + small.cache)
        given, reason = {"device_map": {"": found.device}}, _reason(found, limits, small)
    kept = {"max_memory": found.room} if isinstance(devices, str) else {}
    return Placement({"device_map": found.device_map if kept else device_map} | kept, given, reason)


def _check(draft_device_map: Any, cache_tokens: int) -> None:
    require(
        draft_device_map not in ("balanced", "balanced_low_0", "sequential"),
        f"draft_device_map={draft_device_map!r} spreads the draft over devices, which makes each of its small steps "
        "wait for the way between them; give one device, or leave it out.",
    )
    told = f"cache_tokens={cache_tokens} is no number of tokens; give rows times tokens, or 0 for no room at all."
    require(cache_tokens >= 0, told)


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


def _limits(max_memory: Mapping[Any, int | str] | None) -> dict[Any, int]:
    """Bytes that may be used on each device, accelerators first, without the disk."""
    free = get_max_memory(None if max_memory is None else dict(max_memory))
    share = HEADROOM if max_memory is None else 1  # transformers has reserved some on the CPU
    limits = {device: int(size if device == "cpu" else share * size) for device, size in free.items()}
    return {device: size for device, size in limits.items() if device != "disk" and (size > 0 or device == "cpu")}


def _best(target: Sketch, device_map: Any, limits: dict[Any, int], needed: int) -> Trial:
    """The best device for a draft that needs so many bytes."""
    free = Counter(limits)
    if isinstance(device_map, dict):  # the target's devices are given
        used = target.weights_on(target.mapped(device_map, {}))
        free = free - used - target.cache_on(used)
    roomy = [device for device in limits if free[device] >= needed] or ["disk"]
    # "auto" means "balanced", which offloads layers that the larger one of two accelerators could hold
    kinds = ["auto", "sequential"] if device_map == "auto" else [device_map]
    trials, refused = [], ValueError()
    for kind, device in itertools.product(kinds, roomy):
        try:
            trials.append(_try(target, kind, limits, {device: needed}))
        except ValueError as error:  # of a quantiser that cannot offload
            refused = error
    if not trials:
        raise refused
    return min(trials, key=lambda t: (t.slow, t.device_map != device_map, t.device != t.last, -t.left))


def _try(target: Sketch, device_map: Any, limits: dict[Any, int], taken: Mapping[Any, int]) -> Trial:
    """Place the target when a draft has taken so many bytes, by device."""
    share = target.weights / (target.weights + target.cache)
    room = {device: size - taken.get(device, 0) for device, size in limits.items()}
    room |= {device: int(share * room.get(device, 0)) for device in _running(limits)}
    room = {device: max(0, size) for device, size in room.items()}
    for _ in range(PASSES):
        placed = target.mapped(device_map, room)
        used = target.weights_on(placed)
        need = used + target.cache_on(used) + Counter(taken)
        over = {device: need[device] - limits[device] for device in limits if need[device] > limits[device]}
        if not over:
            break
        room |= {device: max(0, min(room[device], used[device]) - size) for device, size in over.items()}
    fast = _running(limits if isinstance(device_map, str) else used)
    read = used + Counter({device: FIXED_DRAFT_TOKENS * size for device, size in taken.items()})
    slow = sum(size for device, size in read.items() if device not in fast)
    device = max(taken, key=lambda device: taken[device])
    return Trial(device_map, device, target.last_device(placed), slow, limits.get(device, 0) - need[device], room)


def _reason(found: Trial, limits: dict[Any, int], draft: Sketch) -> str:
    """Why the draft goes to its device; warns if another placement would be faster."""
    reason = f"the draft is on {found.device}, where the target's last layers run"
    if found.device != found.last:
        size = f"{(draft.weights + draft.cache) / 1e9:.2g} GB with its cache"
        reason = f"the draft ({size}) is on {found.device}, not with the target's last layers on {found.last}"
        reason += ", since more of both fits so"
    if found.slow:
        reason += f"; {found.slow / 1e9:.2g} GB a round come from slower memory"
    if found.device != found.last or found.slow:
        said = ", ".join(f"{device}: {limit / 1e9:.2g} GB" for device, limit in limits.items())
        warnings.warn(f"{reason}. Limits: {said}; see max_memory and draft_device_map.", UserWarning, stacklevel=3)
    return reason


def _plain(device: Any) -> Any:
    """A device by its key in `max_memory`: the number of an accelerator, "mps", "cpu" or "disk"."""
    if isinstance(device, int) or device == "disk":
        return device
    known = torch.device(device)
    return known.type if known.type in ("cpu", "mps") else known.index or 0


def _device_of(name: str, placed: Mapping[str, Any]) -> Any:
    """The device of a parameter or module: that of the longest name in the map that its name begins with."""
    parts = name.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
    return next((placed[name] for name in names if name in placed), "cpu")


def _running(devices: Iterable[Any]) -> list[Any]:
    """Of devices that hold something, those that compute: the accelerators, or else the CPU."""
    return sorted({device for device in devices if device not in STORES}, key=lambda x: (str(x) == x, x)) or ["cpu"]
