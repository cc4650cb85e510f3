"""Find the target or the draft of a pair in its files, check it, and load it."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict

from hf_specx.common.checkpoints import Files
from hf_specx.common.devices import last_device
from hf_specx.common.errors import require
from hf_specx.common.fingerprint import FORM
from hf_specx.common.load_model import load_config, load_model, with_origin
from hf_specx.common.model_files import GET_AGAIN, check_links, shapes_in, shards
from hf_specx.drafting.early_exit import EarlyExitDraft
from hf_specx.drafting.heads.detect_head import holds_head
from hf_specx.drafting.heads.head import DraftHead

from .facts import IDENTIFYING, differing
from .fetch import fingerprint, get_files, get_model
from .pair_config import ModelSource, PairConfig, WeightlessDraft


HEAD_NAME = "exit_head.safetensors"  # the head of an early exit, a linear map


class FoundModel(NamedTuple):
    """A model of a pair in checked files, not loaded yet; or a model, or a draft without weights, in memory."""

    files: Files | None
    source: ModelSource = ModelSource()  # where in the files it is, and what the pair knows of it
    trusted: bool = False  # whether its code may run
    model: Any = None  # where there are no files
    head: Path | None = None  # of an early exit

    def config(self, role: str) -> PreTrainedConfig | None:
        """None where nothing is loaded; also of a draft that is a head, which takes little room."""
        if self.files is None or (role == "draft" and holds_head(self.files)):
            return None
        return load_config(self.files, self.trusted)

    def load(self, target: PreTrainedModel | None = None, **kwargs: Any) -> Any:
        """The model, or the draft of a `target`; `kwargs` are for `from_pretrained`."""
        if self.files is None:
            return self.model if target is None else with_head(self.model, self.head, target)
        model = load_model_or_head(self.files, self.trusted, target, **kwargs)
        for name, (now, then) in differing(self.source, model, IDENTIFYING).items():
            require(
                now is None,  # its config does not say
                f"{self.files.shown} has {name}={now!r}, and the pair was made with {then!r}; {GET_AGAIN}.",
            )
        return model


def load_model_or_head(files: Files, trusted: bool, target: PreTrainedModel | None = None, **kwargs: Any) -> Any:
    """A model as of `load_model`; for a `target` it may be a draft head, in the precision of its files."""
    if target is not None and holds_head(files):
        return with_origin(files, DraftHead.from_pretrained(files.folder, target=target))
    return load_model(files, trusted, **kwargs)


def find_model(pair: Files, config: PairConfig, role: str, hub_kwargs: dict[str, Any], *trust: bool) -> FoundModel:
    """Get and check the files of a pair's own target or draft.

    If it is not the model that was measured, a warning says so, and measurements are dropped from the config.

    `trust` is `trust_remote_code` and `use_safetensors`, as `get_model` takes them.
    """
    source: ModelSource = getattr(config, role)
    draft = config.weightless_draft() if role == "draft" else None
    if draft is None:
        files = get_model(pair, source, *trust, **hub_kwargs)
        folder = files.folder
        comparable = (source.fingerprint or "").startswith(FORM) and (folder / shards(folder)[0]).exists()  # no pickle
        if comparable and fingerprint(folder) != source.fingerprint:
            warnings.warn(
                f"the model in {folder} is not the one that the pair was measured with; measure it anew with specx "
                "tune.",
                UserWarning,
                stacklevel=2,
            )
            config.forget()
        return FoundModel(files, source, trust[0] and source.is_pinned)
    if config.early_exit is None or not config.early_exit.head:
        return FoundModel(None, model=draft)
    path = get_files(pair.name, pair.revision, [HEAD_NAME], **hub_kwargs).root / HEAD_NAME
    check_links(pair.root, path)
    shapes_in(path)
    return FoundModel(None, model=draft, head=path)


def with_head(draft: WeightlessDraft, path: Path | None, target: PreTrainedModel) -> WeightlessDraft:
    """An early exit with the head in a checked file, where and as precise as the target's last layers."""
    if path is None:
        return draft
    assert isinstance(draft, EarlyExitDraft)
    weights = load_state_dict(str(path))
    width = target.config.get_text_config(decoder=True).hidden_size
    shapes = {name: (list(tensor.shape), tensor.is_floating_point()) for name, tensor in weights.items()}
    allowed = {"weight": ([width, width], True), "bias": ([width], True)}
    require(
        "weight" in shapes and shapes.items() <= allowed.items(),
        f"{path} has {shapes}, and the head of this target is a weight [{width}, {width}], with or without a bias; "
        f"{GET_AGAIN}.",
    )
    head = torch.nn.Linear(width, width, bias="bias" in weights, device=last_device(target), dtype=target.dtype).eval()
    head.load_state_dict(weights)
    return EarlyExitDraft(draft.exit_layer, head.requires_grad_(False))
