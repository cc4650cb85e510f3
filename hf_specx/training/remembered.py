"""What the target's head reads of each text: one that is trained on again costs no other forward of the target."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specx.common.devices import execution_device, last_device

from .reading import Reader, last_logits, logits_where_written
from .texts import Phases, Text


REMEMBERED_BYTES = 4 << 30  # bytes of host memory


class Remembered:
    """A target's last hidden states where a draft is trained, on the host and in the target's precision.

    A text is read with its neighbours, whichever of them is asked for first, since rounding depends on what else is in
    a forward: so what is kept does not depend on whether a training was interrupted. Texts beyond the room are read
    each time, and so are all of a model whose logits are not what its head gives, as where they are capped or scaled.
    States lie in one block for each phase: small tensors that stay, between large ones that are freed, would have an
    allocator take many times their size.

    Args:
        target: in evaluation mode.
        phases: the texts.
        reader: of the draft, which says where it is trained.
        room: bytes, for as many texts of the largest length as fit, the first ones.
    """

    def __init__(self, target: PreTrainedModel, phases: Phases, reader: Reader, room: int = REMEMBERED_BYTES):
        self.target, self.phases, self.reader, self.room = target, phases, reader, room
        self.longest = phases.longest if self.reader.learn_from_prompts else phases.recipe.max_new_tokens
        self.head: Any = target.get_output_embeddings()
        self.states: dict[int, torch.Tensor] = {}  # by the number of a text: [N, H], a part of its block
        self.blocks: dict[int, torch.Tensor] = {}  # by the number of a phase: [texts, longest, H]
        self.most = 0 if self.head is None else math.inf  # texts; known after the first forward

    @torch.no_grad()
    def logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """As `logits_where_written`, of a batch that also has the `numbers` [B] of its texts."""
        numbers = batch["numbers"].tolist()
        known = {number: self._states(number) for number in numbers}
        rest = [number for number, states in known.items() if states is None]
        if len(rest) == len(known):
            return logits_where_written(self.target, execution_device(self.target), batch)
        known |= zip(rest, self._read([self.phases.text(number) for number in rest]), strict=True)
        read = torch.cat([known[number] for number in numbers])
        return self.head(read.to(last_device(self.target))).float()

    def _states(self, number: int) -> Any:
        """Those of a text, None where it is to be read anew."""
        if number not in self.states and number < self.most:
            first, texts = self.phases.neighbours(number)
            for each, states in enumerate(self._read(texts), first):
                if each < self.most:
                    self._keep(each, states)
        return self.states.get(number)

    def _keep(self, number: int, states: torch.Tensor) -> None:
        phase, place = divmod(number, self.phases.recipe.texts_per_phase)
        if phase not in self.blocks:
            texts = min(self.phases.recipe.texts_per_phase, int(self.most) - number + place)
            self.blocks[phase] = states.new_empty(texts, self.longest, states.shape[-1])
        self.states[number] = self.blocks[phase][place, : len(states)].copy_(states)

    def _read(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        """What the head reads in a forward, [N, H] for each text; none at all if that does not give the logits."""
        if not texts:
            return []
        batch, seen = self.reader.collate(texts), list[torch.Tensor]()
        hook = self.head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            logits, wanted = last_logits(self.target, execution_device(self.target), batch)
        finally:
            hook.remove()
        places = slice(-logits.shape[1] - 1, -1)
        if self.most == math.inf:
            gives = len(seen) == 1 and seen[0].dim() == 3  # [B, L, H], or [B, K + 1, H]
            gives = gives and torch.equal(self.head(seen[0])[:, places].to(logits), logits)
            self.most = self.room // (self.longest * seen[0][0, 0].nbytes) if gives else 0
        if self.most == 0:
            return []
        rows = zip(seen[0][:, places].cpu(), wanted.cpu(), strict=True)
        return [row[at] for row, at in rows]
