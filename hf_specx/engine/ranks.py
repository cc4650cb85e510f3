"""Processes that hold parts of the same models (FSDP, ZeRO-3): each must run the same forwards, in the same order.

A forward of such a model gathers its weights from all ranks, so a rank that runs fewer leaves the others waiting. As
in `generate`, a rank whose text is finished goes on with forwards that are not used until all ranks are finished.
"""

import torch
from torch import distributed
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_specx.common.devices import world_size
from hf_specx.common.errors import require
from hf_specx.drafting.drafter import Drafter
from hf_specx.drafting.schedule import DraftSettings

from .reasons import why_out_of_step


def of_first_rank(number: int, device: torch.device) -> int:
    """The number of the first rank; each of them must ask equally often.

    Each rank has its own clock and so finds a number of its own; with different numbers, ranks would wait for each
    other for ever, in different forwards.
    """
    shared = torch.tensor(number, device=device)
    distributed.broadcast(shared, 0)
    return int(shared)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is True on some rank; each of them must ask equally often."""
    count = torch.tensor(float(flag), device=device)
    distributed.all_reduce(count)
    return count.item() > 0


def is_tensor_parallel(*models: PreTrainedModel) -> bool:
    """Whether a model is spread over ranks by tensor parallelism, so that all of them decode the same rows."""
    return any((getattr(model, "tp_size", None) or 1) > 1 for model in models)


def synced_by_default(*models: PreTrainedModel) -> bool:
    """Whether any part of the models is spread over ranks; `generate` looks at the target only."""
    if world_size() == 1:
        return False
    parts = (part for model in models for part in model.modules())
    return is_deepspeed_zero3_enabled() or any(map(is_fsdp_managed_module, parts))


def check_synced(settings: DraftSettings, drafter: Drafter) -> None:
    """Raise ValueError if ranks that hold parts of the models cannot keep step."""
    where_fixed = "with synced_gpus= it must be the same on all ranks"
    message = (
        f"num_assistant_tokens_schedule={settings.schedule!r} changes the number of candidates by what all rows "
        f"accept, and {where_fixed}; use 'constant'."
    )
    require(settings.schedule == "constant", message)
    message = (
        f"assistant_confidence_threshold={settings.threshold} changes the number of candidates by what all rows "
        f"draft, and {where_fixed}; set it to 0."
    )
    require(not settings.threshold, message)
    same = "synced_gpus=True needs the same forwards on every rank, and "
    require(not drafter.parts, f"{same}several drafts are chosen by the text; give one.")
    why = "" if drafter.model is None else why_out_of_step(drafter.model)
    require(not why, f"{why}.")
    message = (
        "the draft has another tokenizer, so that ranks would run different forwards; give one with the target's."
    )
    require(not drafter.has_other_tokenizer, message)
