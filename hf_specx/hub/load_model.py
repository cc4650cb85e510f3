"""Load a model exactly as its files describe it; missing weights raise an error and are not made up."""

import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict

from hf_specx.common.checkpoints import read_config
from hf_specx.common.devices import last_device
from hf_specx.common.errors import require
from hf_specx.common.fingerprint import FORM
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.heads.head import DraftHead
from hf_specx.drafting.heads.reading import is_head

from .facts import COMMIT, KIND, auto_class, differing
from .fetch import Files, fingerprint, get_files, get_model
from .model_files import AGAIN, check_links, check_size, shapes_in, shards
from .pair_config import ModelSource, PairConfig, WeightlessDraft


NO_ADAPTERS = "none"  # where transformers looks for one if peft is installed, else on the Hub, without the token
TABLES = 2**28  # numbers in buffers, more than any real model needs
HEAD_NAME = "exit_head.safetensors"  # the head of an early exit, a linear map


class FoundModel(NamedTuple):
    """A model of a pair in checked files, not loaded yet; or one that was given, or a draft without weights."""

    files: Files | None
    source: ModelSource = ModelSource()  # where in the files it is, and what the pair knows of it
    trusted: bool = False  # whether its code may run
    made: Any = None
    head: Path | None = None  # of an early exit

    def config(self, role: str) -> PreTrainedConfig | None:
        """None where nothing is loaded; also of a draft that is a head, which takes little room."""
        if self.files is None or (role == "draft" and holds_head(self.files)):
            return None
        return load_config(self.files, self.trusted)

    def load(self, target: PreTrainedModel | None = None, **kwargs: Any) -> Any:
        """The model, or the draft of a `target`; `kwargs` are for `from_pretrained`."""
        if self.files is None:
            return self.made if target is None else with_head(self.made, self.head, target)
        model = load_model(self.files, self.trusted, target, **kwargs)
        for name, (now, then) in differing(self.source, model, KIND).items():
            told = f"{self.files.shown} has {name}={now!r}, and the pair was made with {then!r}; {AGAIN}."
            require(now is None, told)  # whose config does not say
        return model


def find_model(pair: Files, config: PairConfig, role: str, hub: dict[str, Any], *trust: bool) -> FoundModel:
    """Check the files of a pair's own target or draft; if it was not measured, the config forgets what was.

    `trust` is `trust_remote_code` and `use_safetensors`, as `get_model` takes them.
    """
    source, draft = getattr(config, role), config.weightless_draft() if role == "draft" else None
    if draft is None:
        files = get_model(pair, source, *trust, **hub)
        folder = files.folder
        comparable = (source.fingerprint or "").startswith(FORM) and (folder / shards(folder)[0]).exists()  # no pickle
        if comparable and fingerprint(folder) != source.fingerprint:
            told = f"the model in {folder} is not the one that the pair was measured with; measure it anew with "
            warnings.warn(f"{told}specx tune.", UserWarning, stacklevel=2)
            config.forget()
        return FoundModel(files, source, trust[0] and source.is_pinned)
    if config.early_exit is None or not config.early_exit.head:
        return FoundModel(None, made=draft)
    path = get_files(pair.name, pair.revision, [HEAD_NAME], **hub).root / HEAD_NAME
    check_links(pair.root, path)
    shapes_in(path)
    return FoundModel(None, made=draft, head=path)


def load_config(files: Files, trust_remote_code: bool) -> PreTrainedConfig:
    """A model's config, from `files` that `fetch` has checked; its code runs only if it is trusted."""
    with _reading(files.folder):
        config = AutoConfig.from_pretrained(str(files.folder), trust_remote_code=trust_remote_code)
    assert isinstance(config, PreTrainedConfig)
    if not trust_remote_code:
        vars(config).pop("auto_map", None)  # transformers has a class of its own for it
    return config


def load_model(
    files: Files, trust_remote_code: bool, target: PreTrainedModel | None = None, **kwargs: Any
) -> PreTrainedModel:
    """A model in evaluation mode, with the `generate` of its class, from `files` that `fetch` has checked.

    For a `target` it may be a draft head, in the precision of its files. `kwargs` are for `from_pretrained`. Weights
    that are missing, have another shape, or belong to layers that the model does not have are a ValueError.
    """
    folder = files.folder  # not by the repository's name, whose code may have changed since it was checked
    if target is not None and holds_head(files):
        return _noted(files, DraftHead.from_pretrained(folder, target=target))
    config, trust = load_config(files, trust_remote_code), {"trust_remote_code": trust_remote_code}
    loader, quantised = auto_class(config), getattr(config, "quantization_config", None) is not None
    if not quantised and kwargs.get("use_safetensors", True):
        with _reading(folder), torch.device("meta"):
            empty = loader.from_config(config, attn_implementation="eager", **trust)
        tables = sum(buffer.numel() for buffer in empty.buffers())  # computed, not loaded
        check_size(folder, empty.num_parameters() + max(0, tables - TABLES))
    model, seen = loader.from_pretrained(
        str(folder),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are reported below
        adapter_kwargs={"subfolder": NO_ADAPTERS, "local_files_only": True},
        **{"use_safetensors": True} | trust | kwargs,
    )
    _check_loaded(files.shown, seen, list(model.state_dict()))
    vars(model).pop("generate", None)  # one bound by a repository's trusted code would call this package again
    return _noted(files, model).eval()


def _noted(files: Files, model: PreTrainedModel) -> PreTrainedModel:
    """A model that says where it came from."""
    model.name_or_path = model.config._name_or_path = files.name
    if files.revision is not None:
        setattr(model.config, COMMIT, files.revision)
    return model


def holds_head(files: Files) -> bool:
    """Whether what a pair's files have as its draft is a head."""
    return is_head(files.folder, read_config(files.folder))


def _check_loaded(where: str, seen: dict[str, Collection[Any]], used: Collection[str]) -> None:
    """Whether the weights in files, as transformers has `seen` them, were all that a model has, and no others."""
    name, found, expected = min(seen["mismatched_keys"], default=("", (), ()))
    told = f"{where}: {name!r} is {list(found)}, and its config says {list(expected)}; {AGAIN}."
    require(not seen["mismatched_keys"], told)
    missing = seen["missing_keys"]
    told = f"{where} lacks {len(missing)} of the model's weights, {min(missing, default='')!r} among them; {AGAIN}."
    require(not missing, told)
    kinds = {re.sub(r"\d+", "#", name) for name in used}
    no_layers = not any("#" in kind for kind in kinds)
    unused = {name: re.sub(r"\d+", "#", name) for name in seen["unexpected_keys"]}
    further = [name for name, kind in unused.items() if kind in kinds or (no_layers and "#" in kind)]
    told = f"{where} has weights for more layers than its config, {min(further, default='')!r} among them; {AGAIN}."
    require(not further, told)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Name the folder in errors that reading its config raises."""
    try:
        yield
    except Exception as error:  # wrong values may raise any
        told = f"transformers cannot read the config of {folder}: {error}; {AGAIN}, or install a newer transformers."
        raise ValueError(told) from error


def with_head(draft: WeightlessDraft, path: Path | None, target: PreTrainedModel) -> WeightlessDraft:
    """An early exit with the head in a checked file, where and as precise as the target's last layers."""
    if path is None:
        return draft
    assert isinstance(draft, EarlyExitDraft)
    found, width = load_state_dict(str(path)), target.config.get_text_config(decoder=True).hidden_size
    shapes = {name: (list(tensor.shape), tensor.is_floating_point()) for name, tensor in found.items()}
    wanted = {"weight": ([width, width], True), "bias": ([width], True)}
    told = f"{path} has {shapes}, and the head of this target is a weight [{width}, {width}], with or without a bias"
    require("weight" in shapes and shapes.items() <= wanted.items(), f"{told}; {AGAIN}.")
    head = torch.nn.Linear(width, width, bias="bias" in found, device=last_device(target), dtype=target.dtype).eval()
    head.load_state_dict(found)
    return EarlyExitDraft(draft.exit_layer, head.requires_grad_(False))
