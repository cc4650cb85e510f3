"""Forced tokens: where the processors leave one token, it is a candidate that nobody has to draft.

Only what a mask forces is taken, token by token, and never what other tokens could spell. p and q are both 1 there, so
it is kept wherever those before it are.
"""

import torch

from hf_specx.common.batch import Batch
from hf_specx.common.devices import sent
from hf_specx.common.round import Draft
from hf_specx.sampling.processors import Processors

from .costs import RoundTimer


MOST_FORCED = 32  # of a row in a round, since each position takes memory for the whole vocabulary


class ForcedRun:
    """The candidates of a round under processors with masks, while they are found position by position.

    A row goes on while a draft has a candidate for it, or the next one is forced: `tokens` [R] has these, None
    elsewhere. `lengths` [R] counts the candidates so far, and `flags` [R] say which of them are forced. A draft that
    has the tokens `known` [V] bool alone has none where a mask excludes all of these.
    """

    def __init__(
        self, processors: Processors, batch: Batch, round_timer: RoundTimer | None, known: torch.Tensor | None = None
    ):
        self.processors, self.batch, self.known = processors, batch, known
        self.price = (
            0.0 if round_timer is None else round_timer.position(len(batch.rows))
        )  # of a position, in tokens of plain steps
        self.lengths, self.flags = [0] * len(batch.rows), [list[bool]() for _ in batch.rows]
        self.tokens: list[int | None] = []
        self.room = [min(batch.room(row) - 1, processors.max_rollback) for row in batch.rows]

    def next(self, ahead: int, wanted: list[bool], given: list[int] | None = None) -> list[bool]:
        """[R], for which rows the draft has to find what comes after `ahead` candidates, one more each time.

        Args:
            wanted: [R], whether it has anything there, if several tokens are allowed.
            given: [R], what that is, if it is known: a token that is not allowed does not count.
        """
        going = [length == ahead < room for length, room in zip(self.lengths, self.room, strict=True)]
        pairs = zip(going, self.batch.rows, self.flags, strict=True)
        # none is asked for before the first token, which the prompt's forward gives
        asked = [goes and self.batch.counts[row] > 0 and sum(flags) < MOST_FORCED for goes, row, flags in pairs]
        found = self.processors.allowed(self.batch, ahead, asked) if any(asked) else None
        masks = [None] * len(going) if found is None else found
        self.tokens, draws = [], []
        for index, mask in enumerate(masks):
            count = 0 if mask is None else int(mask.count_nonzero())
            self.tokens.append(int(mask.byte().argmax()) if mask is not None and count == 1 else None)
            ends = found is not None and asked[index] and count < 2  # or its next token is forced
            allowed = given is None or mask is None or bool(mask[given[index]])
            if wanted[index] and mask is not None and self.known is not None:
                allowed = bool((mask & self.known).any())
            draws.append(going[index] and not ends and wanted[index] and allowed)
        forced = [token is not None for token in self.tokens]
        if not any(draws) and sum(forced) < self.price * len(forced):
            self.tokens = [None] * len(forced)  # too few rows for a longer forward of all
        for index, (draw, token) in enumerate(zip(draws, self.tokens, strict=True)):
            if draw or token is not None:
                self.lengths[index] += 1
                self.flags[index].append(not draw)
        return draws

    @property
    def forces(self) -> bool:
        """Whether the next token of some row is forced."""
        return any(token is not None for token in self.tokens)

    def only(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [R, V] with the forced tokens alone, in rows that have one."""
        if not self.forces:
            return scores
        forced = sent([-1 if token is None else token for token in self.tokens], scores.device)[:, None]  # [R, 1]
        alone = torch.arange(scores.shape[1], device=scores.device) == forced
        return torch.where(forced < 0, scores, torch.where(alone, 0.0, -torch.inf))

    @property
    def forced(self) -> list[list[bool]] | None:
        """As in `Draft`; None if no candidate is."""
        return self.flags if any(map(any, self.flags)) else None


def within_masks(
    draft: Draft, processors: Processors, batch: Batch, round_timer: RoundTimer | None, joins: bool
) -> Draft:
    """Given candidates before the first that a mask excludes; if this `joins` them, with those that are forced.

    They are written after the rows' ends.
    """
    if not processors.mask_size:
        return draft
    batch.write_draft(draft)
    given, limits = batch.candidates(draft.tokens.shape[1]), list(draft.lengths)
    growth, columns = ForcedRun(processors, batch, round_timer if joins else None), list[list[int]]()
    while joins or max(limits) > len(columns):
        at = len(columns)
        wanted = [at < limit for limit in limits]
        own = [tokens[at] if is_wanted else 0 for tokens, is_wanted in zip(given, wanted, strict=True)]
        draws = growth.next(at, wanted, own)
        if not any(draws) and not growth.forces:
            break
        found = list(zip(own, draws, growth.tokens, strict=True))
        columns.append([mine if draw else forced or 0 for mine, draw, forced in found])
        batch.write(sent(columns[-1], batch.ids.device)[:, None], at, columns[-1:])
        # where another token stands, the candidates behind do not follow it
        follows = [draw or mine == forced for mine, draw, forced in found]
        limits = [limit if goes_on else min(limit, at) for limit, goes_on in zip(limits, follows, strict=True)]
    kept, estimate = [min(pair) for pair in zip(limits, growth.lengths, strict=True)], draft.estimate
    lengths, forced = (growth.lengths, growth.forced) if joins else (kept, None)
    if estimate is not None:  # what is forced is kept if those before it are
        rows = zip(estimate, kept, lengths, strict=True)
        estimate = [known[:own] + [known[own - 1] if own else 1.0] * (most - own) for known, own, most in rows]
    tokens = sent(columns, batch.ids.device).T if columns else draft.tokens[:, :0]
    source = draft.source if any(kept) or not any(lengths) else "forced"
    draft = draft._replace(tokens=tokens, lengths=lengths, known=columns, source=source)
    return draft._replace(forced=forced, estimate=estimate)
