"""Forced tokens: where the processors leave one token, it is a candidate that nobody has to draft.

Only what a mask forces is taken, token by token, and never what other tokens could spell. p and q are both 1 there, so
it is kept wherever those before it are.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hf_specx.common.batch import Batch
from hf_specx.common.round import Draft, Round
from hf_specx.sampling.processors import Processors
from hf_specx.sampling.rewindable import choices
from hf_specx.sampling.rules import RejectionRule, Rule

from .drafter import Drafter, Reading
from .pace import Pace
from .prior import ForwardSize


MOST_FORCED = 32  # of a row in a round, since each position takes memory for the whole vocabulary


def stands_apart(rule: Rule) -> bool:
    """Whether what a row proposes must not depend on other rows: with seeds, where it changes what is drawn."""
    return isinstance(rule, RejectionRule) and rule.seeds is not None


class Growth:
    """The candidates of a round while they are found, position by position.

    A row goes on while a draft has a candidate for it, or the next one is forced. If the draft says how sure it is, a
    round ends where too few rows are likely to keep what comes next.

    Args:
        processors: of the call.
        batch: the text; candidates are written after each row's end.
        limits: [R], up to how many positions a draft may find candidates of each row. Those count where it draws for
            any row; where rows stand apart all do, with forced tokens among them.
        forces: whether forced tokens are looked for.
        apart: whether what a row gets must not depend on other rows.
        pace: what steps and positions cost; None where a round must not end because of it.

    Attributes:
        lengths: [R], candidates so far.
        flags: [R], which of these are forced.
        tokens: [R], the forced token that comes next; None where it is not.
        draws: [R], whether the draft has to find what comes next.
        chances: [R], that a row keeps all of its candidates so far; 1 where the draft does not say.
        masked: whether a processor has masks.
        weighed: whether the draft has said how sure it is.
    """

    def __init__(
        self,
        processors: Processors,
        batch: Batch,
        limits: Sequence[int],
        forces: bool,
        apart: bool,
        pace: Pace | None = None,
    ):
        self.processors, self.batch, self.limits, self.apart = processors, batch, list(limits), apart
        self.ahead, self.steps, rows = 0, 0, len(batch.rows)
        self.lengths, self.flags = [0] * rows, [list[bool]() for _ in range(rows)]
        self.tokens: list[int | None] = [None] * rows
        self.draws, self.chances = [False] * rows, [1.0] * rows
        self.masked, self.weighed = False, False
        self.pace, self.step, self.position = pace, 0.0, 0.0  # prices in tokens of plain steps, where there are masks
        # `limits` regard the room of a row; forced tokens come besides, and are not looked for where ranks keep step
        self.room = [batch.room(row) - 1 if forces else sys.maxsize for row in batch.rows]
        # none before the first token, which the prompt's forward gives
        forces = forces and processors.mask_size > 0
        self.asks = [forces and batch.counts[row] > 0 for row in batch.rows] if forces else None

    def next(self) -> bool:
        """Go to the next position; False if no row has a candidate there."""
        rows, fits = range(len(self.lengths)), self.ahead < self.processors.max_rollback
        going = [fits and self.lengths[i] == self.ahead < self.room[i] for i in rows]
        masks, asked = self._masks(going)
        if masks is None:
            self.tokens, self.draws = [None] * len(rows), [going[i] and self.has(i) for i in rows]
        else:
            if self.pace is not None and not self.masked:
                self.step, self.position = self.pace.prices(len(rows))
            counts, self.tokens = choices(masks)
            free = [going[i] and (counts[i] > 1 or not asked[i]) for i in rows]  # 0: no token is left, or it has ended
            self.draws, self.masked = [free[i] and self.has(i, masks[i]) for i in rows], True
        forced = self._likely([token is not None for token in self.tokens]) if self.masked else 0.0
        if self.weighed:
            drawn = self._likely(self.draws)
            if drawn < self.step or drawn + forced < self.step + self.position:
                self.draws = [False] * len(rows)
        if not any(self.draws) and (not forced or forced < self.position):
            return False
        for i in rows:
            if self.draws[i] or self.tokens[i] is not None:
                self.lengths[i] += 1
                self.flags[i].append(not self.draws[i])
        self.ahead, self.steps = self.ahead + 1, self.steps + any(self.draws)
        return True

    def _masks(self, going: list[bool]) -> tuple[list[torch.Tensor | None] | None, list[bool]]:
        """What may come next in rows that go on, None where nothing has masks; and [R], which of them were asked."""
        if self.asks is None:
            return None, going
        pairs = zip(going, self.asks, self.flags, strict=True)
        asked = [goes and asks and sum(flags) < MOST_FORCED for goes, asks, flags in pairs]
        return self.processors.allowed(self.batch, self.ahead, asked) if any(asked) else None, asked

    def _likely(self, rows: Sequence[bool]) -> float:
        """The part of the batch that is likely to get to this position in these rows [R]."""
        return sum(itertools.compress(self.chances, rows)) / len(self.chances)

    def has(self, index: int, mask: torch.Tensor | None = None) -> bool:
        """Whether the draft has a candidate for a row at this position, where `mask` [V] allows several."""
        return (self.ahead if self.apart else self.steps) < self.limits[index]

    def weigh(self, chances: Sequence[float]) -> None:
        """The draft gave its tokens at this position these probabilities [R]: about the chance that each is kept."""
        self.weighed = True
        pairs = zip(self.chances, chances, self.draws, strict=True)
        self.chances = [before * chance if draws else before for before, chance, draws in pairs]

    def only(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [R, V] with the forced tokens alone, in rows that have one."""
        rows = [index for index, token in enumerate(self.tokens) if token is not None]
        if not rows:
            return scores
        scores = scores.clone()
        scores[rows] = -torch.inf
        scores[rows, [token for token in self.tokens if token is not None]] = 0
        return scores

    @property
    def forced(self) -> list[list[bool]] | None:
        """As in `Draft`; None if no candidate is."""
        return self.flags if any(map(any, self.flags)) else None


class Given(Growth):
    """With candidates that were found before: as long as they are allowed, and what is forced is among them.

    Args:
        draft: these candidates.
    """

    def __init__(self, processors: Processors, batch: Batch, draft: Draft, apart: bool, pace: Pace | None):
        super().__init__(processors, batch, draft.lengths, forces=True, apart=apart, pace=pace)
        self.given = draft.tokens.tolist()

    def has(self, index: int, mask: torch.Tensor | None = None) -> bool:
        if self.ahead >= self.limits[index]:
            return False
        return mask is None or bool(mask[self.given[index][self.ahead]])

    def column(self) -> list[int]:
        """[R], the candidates at the position that `next` went to; 0 where there are none."""
        at, found = self.ahead - 1, []
        for index, token in enumerate(self.tokens):
            mine = self.given[index][at] if at < self.limits[index] else None
            if not self.draws[index] and token != mine:
                self.limits[index] = min(self.limits[index], at)  # the others do not follow what stands here
            found.append((mine if self.draws[index] else token) or 0)
        return found


def within_masks(draft: Draft, processors: Processors, batch: Batch) -> Draft:
    """The candidates of each row before the first that a mask excludes; they are written after the rows' ends."""
    batch.put(draft.tokens)
    lengths, going = [0] * len(draft.lengths), [length > 0 for length in draft.lengths]
    while any(going):
        ahead = max(lengths)
        masks = processors.allowed(batch, ahead, going)
        if masks is None:
            return draft
        column = draft.tokens[:, ahead].tolist()
        allowed = [mask is not None and bool(mask[token]) for mask, token in zip(masks, column, strict=True)]
        lengths = [length + one for length, one in zip(lengths, allowed, strict=True)]
        going = [ok and length < most for ok, length, most in zip(allowed, lengths, draft.lengths, strict=True)]
    known = draft.estimate
    cut = None if known is None else [chances[:most] for chances, most in zip(known, lengths, strict=True)]
    return draft._replace(lengths=lengths, tokens=draft.tokens[:, : max(lengths)], estimate=cut)


class ForcedDrafter(Drafter):
    """Another drafter without a distribution, whose candidates are joined by those that are forced.

    Args:
        inner: who else proposes.
    """

    def __init__(self, inner: Drafter):
        self.inner, self.apart = inner, False
        self.model, self.needs_hidden, self.max_candidates = inner.model, inner.needs_hidden, inner.max_candidates
        self.own: Draft | None = None

    def read(self, reading: Reading) -> None:
        """Begin a call."""
        self.processors, self.apart = reading.processors, stands_apart(reading.rule)
        self.pace = None if self.apart else reading.pace
        self.inner.read(reading)

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """What the other drafter proposes, up to `lengths` [R], and any number of forced tokens."""
        draft, self.own = self.inner.propose(batch, lengths), None
        if not self.processors.mask_size:
            return draft
        growth, columns = Given(self.processors, batch, draft, self.apart, self.pace), []
        while growth.next():
            columns.append(growth.column())
            batch.put(batch.index.new_tensor(columns[-1])[:, None], growth.ahead - 1)
        kept = [min(pair) for pair in zip(growth.limits, growth.lengths, strict=True)]
        self.own = draft._replace(lengths=kept)
        if not columns:
            return draft._replace(tokens=draft.tokens[:, :0], lengths=growth.lengths)
        tokens, source = batch.index.new_tensor(columns).T, draft.source if any(kept) else "forced"
        return Draft(tokens, growth.lengths, None, source, growth.forced, free=draft.free)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        self.inner.admit(batch, rows)

    def observe(self, done: Round) -> None:
        """Tell the other drafter what became of its own candidates."""
        own = self.own
        if own is not None:
            accepted = [min(pair) for pair in zip(done.accepted, own.lengths, strict=True)]
            judged = [min(pair) for pair in zip(done.judged, own.lengths, strict=True)]
            survival = [chances[:length] for chances, length in zip(done.survival, own.lengths, strict=True)]
            done = replace(done, draft=own, accepted=accepted, judged=judged, survival=survival)
        self.inner.observe(done)

    def cost(self, batch: Batch) -> Callable[[int], object] | None:
        return self.inner.cost(batch)

    def size(self) -> ForwardSize | None:
        return self.inner.size()
