"""The lockstep layout: all rows advance alike, so the host's own cache is cropped, or put back where it cannot be."""

import torch
from transformers.cache_utils import Cache

from .hosted import HostedDecoder
from .sequences import Sequences
from .states import states_of, unlimited


class LockstepDecoder(HostedDecoder):
    """All rows have emitted equally many tokens, so the host's own cache is cropped, or its states are restored."""

    even = True

    def _note_width(self, width: int) -> None:
        super()._note_width(width)
        self.length, self.states = width, states_of(self.cache)
        self.limited = [module for module in self.model.modules() if hasattr(module, "time_step_limit")]
        config = self.model.config.get_text_config(decoder=True)
        self.images = getattr(config, "cross_attention_layers", None) or ()  # layers that hold no text

    def _rewind(self, sequences: Sequences, wanted: list[int]) -> None:
        held, target = self.held[sequences.rows[0]], wanted[0]
        reached = self.states.restore(target, held)
        self.states.crop(held - reached, self.images)
        self.length -= held - reached
        if reached < target:  # the state of an earlier moment: feed again what was accepted since
            behind = target - sequences.counts[sequences.rows[0]]
            missing = self._known(sequences.last(target - reached, behind))
            self._fed(sequences, missing, [reached] * len(wanted), behind, 1)
        for row in sequences.rows:
            self.held[row] = target

    def _fed(self, sequences: Sequences, tokens: torch.Tensor, held: list[int], ahead: int, keep: int) -> torch.Tensor:
        self.states.save(held[0])
        with unlimited(self.limited):
            return super()._fed(sequences, tokens, held, ahead, keep)

    def leave(self, rows: list[int], places: torch.Tensor | None) -> None:
        if places is not None and len(places):
            self.select(places)

    def past(self, sequences: Sequences, emitted: int) -> Cache | None:
        """The host's own cache if all rows ended together; a window or a state cannot be put together from rows."""
        if self.rows < len(sequences.counts) or len(set(sequences.counts)) > 1:
            return None
        sequences.revive()
        self._rewind(sequences, [emitted - 1] * self.rows)
        return self.cache

    def select(self, places: torch.Tensor) -> None:
        super().select(places)
        self.states.select(places)
