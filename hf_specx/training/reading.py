"""Texts as batches, and what a model says where the target wrote."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from hf_specx.common.devices import execution_device
from hf_specx.common.tokenizers import padded_rows
from hf_specx.common.wrappers import unwrapped_draft


class Text(NamedTuple):
    """A prompt and what the target wrote after it, as token ids."""

    prompt: list[int]
    new: list[int]


def collate(texts: Sequence[Text]) -> dict[str, torch.Tensor]:
    """A batch, padded on the right with 0: ids, mask, and labels [B, L] int64, -100 at the prompt and the pads."""
    batch = padded_rows([text.prompt + text.new for text in texts], "right")
    labels = torch.full_like(batch["input_ids"], -100)
    for row, (prompt, new) in enumerate(texts):
        labels[row, len(prompt) : len(prompt) + len(new)] = torch.tensor(new)
    return batch | {"labels": labels}


def logits_where_written(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits [N, V] in float32 at the N positions of a batch whose next token has a label."""
    logits, wanted = last_logits(model, batch)
    return logits[wanted.to(logits.device)].float()


def last_logits(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, K, V] from the first token on that has a label next, and where [B, K] there is one."""
    wanted = batch["labels"][:, 1:] != -100
    wanted = wanted[:, int(wanted.any(0).int().argmax()) :]
    kept = wanted.shape[1] + 1  # the last of them has no next token
    inner = unwrapped_draft(model)
    inner = unwrapped_draft(inner.module) if isinstance(inner, DistributedDataParallel) else inner
    where = execution_device(inner)
    inputs: dict[str, Any] = {name: batch[name].to(where) for name in ("input_ids", "attention_mask")}
    if "logits_to_keep" in inspect.signature(inner.forward).parameters:
        inputs["logits_to_keep"] = kept
    return model(**inputs, use_cache=False).logits[:, -kept:-1], wanted
