"""Whether a head's candidates look as if its files were misread: hardly any is accepted, or they fit another place."""

from collections import deque
from typing import NamedTuple

import torch

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round

from .config import BLOCK_KINDS, EAGLE_KINDS, HeadConfig


MIN_FIRST_CANDIDATES = 64  # first candidates of rows, below which nothing is said
CHANCE_SHARE = 1 / 8  # of them; of trained heads a half or more are accepted, of those that were misread one in ten
SHIFT_UP_TO = 1 / 2  # of them, up to which it is looked where the candidates of a block fit
MIN_FITTING_SHARE = 0.15  # of the candidates, at least, that are the token one place on or back
REMEMBERED_ROUNDS = 64  # of which candidates are looked at
OPTIONS_TO_TRY = dict.fromkeys(BLOCK_KINDS, "layout=, is_causal=, layer_ids= or partial_rotary_factor=")
OPTIONS_TO_TRY |= dict.fromkeys(EAGLE_KINDS, "layer_ids=, norm_output= or partial_rotary_factor=")


class Proposed(NamedTuple):
    """The candidates [R, K] of a round, and after how many emitted tokens of which rows they stand."""

    tokens: torch.Tensor
    lengths: list[int]
    rows: list[int]
    before: list[int]


class MisreadWatch:
    """Counts how many of a head's first candidates are accepted in a call.

    After 64 candidates a head of which three in ten are accepted is reported with probability 9e-4, one of which one
    in ten is accepted with 0.81, and one in twenty with 0.99. The layout of a block is named by where its candidates
    fit. No forward is run for it, and candidates are read back once, for a head that is reported.
    """

    def __init__(self) -> None:
        self.first_drafted = self.first_accepted = 0
        self.rounds: deque[Proposed] = deque(maxlen=REMEMBERED_ROUNDS)

    def observe(self, done: Round, source: str) -> None:
        """Count a round, as far as the candidates are of this source."""
        drafts = zip(done.draft.lengths, done.draft.sources, strict=True)
        lengths = [length if drafted_by == source else 0 for length, drafted_by in drafts]
        if any(lengths):
            self.first_drafted += sum(length > 0 for length in lengths)
            accepted = [number for number, length in zip(done.accepted_in_chain, lengths, strict=True) if length]
            self.first_accepted += sum(number > 0 for number in accepted)
            self.rounds.append(Proposed(done.draft.tokens, lengths, list(done.rows), list(done.emitted_before)))

    def forget_rows(self, rows: list[int]) -> None:
        """Leave out what was proposed for these rows, where other texts come in."""
        for index, proposed in enumerate(self.rounds):
            by_row = zip(proposed.rows, proposed.lengths, strict=True)
            lengths = [0 if row in rows else length for row, length in by_row]
            self.rounds[index] = proposed._replace(lengths=lengths)

    def reason(self, config: HeadConfig, batch: Batch) -> str:
        """What to say of the head, and which option of loading to try; nothing if it fits."""
        drafted, accepted = self.first_drafted, self.first_accepted
        if drafted < MIN_FIRST_CANDIDATES or accepted > SHIFT_UP_TO * drafted or config.kind not in OPTIONS_TO_TRY:
            return ""
        message = f"the head's first candidates were kept {accepted} of {drafted} times"
        if config.kind in BLOCK_KINDS:
            shift, layout = (-1, "fill-in") if config.sample_from_anchor else (1, "anchor")
            fitting = self._share_fitting(batch, 0)
            fitting_shifted = self._share_fitting(batch, shift)
            if fitting_shifted > max(MIN_FITTING_SHARE, 2 * fitting):
                direction = "on" if shift > 0 else "back"
                return (
                    f"{message}, and {fitting_shifted:.0%} of all candidates are the token one place {direction}: "
                    f"load it by DraftHead.from_pretrained(..., layout={layout!r})."
                )
        if accepted > CHANCE_SHARE * drafted:
            return ""
        return (
            f"{message}, no more than by chance: if it was made for this target, its files do not say all that "
            f"matters; try {OPTIONS_TO_TRY[config.kind]} of DraftHead.from_pretrained, or choose another head."
        )

    def _share_fitting(self, batch: Batch, shift: int) -> float:
        """Which part of the candidates are the token so many places on in the text."""
        if not self.rounds:
            return 0.0
        tokens = iter(torch.cat([proposed.tokens.flatten() for proposed in self.rounds]).tolist())
        fitting = compared = 0
        for proposed in self.rounds:
            num_columns = proposed.tokens.shape[1]
            for row, length, before in zip(proposed.rows, proposed.lengths, proposed.before, strict=True):
                text = batch.row_states[row].emitted_ids
                for column in range(num_columns):
                    token, index = next(tokens), before + column + shift
                    # the first position of a block may be trained for nothing
                    if column < length and index < len(text) and column + shift >= 0:
                        fitting += text[index] == token
                        compared += 1
        return fitting / max(1, compared)
