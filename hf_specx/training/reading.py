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
from hf_specx.models.prompts import HiddenStateTap
from hf_specx.models.runner import HiddenStates


REMEMBERED_BYTES = 4 << 30  # bytes of host memory


class Text(NamedTuple):
    """A prompt and what the target wrote after it, as token ids."""

    prompt: list[int]
    new: list[int]

    def cut(self, most: int | None) -> "Text":
        """With so many new tokens at most, the last ones; those before them count as prompt."""
        more = 0 if most is None else max(0, len(self.new) - most)
        return Text(self.prompt + self.new[:more], self.new[more:])


def collate(texts: Sequence[Text]) -> dict[str, torch.Tensor]:
    """A batch, padded on the right with 0: ids, mask, and labels [B, L] int64, -100 at the prompt and the pads."""
    batch = padded_rows([text.prompt + text.new for text in texts], "right")
    labels = torch.full_like(batch["input_ids"], -100)
    for row, (prompt, new) in enumerate(texts):
        labels[row, len(prompt) : len(prompt) + len(new)] = torch.tensor(new, device="cpu")
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


class Said(NamedTuple):
    """What a target says of texts."""

    logits: torch.Tensor  # [N, V] float32, at the N positions whose next token it wrote, text by text
    states: list[torch.Tensor]  # [L, W] of each text what a head reads, its taps joined; empty where none is read


class Remembered:
    """What the target says of texts: what its head reads where it wrote, and states that a draft head reads.

    They are kept on the host and in the target's precision, and read in the order in which texts were written, so they
    are the same, bit for bit, where an interrupted training goes on. Texts that come when the room is full are read
    each time, with those beside them; so are all of a target whose logits are not what its head gives, as if they are
    capped or scaled.

    Args:
        target: in evaluation mode.
        hidden_state_taps: where in it a draft head reads states.
        rows: texts in a forward.
        room: bytes, which one forward may exceed; 0 remembers nothing.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        hidden_state_taps: Sequence[HiddenStateTap],
        rows: int,
        room: int = REMEMBERED_BYTES,
    ):
        self.target, self.hidden_state_taps, self.rows = target, hidden_state_taps, rows
        self.head: Any = target.get_output_embeddings()
        self.room = 0 if self.head is None else room  # that is left
        self.known: list[tuple[torch.Tensor, ...] | None] = []  # of each text so far, None where it is read each time

    @torch.no_grad()
    def add(self, texts: Sequence[Text]) -> None:
        """Read the texts that were written last, of one phase."""
        found: list[tuple[torch.Tensor, ...]] = []
        while self.room > 0 and len(found) < len(texts):
            read = self._read(texts[len(found) : len(found) + self.rows], True)[1]
            self.room -= sum(part.nbytes for parts in read for part in parts)
            found += read
        if found:  # in one block: small tensors that stay keep an allocator from giving back what lies between them
            blocks = [torch.cat(parts).split(list(map(len, parts))) for parts in zip(*found, strict=True)]
            self.known += zip(*blocks, strict=True)
        self.known += [None] * (len(texts) - len(found))

    @torch.no_grad()
    def said(self, texts: Sequence[Text], numbers: Sequence[int] | None = None) -> Said:
        """Of texts with these numbers, in the order of `add` and counted from 0; None is for others."""
        known = [parts for number in numbers or () if (parts := self.known[number]) is not None]
        if len(known) < len(texts):
            return self._read(texts)[0]
        rows = torch.cat([parts[0] for parts in known]).to(last_device(self.target))
        return Said(self.head(rows).float(), [parts[1] for parts in known if self.hidden_state_taps])

    def _read(self, texts: Sequence[Text], keep: bool = False) -> tuple[Said, list[tuple[torch.Tensor, ...]]]:
        """What a forward says, and what to keep of each text; nothing if more is done to logits than the head does."""
        seen: list[torch.Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, given: seen.append(given[0])) if keep else None
        hidden = HiddenStates(self.hidden_state_taps, last_device(self.target), self.target)
        try:
            with hidden:
                logits, wanted = last_logits(self.target, collate(texts))
        finally:
            if hook:
                hook.remove()
        lengths = [len(text.prompt) + len(text.new) for text in texts]
        states = (
            [row[:length] for row, length in zip(hidden.last(), lengths, strict=True)]
            if self.hidden_state_taps
            else []
        )
        said = Said(logits[wanted.to(logits.device)].float(), states)
        if not keep:
            return said, []
        places = slice(-logits.shape[1] - 1, -1)
        gives = len(seen) == 1 and seen[0].dim() == 3  # [B, L, H], or [B, K + 1, H]
        if gives and not self.known:
            gives = torch.equal(self.head(seen[0])[:, places].to(logits), logits)
        if not gives:
            self.room = 0
            return said, []
        read = [row[at] for row, at in zip(seen[0][:, places].cpu(), wanted.cpu(), strict=True)]
        return said, list(zip(read, *([row.cpu() for row in states],) * bool(states), strict=True))
