"""Forced tokens: where the processors leave one token, it is a candidate that nobody has to draft.

Only what a mask forces is taken, token by token, and never what other tokens could spell. p and q are both 1 there, so
it is kept wherever those before it are.
"""

import torch

from hf_specx.common.batch import Batch
from hf_specx.common.devices import to_device_async
from hf_specx.common.round import Draft
from hf_specx.sampling.processors import Processors

from .auto import RoundTimer


MOST_FORCED = 32  # of a row in a round, since each position takes memory for the whole vocabulary


class ForcedRun:
    """The candidates of a round under processors with masks, while they are found position by position.

    A row goes on while a draft has a candidate for it, or the next one is forced: `tokens` [R] has these, None
    elsewhere. `lengths` [R] counts the candidates so far, and `flags` [R] say which of them are forced. A draft that
    has no tokens but the `draftable` ones, [V] bool, has no candidate where a mask excludes all of these.
    """

    def __init__(
        self,
        processors: Processors,
        batch: Batch,
        round_timer: RoundTimer | None,
        draftable: torch.Tensor | None = None,
    ):
        self.processors, self.batch, self.draftable = processors, batch, draftable
        # of a position, in tokens of plain steps
        self.position_cost = 0.0 if round_timer is None else round_timer.position_cost(len(batch.rows))
        self.lengths = [0] * len(batch.rows)
        self.flags = [list[bool]() for _ in batch.rows]
        self.tokens: list[int | None] = []
        self.room = [min(batch.remaining_tokens(row) - 1, processors.max_rollback) for row in batch.rows]

    def next(self, ahead: int, wanted: list[bool], proposed: list[int] | None = None) -> list[bool]:
        """For which rows the draft has to find what comes after `ahead` candidates, [R]; one more each time.

        Args:
            wanted: [R], whether it has anything there, if several tokens are allowed.
            proposed: [R], what that is, if it has found it before: a token that is not allowed does not count.
        """
        going = [length == ahead < room for length, room in zip(self.lengths, self.room, strict=True)]
        asked = []
        for goes, row, flags in zip(going, self.batch.rows, self.flags, strict=True):
            # none is asked for before the first token, which the prompt's forward gives
            asked.append(goes and self.batch.counts[row] > 0 and sum(flags) < MOST_FORCED)
        masks = self.processors.allowed(self.batch, ahead, asked) if any(asked) else None
        self.tokens, draws = [], []
        for index, goes in enumerate(going):
            mask = None if masks is None else masks[index]
            num_allowed = 0 if mask is None else int(mask.count_nonzero())
            self.tokens.append(int(mask.byte().argmax()) if mask is not None and num_allowed == 1 else None)
            ends = masks is not None and asked[index] and num_allowed < 2  # or its next token is forced
            token = None if proposed is None else proposed[index]
            draws.append(goes and wanted[index] and not ends and self._has_candidate(mask, token))
        if not any(draws):
            num_forced = sum(token is not None for token in self.tokens)
            if num_forced < self.position_cost * len(going):
                self.tokens = [None] * len(going)  # too few rows for a longer forward of all
        for index, (draw, token) in enumerate(zip(draws, self.tokens, strict=True)):
            if draw or token is not None:
                self.lengths[index] += 1
                self.flags[index].append(not draw)
        return draws

    def _has_candidate(self, mask: torch.Tensor | None, token: int | None) -> bool:
        """Whether a mask [V] leaves the draft its token, or any token if it has not found one yet."""
        if mask is None:
            return True
        if token is not None:
            return bool(mask[token])
        return self.draftable is None or bool((mask & self.draftable).any())

    @property
    def forces(self) -> bool:
        """Whether the next token of some row is forced."""
        return any(token is not None for token in self.tokens)

    def only(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [R, V] with the forced tokens alone, in rows that have one."""
        if not self.forces:
            return scores
        ids = [-1 if token is None else token for token in self.tokens]
        forced = to_device_async(ids, scores.device)[:, None]  # [R, 1]
        is_forced = torch.arange(scores.shape[1], device=scores.device) == forced  # [R, V]
        return torch.where(forced < 0, scores, torch.where(is_forced, 0.0, -torch.inf))

    @property
    def forced(self) -> list[list[bool]] | None:
        """As in `Draft`; None if no candidate is."""
        return self.flags if any(map(any, self.flags)) else None


def within_masks(
    draft: Draft, processors: Processors, batch: Batch, round_timer: RoundTimer | None, joins: bool
) -> Draft:
    """The candidates of a draft before the first that a mask excludes; if this `joins` them, with forced tokens.

    They are written after the rows' ends. A tree stays as it is.
    """
    if not processors.mask_size or draft.parents is not None:  # a tree has other candidates where one is excluded
        return draft
    batch.write_draft(draft)
    candidates = batch.candidates(draft.tokens.shape[1])
    limits = list(draft.lengths)
    forced_run = ForcedRun(processors, batch, round_timer if joins else None)
    columns = list[list[int]]()
    while joins or max(limits) > len(columns):
        ahead = len(columns)
        wanted = [ahead < limit for limit in limits]
        proposed = [ids[ahead] if is_wanted else 0 for ids, is_wanted in zip(candidates, wanted, strict=True)]
        draws = forced_run.next(ahead, wanted, proposed)
        if not any(draws) and not forced_run.forces:
            break
        column = []
        for index, (token, draw, forced_token) in enumerate(zip(proposed, draws, forced_run.tokens, strict=True)):
            column.append(token if draw else forced_token or 0)
            if not draw and token != forced_token:  # the candidates behind do not follow what stands here
                limits[index] = min(limits[index], ahead)
        columns.append(column)
        batch.write(to_device_async(columns[-1], batch.ids.device)[:, None], ahead, columns[-1:])
    num_drafted = [min(pair) for pair in zip(limits, forced_run.lengths, strict=True)]
    lengths = forced_run.lengths if joins else num_drafted
    estimate = None
    if draft.estimate is not None:
        rows = zip(draft.estimate, num_drafted, lengths, strict=True)
        estimate = [_before_forced(chances, drafted, length) for chances, drafted, length in rows]
    return draft._replace(
        tokens=to_device_async(columns, batch.ids.device).T if columns else draft.tokens[:, :0],
        lengths=lengths,
        source=draft.source if any(num_drafted) or not any(lengths) else "forced",
        forced=forced_run.forced if joins else None,
        estimate=estimate,
        known=columns,
    )


def _before_forced(chances: list[float], drafted: int, length: int) -> list[float]:
    """The chances of the first `drafted` candidates, and of forced ones up to `length`: kept if those before are."""
    last = chances[drafted - 1] if drafted else 1.0
    return chances[:drafted] + [last] * (length - drafted)
