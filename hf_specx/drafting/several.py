"""Several drafts as one: each row and round takes its candidates from the one with the better expected gain.

Also one draft alone, whose candidates are joined by those that the processors force.
"""

import math
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from hf_specx.common.batch import Batch
from hf_specx.common.devices import sent
from hf_specx.common.round import Draft, Round

from .costs import RoundTimer
from .draft_length import PRIOR_ALPHA, AcceptanceEstimate
from .drafter import DraftContext, Drafter
from .forced import within_masks
from .forward_times import ForwardSize


class SeveralDrafts(Drafter):
    """Drafts of which at most one runs forwards, the "model" below; the others propose at next to no cost.

    The others propose for each row first. What the best of them can hope for is compared with what the model can, in
    tokens a second of the whole round. If no row takes the model, it runs no forward, and is fed later what it has
    missed. The choice depends on the text, on what was kept so far, and on times known before the call, never on
    random numbers of candidates that are still to be judged; so every verification is exact, as for any one draft.
    With `seeds` under "token" or "block" each row chooses for itself.

    Args:
        parts: drafters, at most one of which `has_forwards`. Of equals the first is taken.
    """

    def __init__(self, parts: Sequence[Drafter]):
        alone = len(parts) == 1
        self.costly = None if alone else next((part for part in parts if has_forwards(part)), None)
        self.others = [part for part in parts if part is not self.costly]
        self.timed = self.others if self.costly is None else [self.costly]  # "auto" goes by the cost of these
        self.parts = self.others if self.costly is None else [*self.others, self.costly]
        self.has_probs = any(part.has_probs for part in parts)
        self.needs_hidden = any(part.needs_hidden for part in parts)
        self.hidden_of_all = any(part.needs_hidden and part.hidden_of_all for part in parts)
        self.hidden_state_taps = next((part.hidden_state_taps for part in parts if part.needs_hidden), ())
        known = [part.max_candidates for part in self.timed if part.max_candidates is not None]
        self.max_candidates = max(known, default=None)
        if self.costly is not None:
            self.model, self.own_text, self.matching = self.costly.model, self.costly.own_text, self.costly.matching

    def check(self, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        for part in self.parts:
            part.check(vocab_size, tokenizer)

    def start(self, context: DraftContext) -> None:
        for part in self.parts:
            part.start(context)
        self.runner = None if self.costly is None else self.costly.runner
        self.number, self.processors, self.apart = context.number, context.processors, context.apart
        self.joins = context.forces and self.costly is None  # else rows with forced tokens would not ask the model
        self.round_timer = RoundTimer(None) if self.apart else context.round_timer
        alpha = None if self.apart else context.alpha  # a row with a seed is the same after any other calls
        rows = len(context.batch.rows)
        self.prior = prior = PRIOR_ALPHA if alpha is None else alpha
        own = [[AcceptanceEstimate(prior) for _ in range(rows if self.apart else 1)] for _ in self.parts]
        self.acceptance = [found if self.apart else found * rows for found in own]  # of each part and row
        self.taken: list[int] = []  # [R], the number of the part that each row took in the last round

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Candidates of one part for each row: of the model up to `lengths`, of others too if a number was given."""
        limits, most = lengths, self.processors.max_rollback
        if self.costly is not None and self.number is None and any(batch.counts):
            limits = [min(most, max(0, batch.room(row) - 1)) if batch.counts[row] else 0 for row in batch.rows]
        drafts = [part.propose(batch, limits) for part in self.others]
        round_timer = None if self.apart else self.round_timer
        drafts = [within_masks(draft, self.processors, batch, round_timer, self.joins) for draft in drafts]
        if len(self.parts) == 1:
            return drafts[0]
        found = [draft.estimate or self._expected(batch, part, draft.lengths) for part, draft in enumerate(drafts)]
        hopes = [[sum(chances) for chances in of_rows] for of_rows in found]
        self.taken = [gains.index(max(gains)) for gains in zip(*hopes, strict=True)]
        if self.costly is None:
            return _joined(batch, drafts, self.taken, len(drafts))._replace(free=None)
        model, offered = len(drafts), [found[number][row] for row, number in enumerate(self.taken)]
        asked = self._asks_model(batch, offered, self._expected(batch, model, lengths))
        self.taken = [model if is_asked else number for number, is_asked in zip(self.taken, asked, strict=True)]
        if any(asked):
            wanted = [length if is_asked else 0 for length, is_asked in zip(lengths, asked, strict=True)]
            drafts.append(self.costly.propose(batch, wanted))
        return _joined(batch, drafts, self.taken, model)

    def admit(self, batch: Batch, rows: list[int]) -> None:
        for part in self.parts:
            part.admit(batch, rows)
        if self.apart:
            for acceptance in self.acceptance:
                for row in rows:
                    acceptance[row] = AcceptanceEstimate(self.prior)

    def observe(self, done: Round) -> None:
        """Learn from the candidates that were taken from each part."""
        for number in set(self.taken):
            seen = [row for row, taken in enumerate(self.taken) if taken == number and done.acceptance[row]]
            for rows in self._groups(seen):
                self.acceptance[number][done.rows[rows[0]]].update([done.acceptance[row] for row in rows])
        for part in self.parts:
            part.observe(done)

    def misread_reason(self, batch: Batch) -> str:
        return " ".join(filter(None, (part.misread_reason(batch) for part in self.parts)))

    def cost(self, batch: Batch) -> Callable[[int], object] | None:
        """That of the model; without one that of the first part that has any."""
        return next((cost for part in self.timed if (cost := part.cost(batch)) is not None), None)

    def size(self) -> ForwardSize | None:
        return next((size for part in self.timed if (size := part.size()) is not None), None)

    def _expected(self, batch: Batch, part: int, lengths: list[int]) -> list[list[float]]:
        """For each row the chance that its first i candidates of a part are all kept, by what was kept so far."""
        return [self.acceptance[part][row].chances(most) for row, most in zip(batch.rows, lengths, strict=True)]

    def _groups(self, rows: Sequence[int]) -> list[Sequence[int]]:
        """Rows that are counted, and that choose, together."""
        return [[row] for row in rows] if self.apart else [rows] if rows else []

    def _asks_model(self, batch: Batch, offered: list[list[float]], hoped: list[list[float]]) -> list[bool]:
        """[R], whether each row takes the model's candidates, by the chances that it and the best other one offer."""
        asked = [not other or sum(own) > sum(other) for own, other in zip(hoped, offered, strict=True)]
        for rows in self._groups(range(len(asked))):
            if not any(offered[row] for row in rows):
                continue  # then the schedule has decided
            mixed = [hoped[row] if asked[row] else offered[row] for row in rows]
            steps = max((len(hoped[row]) for row in rows if asked[row]), default=0)
            without = self._rate(batch, [offered[row] for row in rows], 0)
            if without >= self._rate(batch, mixed, steps):
                for row in rows:
                    asked[row] = False
        return asked

    def _rate(self, batch: Batch, chances: list[list[float]], steps: int) -> float:
        """Tokens a second of a round with so many steps of the model, by the chances of each row's candidates."""
        width = max(map(len, chances))
        seconds = self.round_timer.times(len(chances), width, steps=False)[width]
        if steps:
            with_steps, without = (self.round_timer.times(len(chances), steps, kind)[steps] for kind in (True, False))
            seconds += with_steps - without
        if batch.lockstep:
            together = map(math.prod, zip(*chances, strict=False))  # as far as the row with the fewest goes
            return len(chances) * (1.0 + sum(together)) / seconds
        return (len(chances) + sum(map(sum, chances))) / seconds


def has_forwards(part: object) -> bool:
    """Whether a drafter draws candidates by forwards of a model."""
    return getattr(part, "has_probs", False) or getattr(part, "model", None) is not None


def _joined(batch: Batch, drafts: list[Draft], taken: list[int], model: int) -> Draft:
    """For each row its candidates in the draft that it takes; number `model` is the model's, if it made one."""
    ran = len(drafts) > model
    lengths = [drafts[number].lengths[row] for row, number in enumerate(taken)]
    most, sources = max(lengths), [drafts[number].sources[row] for row, number in enumerate(taken)]
    if not most:
        return Draft(batch.index.new_zeros(len(lengths), 0), lengths)
    every = [torch.nn.functional.pad(draft.tokens.to(batch.ids), (0, most))[:, :most] for draft in drafts]
    chosen = sent(taken, batch.index.device)
    tokens = torch.stack(every, 1)[torch.arange(len(taken), device=chosen.device), chosen]
    free = [number != model and (length > 0 or not ran) for number, length in zip(taken, lengths, strict=True)]
    if ran and not any(free):
        return drafts[model]._replace(source=sources)
    probs = drafts[model].probs if ran else None
    if probs is not None:
        probs = torch.nn.functional.pad(probs, (0, 0, 0, most - probs.shape[1]))  # cut, if that is negative
        certain = torch.zeros_like(probs).scatter_(-1, tokens[..., None], 1)
        probs = torch.where(sent(free, probs.device)[:, None, None], certain, probs)
    flags = [drafts[number].forced for number in taken]
    forced = [known[row] if known is not None else [False] * lengths[row] for row, known in enumerate(flags)]
    return Draft(tokens, lengths, probs, sources, forced if any(flags) else None, free=free)
