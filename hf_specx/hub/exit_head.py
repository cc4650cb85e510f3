"""The head of an early exit in a pair's folder: a linear map in a safetensors file of its own."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict

from hf_specx.common.devices import last_device
from hf_specx.common.errors import require
from hf_specx.drafting.early_exit import EarlyExitDraft

from .fetch import Files, get_files
from .model_files import AGAIN, check_links
from .pair_config import PairConfig, WeightlessDraft
from .weights import shapes_in


HEAD_NAME = "exit_head.safetensors"


def get_head(pair: Files, config: PairConfig, **hub: Any) -> Path | None:
    """The file of the head that a pair's early exit has, checked; None if it has none.

    Args:
        pair: the pair's own files.
        config: of the pair.
        **hub: `fetch.HUB_OPTIONS`.

    Raises:
        ValueError: it is missing, cut off, a link out of the folder, or no safetensors.
    """
    if config.early_exit is None or not config.early_exit.head:
        return None
    path = get_files(pair.name, pair.revision, [HEAD_NAME], **hub).root / HEAD_NAME
    check_links(pair.root, path)
    shapes_in(path)
    return path


def with_head(draft: WeightlessDraft, path: Path | None, target: PreTrainedModel) -> WeightlessDraft:
    """An early exit with the head in a file of `get_head`, where and as precise as the target's last layers.

    Raises:
        ValueError: the file holds anything but a square matrix of the target's width, and a bias.
    """
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
