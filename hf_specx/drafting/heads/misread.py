"""Whether a head's candidates look as if its files were misread: hardly any is accepted, or they fit another place."""

import torch

from hf_specx.common.devices import to_device_async
from hf_specx.common.round import Round

from .config import BLOCK_KINDS, EAGLE_KINDS, HeadConfig


MIN_FIRST_CANDIDATES = 64  # first candidates of rows, below which nothing is said
CHANCE_SHARE = 1 / 8  # of them, up to which no more than chance is accepted
SHIFT_UP_TO = 1 / 2  # of them, up to which it is looked where the candidates of a block fit
MIN_SHIFT_GAIN = 0.1  # by which candidates fit another place better than their own, at least
MIN_STANDARD_ERRORS = 4.0  # of that gain
COMPARED_ROUNDS = 128
OPTIONS_TO_TRY = dict.fromkeys(BLOCK_KINDS, "layout=, is_causal=, layer_ids= or partial_rotary_factor=")
OPTIONS_TO_TRY |= dict.fromkeys(EAGLE_KINDS, "layer_ids=, norm_output= or partial_rotary_factor=")


class MisreadWatch:
    """Counts how many of a head's first candidates are accepted in a call, and looks where those of a block fit.

    In rounds of a block of which at most half of the first candidates are accepted, three candidates are compared with
    the target at the place behind the text: the first one, the second one, and the first one of a round before in
    which one token was emitted. If one of the latter two fits better, the head was trained for the place before its
    own, or for the one behind it. How well a candidate fits is the overlap Σ min(p, q); of one that was not drawn, it
    is 1 if it is the token that was emitted. No forward is run for it, and nothing is read back before the end.

    Attributes:
        gains: by what is added to a candidate's place, for each round how much better it fits there than at its own,
            for the rows that have both.
    """

    def __init__(self, config: HeadConfig) -> None:
        self.config = config
        self.first_drafted = self.first_accepted = 0
        self.num_compared = 0
        self.gains: dict[int, list[torch.Tensor]] = {-1: [], 1: []}
        # the first candidates [R] of the last round, with q [R, V] if they were drawn, and its rows by number
        self.last_first: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self.rows_of_last: dict[int, int] = {}

    def observe(self, round_: Round, source: str) -> None:
        """Count a round, as far as the candidates are of this source."""
        drafts = zip(round_.draft.lengths, round_.draft.sources, strict=True)
        lengths = [length if drafted_by == source else 0 for length, drafted_by in drafts]
        accepted = [number for number, length in zip(round_.accepted_in_chain, lengths, strict=True) if length]
        self.first_drafted += len(accepted)
        self.first_accepted += sum(number > 0 for number in accepted)
        is_poor = accepted and self.first_accepted <= SHIFT_UP_TO * self.first_drafted
        if self.config.kind in BLOCK_KINDS and is_poor and self.num_compared < COMPARED_ROUNDS:
            self.num_compared += 1
            self._compare(round_, lengths)
        else:
            self.rows_of_last = {}

    def _compare(self, round_: Round, lengths: list[int]) -> None:
        """Note how much better candidates fit the place behind the text than the first one does."""
        tokens, probs = round_.draft.tokens, round_.draft.probs
        target = None if probs is None else round_.scores[:, 0].softmax(-1)
        emitted = to_device_async([of_row[0] if of_row else -1 for of_row in round_.tokens], tokens.device)
        first = tokens[:, 0], None if probs is None else probs[:, 0]
        fit = fits(*first, target, emitted)
        with_second = [index for index, length in enumerate(lengths) if length > 1 and round_.tokens[index]]
        if with_second:
            second = tokens[:, 1], None if probs is None else probs[:, 1]
            self._note(-1, fits(*second, target, emitted) - fit, with_second)
        with_last = [
            index
            for index, row in enumerate(round_.rows)
            if lengths[index] and round_.tokens[index] and row in self.rows_of_last
        ]
        if with_last and self.last_first is not None:
            sources = to_device_async([self.rows_of_last.get(row, 0) for row in round_.rows], tokens.device)
            last_tokens, last_probs = self.last_first
            last_probs = None if last_probs is None or probs is None else last_probs.index_select(0, sources)
            self._note(1, fits(last_tokens.index_select(0, sources), last_probs, target, emitted) - fit, with_last)
        self.last_first = first
        self.rows_of_last = {
            row: index for index, row in enumerate(round_.rows) if lengths[index] and round_.emitted[index] == 1
        }

    def _note(self, shift: int, gain: torch.Tensor, indices: list[int]) -> None:
        self.gains[shift].append(gain.index_select(0, to_device_async(indices, gain.device)))

    def forget_rows(self, rows: list[int]) -> None:
        """Leave out what was proposed for these rows, where other texts come in."""
        self.rows_of_last = {row: index for row, index in self.rows_of_last.items() if row not in rows}

    def reason(self) -> str:
        """What to say of the head, and which option of loading to try; nothing if it fits."""
        drafted, accepted, kind = self.first_drafted, self.first_accepted, self.config.kind
        if drafted < MIN_FIRST_CANDIDATES or accepted > SHIFT_UP_TO * drafted or kind not in OPTIONS_TO_TRY:
            return ""
        message = f"the head's first candidates were kept {accepted} of {drafted} times"
        if kind in BLOCK_KINDS:
            shift, option = (-1, "fill-in") if self.config.sample_from_anchor else (1, "anchor")
            gain = self._gain(shift)
            if gain:
                direction = "on" if shift > 0 else "back"
                return (
                    f"{message}, and candidates fit the place one {direction} better, by {gain:.2f}: "
                    f"load it by DraftHead.from_pretrained(..., layout={option!r})."
                )
        if accepted > CHANCE_SHARE * drafted:
            return ""
        return (
            f"{message}, no more than by chance: if it was made for this target, its files do not say all that "
            f"matters; try {OPTIONS_TO_TRY[kind]} of DraftHead.from_pretrained, or choose another head."
        )

    def _gain(self, shift: int) -> float:
        """How much better candidates fit with this added to their place; 0 if that may be chance."""
        if not self.gains[shift]:
            return 0.0
        gains = torch.cat(self.gains[shift]).double()
        mean, error = float(gains.mean()), float(gains.std(correction=0)) / len(gains) ** 0.5
        is_certain = len(gains) >= MIN_FIRST_CANDIDATES / 2 and mean > MIN_STANDARD_ERRORS * error
        return mean if mean > MIN_SHIFT_GAIN and is_certain else 0.0


def fits(
    tokens: torch.Tensor, probs: torch.Tensor | None, target: torch.Tensor | None, emitted: torch.Tensor
) -> torch.Tensor:
    """[R] how well candidates fit: Σ min(p, q), or whether they are the emitted tokens.

    Args:
        tokens: [R], the candidates.
        probs: [R, V], what they were drawn from; None if they were not drawn.
        target: [R, V], the target's distribution; None if nothing is drawn.
        emitted: [R].
    """
    if probs is None or target is None:
        return (tokens == emitted).to(torch.float32)
    return torch.minimum(probs.to(target.dtype), target).sum(-1)
