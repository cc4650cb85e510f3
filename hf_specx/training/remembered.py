"""What the target's head reads of each text: one that is trained on again costs no other forward of the target."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.devices import execution_device, last_device

from .reading import collate, logits_where_written
from .texts import Phases, Text


REMEMBERED_BYTES = 4 << 30  # bytes of host memory


class Remembered:
    """A target's last hidden states of texts, on the host and in the target's precision.

    A text is read with its neighbours, whichever of them is asked for first, since rounding depends on what else is in
    a forward: so what is kept does not depend on whether a training was interrupted. Texts beyond the room are read
    each time, and so are all of a model whose logits are not what its head gives, as where they are capped or scaled.

    Args:
        target: in evaluation mode.
        phases: the texts.
        room: bytes, for as many texts of the largest length as fit, the first ones.
    """

    def __init__(self, target: PreTrainedModel, phases: Phases, room: int = REMEMBERED_BYTES):
        self.target, self.phases, self.room = target, phases, room
        self.head: Any = target.get_output_embeddings()
        self.states: dict[int, torch.Tensor] = {}  # by the number of a text: [L, H]
        self.bytes_per_token: int | None = None

    @torch.no_grad()
    def logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """As `logits_where_written`, of a batch that also has the `numbers` [B] of its texts."""
        numbers = batch["numbers"].tolist()
        known = {number: self._states(number) for number in numbers}
        rest = [number for number, states in known.items() if states is None]
        if len(rest) == len(known):
            return logits_where_written(self.target, execution_device(self.target), batch)
        known |= zip(rest, self._read([self.phases.text(number) for number in rest]), strict=True)
        wanted = (batch["labels"][:, 1:] != -100).cpu()
        rows = zip((known[number] for number in numbers), wanted, strict=True)
        read = torch.cat([states[at[: len(states)].nonzero()[:, 0]] for states, at in rows])
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
        if not texts:
            return []
        batch, seen, device = collate(texts), list[torch.Tensor](), execution_device(self.target)
        hook = self.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            ids, mask = (batch[name].to(device) for name in ("input_ids", "attention_mask"))
            logits = self.target(input_ids=ids, attention_mask=mask, use_cache=False).logits
        finally:
            hook.remove()
        if self.bytes_per_token is None:
            gives = len(seen) == 1 and seen[0].shape[:2] == ids.shape
            gives = gives and torch.equal(self.head(seen[0]).to(logits), logits)  # these are where the inputs are
            self.head = self.head if gives else None
            self.bytes_per_token = seen[0][0, 0].nbytes if gives else 0
        if self.head is None:
            return []
        lengths = [len(text.prompt) + len(text.new) for text in texts]
        return [row[:length].clone() for row, length in zip(seen[0].cpu(), lengths, strict=True)]
