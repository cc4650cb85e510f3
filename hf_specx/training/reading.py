"""Texts as batches, and what models say where the target wrote; what the target says is kept, so that it is read once.

What is kept is what its head reads: a text that is trained on again costs no other forward of the target.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_specx.common.devices import execution_device, last_device
from hf_specx.common.tokenizers import padded_rows
from hf_specx.common.wrappers import unwrapped_draft


REMEMBERED_BYTES = 4 << 30  # bytes of host memory


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


class Remembered:
    """The target's last hidden states where it wrote, on the host and in the target's precision.

    They are read in the order in which texts were written, so they are the same, bit for bit, where an interrupted
    training goes on. Texts that come when the room is full are read each time; so are all texts of a target whose
    logits are not what its head gives, as where they are capped or scaled.

    Args:
        target: in evaluation mode.
        rows: texts in a forward.
        room: bytes, which one forward may exceed; 0 remembers nothing.
    """

    def __init__(self, target: PreTrainedModel, rows: int, room: int = REMEMBERED_BYTES):
        self.target, self.rows = target, rows
        self.head: Any = target.get_output_embeddings()
        self.room = 0 if self.head is None else room
        self.states: list[torch.Tensor | None] = []  # of each text so far [N, H], None where it is read each time

    @torch.no_grad()
    def add(self, texts: Sequence[Text]) -> None:
        """Read the texts that were written last, of one phase."""
        found: list[torch.Tensor] = []
        for start in range(0, len(texts), self.rows):
            read = self._read(texts[start : start + self.rows]) if self.room > 0 else []
            self.room -= sum(states.nbytes for states in read)
            found += read
        if found:  # in one block: small tensors that stay keep an allocator from giving back what lies between them
            self.states += torch.cat(found).split([len(states) for states in found])
        self.states += [None] * (len(texts) - len(found))

    @torch.no_grad()
    def logits(self, texts: Sequence[Text], numbers: Sequence[int]) -> torch.Tensor:
        """As `logits_where_written`, of texts with these numbers: in the order of `add`, counted from 0."""
        known = [self.states[number] for number in numbers]
        unread = [text for text, states in zip(texts, known, strict=True) if states is None]
        if len(unread) == len(texts):
            return logits_where_written(self.target, collate(texts))
        read = iter(self._read(unread) if unread else [])
        rows = torch.cat([next(read) if states is None else states for states in known])
        return self.head(rows.to(last_device(self.target))).float()

    def _read(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        """What the head reads in a forward, [N, H] of each text; none if more is done to its logits."""
        seen: list[torch.Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            logits, wanted = last_logits(self.target, collate(texts))
        finally:
            hook.remove()
        places = slice(-logits.shape[1] - 1, -1)
        gives = len(seen) == 1 and seen[0].dim() == 3  # [B, L, H], or [B, K + 1, H]
        if not self.states:
            gives = gives and torch.equal(self.head(seen[0])[:, places].to(logits), logits)
        if not gives:
            self.room = 0
            return []
        rows = zip(seen[0][:, places].cpu(), wanted.cpu(), strict=True)
        return [row[at] for row, at in rows]
