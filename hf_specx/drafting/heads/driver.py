"""The drafter of one call: candidates by a head, which is fed what the target has shown of accepted tokens."""

from collections.abc import Callable
from typing import Any

import torch

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Round
from hf_specx.drafting.candidates import SampledCandidateGenerator
from hf_specx.drafting.drafter import Reading, no_candidates
from hf_specx.drafting.forward_times import ForwardSize
from hf_specx.models.prompts import Place

from .feed import Feed


class HeadDrafter(SampledCandidateGenerator):
    """Samples candidates from a head, as `SampledCandidateGenerator` does from a model.

    Args:
        feed: the head's, for a target.
        places: where in the target it reads states.
        most: candidates that it has at most; None for any number.
        chained: whether each candidate takes a step of its own.
        size: of such a step.
    """

    source = "head"
    needs_hidden = True
    decoder: Feed

    def __init__(self, feed: Feed, places: list[Place], most: int | None, chained: bool, size: ForwardSize):
        super().__init__(None)  # type: ignore[arg-type]
        self.decoder, self.places, self.most, self.chained, self.of_step = feed, places, most, chained, size
        self.max_candidates = None if chained else most

    def read(self, reading: Reading) -> None:
        """Take up the states of all prompts; they are read when candidates are wanted first, if ever."""
        super().read(reading)
        self.apart = self.apart or not self.chained  # a place has its candidate whether or not those before are forced
        if self.decoder.body.config.confidence_head:  # which knows better than the candidate's own probability
            self.decoder.threshold, self.threshold = self.threshold, 0.0
        if self.decoder.ids is not None:
            ids = self.decoder.ids.cpu()
            self.known = torch.zeros(reading.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        self.decoder.start(reading.batch, reading.target, reading.vocab_size)

    def _decoder(self, reading: Reading) -> Any:
        return self.decoder

    def _ready(self, batch: Batch) -> Any:
        return self.decoder

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Draft for every decoding row that has shown new states; see there."""
        fresh = self.decoder.fresh(batch)
        most = max(lengths) if self.most is None else self.most
        limits = [min(length, most) if new else 0 for length, new in zip(lengths, fresh, strict=True)]
        if not any(limits):
            self.decoder.catch_up(batch)
            return no_candidates(batch)
        self.decoder.number = max(limits)
        return self.decoder.sure_part(super().propose(batch, limits))

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """Take up the states of new prompts."""
        self.decoder.admit(batch, rows)

    def observe(self, done: Round) -> None:
        """Take up the states of the tokens that were kept."""
        self.decoder.observe(done)

    def cost(self, batch: Batch) -> Callable[[int], object] | None:
        return (lambda count: self.decoder.rehearse(batch, count)) if self.chained else None

    def size(self) -> ForwardSize | None:
        return self.of_step
