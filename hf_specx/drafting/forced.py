"""Forced tokens: where the processors leave one token, it is a candidate that nobody has to draft.

Only what a mask forces is taken, token by token, and never what other tokens could spell. p and q are both 1 there, so
such a candidate is accepted wherever those before it are.
"""

import torch

from hf_specx.common.batch import Batch
from hf_specx.common.devices import to_device_async
from hf_specx.common.round import Draft
from hf_specx.sampling.processors import Processors

from .round_timer import RoundTimer


MAX_FORCED = 32  # of a row in a round, since each position takes memory for the whole vocabulary


class ForcedRun:
    """The candidates of a round under processors with masks, while they are found position by position.

    A row goes on while the draft has a candidate for it, or its next token is forced.

    Args:
        processors: of the call; some have masks.
        batch: the text so far.
        round_timer: what one more position costs; None counts it as free.
        draftable: [V] bool, the tokens that the draft has; None is all.

    Attributes:
        forced_tokens: [R], the forced tokens at the last position, None elsewhere.
        lengths: [R], candidates of each row so far, forced ones among them.
        flags: [R], for each candidate of a row whether it is forced.
    """

    def __init__(
        self,
        processors: Processors,
        batch: Batch,
        round_timer: RoundTimer | None,
        draftable: torch.Tensor | None = None,
    ):
        self.processors = processors
        self.batch = batch
        self.draftable = draftable
        # of a position, in tokens of plain steps
        self.position_cost = 0.0 if round_timer is None else round_timer.position_cost(len(batch.rows))
        self.position = 0
        self.forced_tokens: list[int | None] = []
        self.lengths = [0] * len(batch.rows)
        self.flags = [list[bool]() for _ in batch.rows]
        self.max_lengths = [
            min(batch.remaining_tokens(row) - 1, processors.max_rollback_of(row)) for row in batch.rows
        ]

    def next_position(self, wanted: list[bool], proposed: list[int] | None = None) -> list[bool]:
        """Find the forced tokens at the next position; returns which rows take the draft's candidate there, [R].

        Args:
            wanted: [R], rows that the draft has a candidate for there, if several tokens are allowed.
            proposed: [R], the ids of these candidates, of which one that a mask excludes is not taken; None if they
                are drawn later.
        """
        continues = []
        for length, max_length in zip(self.lengths, self.max_lengths, strict=True):
            continues.append(length == self.position < max_length)
        is_masked, masks = self._masks(continues)
        self.forced_tokens = []
        takes_candidate = []
        for index, mask in enumerate(masks):
            num_allowed = 0 if mask is None else int(mask.count_nonzero())
            self.forced_tokens.append(int(mask.byte().argmax()) if mask is not None and num_allowed == 1 else None)
            may_choose = num_allowed > 1 or not is_masked[index]
            candidate = None if proposed is None else proposed[index]
            has_candidate = wanted[index] and may_choose and self._allows(mask, candidate)
            takes_candidate.append(continues[index] and has_candidate)
        if not any(takes_candidate) and not self._forced_tokens_pay():
            self.forced_tokens = [None] * len(continues)
        self._count(takes_candidate)
        return takes_candidate

    def _forced_tokens_pay(self) -> bool:
        """Whether enough rows have a forced token for a longer forward of all rows."""
        num_forced = sum(token is not None for token in self.forced_tokens)
        return num_forced >= self.position_cost * len(self.forced_tokens)

    def _count(self, takes_candidate: list[bool]) -> None:
        """Count what rows have at this position, a candidate of the draft or a forced token, and go to the next."""
        for index, (takes, token) in enumerate(zip(takes_candidate, self.forced_tokens, strict=True)):
            if takes or token is not None:
                self.lengths[index] += 1
                self.flags[index].append(not takes)
        self.position += 1

    def _masks(self, continues: list[bool]) -> tuple[list[bool], list[torch.Tensor | None]]:
        """For which rows [R] masks decide about the next token, and these masks, [V] bool.

        A mask is None where an earlier candidate is excluded or ends the row.
        """
        is_masked = []
        for row, goes_on, flags in zip(self.batch.rows, continues, self.flags, strict=True):
            # none before the first token, which the prompt's forward gives
            is_masked.append(goes_on and self.batch.counts[row] > 0 and sum(flags) < MAX_FORCED)
        masks = self.processors.allowed(self.batch, self.position, is_masked) if any(is_masked) else None
        if masks is None:
            return [False] * len(continues), [None] * len(continues)
        return is_masked, masks

    def _allows(self, mask: torch.Tensor | None, candidate: int | None) -> bool:
        """Whether a mask [V] leaves the draft its candidate, or any token if it has not found one yet."""
        if mask is None:
            return True
        if candidate is not None:
            return bool(mask[candidate])
        return self.draftable is None or bool((mask & self.draftable).any())

    @property
    def has_forced_tokens(self) -> bool:
        """Whether some row has a forced token at the last position."""
        return any(token is not None for token in self.forced_tokens)

    def restrict(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [R, V] of the last position; where a token is forced, with all others at -inf."""
        if not self.has_forced_tokens:
            return scores
        ids = [-1 if token is None else token for token in self.forced_tokens]
        forced = to_device_async(ids, scores.device)[:, None]  # [R, 1]
        is_forced = torch.arange(scores.shape[1], device=scores.device) == forced  # [R, V]
        return torch.where(forced < 0, scores, torch.where(is_forced, 0.0, -torch.inf))

    @property
    def forced(self) -> list[list[bool]] | None:
        """`flags` as in `Draft`; None if no candidate is forced."""
        return self.flags if any(map(any, self.flags)) else None


def apply_masks(
    draft: Draft, processors: Processors, batch: Batch, round_timer: RoundTimer | None, add_forced_tokens: bool
) -> Draft:
    """The candidates of a draft up to the first that a mask excludes, and forced tokens where these are added.

    They are written after the rows' ends. A tree stays as it is.
    """
    if not processors.mask_size or draft.parents is not None:  # a tree has other candidates where one is excluded
        return draft
    batch.write_draft(draft)
    candidates = batch.candidates(draft.tokens.shape[1])
    num_usable = list(draft.lengths)  # of each row, candidates of the draft that follow what stands before them
    forced_run = ForcedRun(processors, batch, round_timer if add_forced_tokens else None)
    columns = list[list[int]]()
    while add_forced_tokens or max(num_usable) > len(columns):
        position = len(columns)
        wanted = [position < number for number in num_usable]
        proposed = [ids[position] if is_wanted else 0 for ids, is_wanted in zip(candidates, wanted, strict=True)]
        takes_candidate = forced_run.next_position(wanted, proposed)
        if not any(takes_candidate) and not forced_run.has_forced_tokens:
            break
        column = []
        for index, takes in enumerate(takes_candidate):
            forced_token = forced_run.forced_tokens[index]
            column.append(proposed[index] if takes else forced_token or 0)
            if not takes and proposed[index] != forced_token:  # what the draft has behind it follows another token
                num_usable[index] = min(num_usable[index], position)
        columns.append(column)
        batch.write(to_device_async(column, batch.ids.device)[:, None], position, [column])
    num_drafted = [min(pair) for pair in zip(num_usable, forced_run.lengths, strict=True)]
    lengths = forced_run.lengths if add_forced_tokens else num_drafted
    acceptance = None
    if draft.prefix_acceptance is not None:
        rows = zip(draft.prefix_acceptance, num_drafted, lengths, strict=True)
        acceptance = [_with_forced(of_row, number, length) for of_row, number, length in rows]
    return draft._replace(
        tokens=to_device_async(columns, batch.ids.device).T if columns else draft.tokens[:, :0],
        lengths=lengths,
        source=draft.source if any(num_drafted) or not any(lengths) else "forced",
        forced=forced_run.forced if add_forced_tokens else None,
        prefix_acceptance=acceptance,
        host_tokens=columns,
    )


def _with_forced(acceptance: list[float], num_drafted: int, length: int) -> list[float]:
    """That of a row's drafted candidates, and of forced ones up to `length`: kept if those before are."""
    last = acceptance[num_drafted - 1] if num_drafted else 1.0
    return acceptance[:num_drafted] + [last] * (length - num_drafted)
