"""What the target's head reads of each text, so that a text that is trained on again costs no forward of the target."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.devices import execution_device, last_device

from .reading import collate, logits_where_written
from .texts import Phases, Text


ROOM = 4 << 30  # bytes of host memory


class Remembered:
    """A target's last hidden states of texts, on the host and in the target's precision.

    A text is read with its neighbours, whichever of them is asked for first. So the logits do not depend on the order
    of the training, nor on whether it was interrupted. Texts beyond the room are read anew each time, and so are all
    if the model's logits are not what its head gives, as where they are capped or scaled.

    Args:
        target: in evaluation mode.
        phases: the texts.
        room: bytes, for as many texts of the largest length as fit, the first ones.
    """

    def __init__(self, target: PreTrainedModel, phases: Phases, room: int = ROOM):
        self.target, self.phases, self.room = target, phases, room
        self.head: Any = target.get_output_embeddings()
        self.states: dict[int, torch.Tensor] = {}  # by the number of a text: [L, H]
        self.bytes_per_token: int | None = None

    @torch.no_grad()
    def logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """As `logits_where_written`, of a batch that also has the `numbers` [B] of its texts."""
        known = [self._states(number) for number in batch["numbers"].tolist()]
        if any(states is None for states in known):
            return logits_where_written(self.target, execution_device(self.target), batch)
        wanted = (batch["labels"][:, 1:] != -100).cpu()
        read = torch.cat([states[at[: len(states)].nonzero()[:, 0]] for states, at in zip(known, wanted, strict=True)])
        return self.head(read.to(last_device(self.target))).float()

    def _states(self, number: int) -> Any:
        """Those of a text, None where it is to be read anew."""
        if number not in self.states and self._fits(number):
            first, texts = self.phases.neighbours(number)
            self.states |= {n: states for n, states in enumerate(self._read(texts), first) if self._fits(n)}
        return self.states.get(number)

    def _fits(self, number: int) -> bool:
        return self.head is not None and (number + 1) * self.phases.longest * (self.bytes_per_token or 0) <= self.room

    def _read(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        """What the head reads in a forward, [L, H] for each text; none at all if that does not give the logits."""
        batch, seen, device = collate(texts), list[torch.Tensor](), execution_device(self.target)
        hook = self.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            ids, mask = (batch[name].to(device) for name in ("input_ids", "attention_mask"))
            logits = self.target(input_ids=ids, attention_mask=mask, use_cache=False).logits
        finally:
            hook.remove()
        if self.bytes_per_token is None:
            gives = len(seen) == 1 and seen[0].shape[:2] == ids.shape and torch.equal(self.head(seen[0]), logits)
            self.head = self.head if gives else None
            self.bytes_per_token = seen[0][0, 0].nbytes if gives else 0
        if self.head is None:
            return []
        lengths = [len(text.prompt) + len(text.new) for text in texts]
        return [row[:length].clone() for row, length in zip(seen[0].cpu(), lengths, strict=True)]
