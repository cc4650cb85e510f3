"""The fingerprint of a model, in memory or in its files: of its settings, and of all bytes of all of its tensors.

Of a tensor it has the sum of every column of 8-byte words, with a prime number of columns, so that rows which change
places change the sums, and words at equal strides. That reads each byte once and copies nothing.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch


FORM = "2:"  # how fingerprints of this kind begin; those of earlier versions had no such beginning
COLUMNS, SAMPLES = 257, 64
NO_SETTINGS = ("_name_or_path", "transformers_version", "_from_model_config")  # entries that do not change a model


def digest_of(parts: Iterable[bytes]) -> str:
    """Twelve hexadecimal digits."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def fingerprint_of(settings: dict[str, Any], tensors: Iterable[tuple[str, str, torch.Tensor | None]]) -> str:
    """A text that is another one for other settings or tensors, each of these a name, its kind, and its bytes or None.

    It does not depend on the device that they are on, nor on their order.
    """
    total = hashlib.sha256(json.dumps(_without_noise(settings), sort_keys=True, default=str).encode())
    for name, line in sorted((name, _line(kind, bits)) for name, kind, bits in tensors):
        total.update(f"\n{name} {line}".encode())
    return FORM + total.hexdigest()


def model_fingerprint(model: Any) -> str:
    """The fingerprint of a model in memory: of its weights and buffers, also quantised or offloaded ones.

    Of a model whose weights are nowhere in memory it has where that came from.
    """
    state = state_of(model)
    is_absent = any(getattr(value, "is_meta", False) for value in state.values())
    settings = model.config.to_dict() | {"weights": model.name_or_path if is_absent else None}
    settings |= {"adapters": _adapters_in_use(model) or None}
    return fingerprint_of(settings, _state_tensors(state))


def _adapters_in_use(model: torch.nn.Module) -> dict[str, str]:
    """Which adapters of PEFT are active in each layer that has some, and how strong each of them is."""
    layers = {}
    for path, part in model.named_modules():
        disabled = getattr(part, "disable_adapters", None)  # a model has a method of this name
        if isinstance(disabled, bool):
            scaling = getattr(part, "scaling", None)
            layers[path] = f"{[] if disabled else part.active_adapters} {scaling}"
    return layers


def _without_noise(value: Any) -> Any:
    """Settings without those that do not change a model, also in the settings of its parts."""
    if not isinstance(value, dict):
        return value
    items = ((str(name), _without_noise(item)) for name, item in value.items() if name not in NO_SETTINGS)
    return {name: item for name, item in items if item is not None}


class Offloaded(NamedTuple):
    """A weight that is not in the memory of its model; it may be on disk, so one is loaded at a time."""

    stored: Mapping[str, torch.Tensor]
    name: str
    placeholder: torch.Tensor  # a meta tensor

    def load(self) -> torch.Tensor:
        """The weight; its placeholder if it is nowhere."""
        try:
            return self.stored[self.name]
        except KeyError:
            return self.placeholder


def module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor | None]]:
    """The name, kind and bytes of each tensor of a module, with buffers that are not saved, and what is offloaded."""
    return _state_tensors(state_of(module))


def _state_tensors(state: dict[str, Any]) -> Iterator[tuple[str, str, torch.Tensor | None]]:
    for name, value in state.items():
        for inner, tensor in _plain_tensors(name, value.load() if isinstance(value, Offloaded) else value):
            if isinstance(tensor, torch.Tensor):
                kind = f"{tensor.dtype} {list(tensor.shape)}"
                yield inner, kind, None if tensor.is_meta else _bytes(tensor)
            else:
                yield inner, repr(tensor), torch.zeros(0, dtype=torch.uint8, device="cpu")


def state_of(module: torch.nn.Module) -> dict[str, Any]:
    """What a module holds by name: its state dict, other buffers, and `Offloaded` in place of what is elsewhere."""
    # with the scales of quantised layers, which are neither parameters nor buffers; a tied one has several names
    state: dict[str, Any] = dict(module.named_buffers()) | module.state_dict()
    for path, part in module.named_modules():
        hook: Any = getattr(part, "_hf_hook", None)
        for inner_hook in getattr(hook, "hooks", [hook]):
            stored: Any = getattr(inner_hook, "weights_map", None)  # of accelerate
            for name in () if stored is None else [*dict(part.named_parameters()), *dict(part.named_buffers())]:
                full_name = f"{path}.{name}".removeprefix(".")
                if getattr(state.get(full_name), "is_meta", False):
                    state[full_name] = Offloaded(stored, name, state[full_name])
    return state


def tensor_digest(tensor: torch.Tensor) -> str:
    """What tells a tensor from others, wherever it is."""
    return _line(f"{tensor.dtype} {list(tensor.shape)}", _bytes(tensor))


def _plain_tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a weight consists of: plain tensors, and other values that are told by their `repr`."""
    if isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _plain_tensors(f"{name}.{number}", item)
    elif not isinstance(value, torch.Tensor):
        yield name, value
    elif hasattr(value, "full_tensor"):  # in parts on several devices
        yield name, value.full_tensor()
    elif value.is_quantized:
        yield name, value.dequantize()
    elif hasattr(value, "__tensor_flatten__"):  # of torchao
        for part in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(f"{name}.{part}", getattr(value, part))
    else:
        yield name, value.to_dense() if value.layout is not torch.strided else value


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes [N] of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _line(kind: str, bits: torch.Tensor | None) -> str:
    """What tells one tensor from another, by its kind and bytes [N]; None is of one that is nowhere in memory."""
    if bits is None:
        return kind
    rows = len(bits) // 8 // COLUMNS
    whole, rest = bits[: 8 * rows * COLUMNS], bits[8 * rows * COLUMNS :]
    if whole.storage_offset() % 8:
        whole = whole.clone()
    words = whole.view(torch.int64)
    column_sums = words.view(rows, COLUMNS).sum(0)
    samples = words[:: max(1, len(words) // SAMPLES)][: SAMPLES + 1]
    digest = hashlib.sha256(b"".join(bytes(_bytes(part).tolist()) for part in (column_sums, samples, rest)))
    return f"{kind} {digest.hexdigest()}"
