"""Whether a head's candidates look as if its files were misread: hardly any is kept, or they fit another place."""

from collections import deque
from typing import NamedTuple

import torch

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round

from .config import OF_BLOCKS, OF_EAGLE, HeadConfig


LEAST_FIRST = 64  # first candidates of rows, below which nothing is said
CHANCE = 1 / 8  # of them; trained heads keep a half or more, those that were misread one in ten
HALF = 1 / 2  # of them, up to which it is looked where the candidates of a block fit
FITS = 0.15  # of the candidates, at least, that are the token one place on or back
ROUNDS = 64  # of which candidates are looked at
TRY = dict.fromkeys(OF_BLOCKS, "layout=, is_causal=, layer_ids= or partial_rotary_factor=")
TRY |= dict.fromkeys(OF_EAGLE, "layer_ids=, norm_output= or partial_rotary_factor=")


class Proposed(NamedTuple):
    """The candidates [R, K] of a round, and after how many emitted tokens of which rows they stand."""

    tokens: torch.Tensor
    lengths: list[int]
    rows: list[int]
    before: list[int]


class MisreadWatch:
    """Counts what is kept of a head's first candidates in a call.

    After 64 candidates a head of which three in ten are kept is reported with probability 9e-4, one of which one in
    ten is kept with 0.81, and one in twenty with 0.99. The layout of a block is named by where its candidates fit.
    No forward is run for it, and candidates are read back once, for a head that is reported.
    """

    def __init__(self) -> None:
        self.first = self.kept = 0
        self.rounds: deque[Proposed] = deque(maxlen=ROUNDS)

    def observe(self, done: Round, source: str) -> None:
        """Count a round, as far as the candidates are of this source."""
        drafted = zip(done.draft.lengths, done.draft.sources, strict=True)
        lengths = [length if by == source else 0 for length, by in drafted]
        if any(lengths):
            self.first += sum(length > 0 for length in lengths)
            self.kept += sum(kept > 0 for kept, length in zip(done.accepted, lengths, strict=True) if length)
            self.rounds.append(Proposed(done.draft.tokens, lengths, list(done.rows), list(done.before)))

    def forget(self, rows: list[int]) -> None:
        """Other texts come in the places of these rows."""
        for index, proposed in enumerate(self.rounds):
            gone = [0 if row in rows else length for row, length in zip(proposed.rows, proposed.lengths, strict=True)]
            self.rounds[index] = proposed._replace(lengths=gone)

    def reason(self, config: HeadConfig, batch: Batch) -> str:
        """What to say of the head, and which option of loading to try; nothing if it fits."""
        if self.first < LEAST_FIRST or self.kept > HALF * self.first or config.kind not in TRY:
            return ""
        seen = f"the head's first candidates were kept {self.kept} of {self.first} times"
        if config.kind in OF_BLOCKS:
            shift, layout = (-1, "fill-in") if config.sample_from_anchor else (1, "anchor")
            here, there = self._fitting(batch, 0), self._fitting(batch, shift)
            if there > max(FITS, 2 * here):
                seen += f", and {there:.0%} of all candidates are the token one place {'on' if shift > 0 else 'back'}"
                return f"{seen}: load it by DraftHead.from_pretrained(..., layout={layout!r})."
        if self.kept > CHANCE * self.first:
            return ""
        seen += ", no more than by chance: if it was made for this target, its files do not say all that matters; try "
        return f"{seen}{TRY[config.kind]} of DraftHead.from_pretrained, or choose another head."

    def _fitting(self, batch: Batch, shift: int) -> float:
        """Which part of the candidates are the token so many places on in the text."""
        if not self.rounds:
            return 0.0
        tokens = iter(torch.cat([proposed.tokens.flatten() for proposed in self.rounds]).tolist())
        fits = compared = 0
        for proposed in self.rounds:
            most = proposed.tokens.shape[1]
            for row, length, before in zip(proposed.rows, proposed.lengths, proposed.before, strict=True):
                text = batch.table[row].emitted
                for place in range(most):
                    token, index = next(tokens), before + place + shift
                    # the first place of a block may be trained for nothing
                    if place < length and index < len(text) and place + shift >= 0:
                        fits, compared = fits + (text[index] == token), compared + 1
        return fits / max(1, compared)
