"""Texts as batches, and the outputs of a target for them, which are cached so that each text is read once.

What is cached is the input of the target's output layer: a text that is trained on again costs no other forward.
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


CACHE_BYTES = 4 << 30  # of host memory


class Text(NamedTuple):
    """A prompt and what the target wrote after it, as token ids."""

    prompt: list[int]
    new: list[int]

    def cut(self, max_new: int | None) -> "Text":
        """The text with at most so many new tokens, its last ones; earlier ones become part of the prompt."""
        surplus = 0 if max_new is None else max(0, len(self.new) - max_new)
        return Text(self.prompt + self.new[:surplus], self.new[surplus:])


def collate(texts: Sequence[Text]) -> dict[str, torch.Tensor]:
    """A batch, padded on the right with 0: ids, mask, and labels [B, L] int64, -100 at the prompt and the pads."""
    batch = padded_rows([text.prompt + text.new for text in texts], "right")
    labels = torch.full_like(batch["input_ids"], -100)
    for row, (prompt, new) in enumerate(texts):
        labels[row, len(prompt) : len(prompt) + len(new)] = torch.tensor(new, device="cpu")
    return batch | {"labels": labels}


def labelled_logits(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits [N, V] in float32 at the N positions of a batch whose next token has a label."""
    logits, has_label = last_logits(model, batch)
    return logits[has_label.to(logits.device)].float()


def last_logits(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, K, V] from the first position on whose next token has a label, and where [B, K] it has one."""
    has_label = batch["labels"][:, 1:] != -100
    has_label = has_label[:, int(has_label.any(0).int().argmax()) :]
    count = has_label.shape[1] + 1  # the last of them has no next token
    inner = unwrapped_draft(model)
    if isinstance(inner, DistributedDataParallel):
        inner = unwrapped_draft(inner.module)
    device = execution_device(inner)
    inputs: dict[str, Any] = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
    if "logits_to_keep" in inspect.signature(inner.forward).parameters:
        inputs["logits_to_keep"] = count
    return model(**inputs, use_cache=False).logits[:, -count:-1], has_label


class TargetOutputs(NamedTuple):
    """The logits of a target for texts, and its hidden states for a draft head."""

    logits: torch.Tensor  # [N, V] float32, at the N positions whose next token it wrote, text by text
    states: list[torch.Tensor]  # [L, W] of each text the states that a head reads, joined; empty where none is read


class TargetOutputCache:
    """Computes the outputs of a target for texts, and caches them.

    What is cached are the inputs of its output layer at the tokens that it wrote, and hidden states for a draft head.
    They are stored on the host, in the target's precision, and computed in the order in which texts were written, so
    that they are the same, bit for bit, when an interrupted training goes on. Once the room is full, further texts are
    read each time, with those beside them. So are all texts of a target whose logits are not what its output layer
    gives, such as capped or scaled ones.

    Args:
        target: in evaluation mode.
        hidden_state_taps: where in it a draft head reads states.
        batch_size: texts in a forward.
        max_bytes: of memory, which one forward may exceed; 0 caches nothing.

    Attributes:
        bytes_left: of these.
        stored: of each text so far, None where it is read each time.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        hidden_state_taps: Sequence[HiddenStateTap],
        batch_size: int,
        max_bytes: int = CACHE_BYTES,
    ):
        self.target, self.hidden_state_taps, self.batch_size = target, hidden_state_taps, batch_size
        self.output_layer: Any = target.get_output_embeddings()
        self.bytes_left = 0 if self.output_layer is None else max_bytes
        self.stored: list[tuple[torch.Tensor, ...] | None] = []

    @torch.no_grad()
    def add(self, texts: Sequence[Text]) -> None:
        """Compute and store the outputs for the new texts of a phase."""
        by_text: list[tuple[torch.Tensor, ...]] = []
        while self.bytes_left > 0 and len(by_text) < len(texts):
            part = texts[len(by_text) : len(by_text) + self.batch_size]
            _, to_store = self._forward(part, store=True)
            self.bytes_left -= sum(tensor.nbytes for tensors in to_store for tensor in tensors)
            by_text += to_store
        if by_text:  # in one block: small tensors that stay keep an allocator from giving back what is between them
            blocks = [torch.cat(tensors).split(list(map(len, tensors))) for tensors in zip(*by_text, strict=True)]
            self.stored += zip(*blocks, strict=True)
        self.stored += [None] * (len(texts) - len(by_text))

    @torch.no_grad()
    def outputs(self, texts: Sequence[Text], numbers: Sequence[int] | None = None) -> TargetOutputs:
        """The outputs for texts; `numbers` count all texts given to `add`, from 0, and None is for texts not added."""
        stored = [self.stored[number] for number in numbers or ()]
        hits = [tensors for tensors in stored if tensors is not None]
        if len(hits) < len(texts):
            return self._forward(texts)[0]
        inputs = torch.cat([tensors[0] for tensors in hits]).to(last_device(self.target))
        states = [tensors[1] for tensors in hits] if self.hidden_state_taps else []
        return TargetOutputs(self.output_layer(inputs).float(), states)

    def _forward(
        self, texts: Sequence[Text], store: bool = False
    ) -> tuple[TargetOutputs, list[tuple[torch.Tensor, ...]]]:
        """The outputs of a forward, and what to store of each text.

        The latter is empty if more is done to logits than the output layer does.
        """
        inputs: list[torch.Tensor] = []
        hook = None
        if store:
            hook = self.output_layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        hidden = HiddenStates(self.hidden_state_taps, last_device(self.target), self.target)
        try:
            with hidden:
                logits, has_label = last_logits(self.target, collate(texts))
        finally:
            if hook:
                hook.remove()
        states: list[torch.Tensor] = []
        if self.hidden_state_taps:
            lengths = [len(text.prompt) + len(text.new) for text in texts]
            states = [row[:length] for row, length in zip(hidden.last(), lengths, strict=True)]
        outputs = TargetOutputs(logits[has_label.to(logits.device)].float(), states)
        if not store:
            return outputs, []
        columns = slice(-logits.shape[1] - 1, -1)
        reproducible = len(inputs) == 1 and inputs[0].dim() == 3  # [B, L, H], or [B, K + 1, H]
        if reproducible and not self.stored:
            reproducible = torch.equal(self.output_layer(inputs[0])[:, columns].to(logits), logits)
        if not reproducible:
            self.bytes_left = 0
            return outputs, []
        rows = zip(inputs[0][:, columns].cpu(), has_label.cpu(), strict=True)
        labelled = [row[flags] for row, flags in rows]
        if not states:
            return outputs, [(row,) for row in labelled]
        return outputs, list(zip(labelled, [row.cpu() for row in states], strict=True))
