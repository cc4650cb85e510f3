"""Several drafts as one: each row and round takes its candidates from the one with the better expected gain.

Also one draft alone, whose candidates are joined by those that the processors force.
"""

import math
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from hf_specx.common.batch import Batch
from hf_specx.common.devices import to_device_async
from hf_specx.common.round import Draft, Round

from .auto import PRIOR_ALPHA, AcceptanceEstimate, RoundTimer
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
        with_forwards = [part for part in parts if has_forwards(part)]
        self.model_part = with_forwards[0] if with_forwards and len(parts) > 1 else None
        self.others = [part for part in parts if part is not self.model_part]
        self.timed = self.others if self.model_part is None else [self.model_part]  # "auto" goes by the cost of these
        self.parts = self.others if self.model_part is None else [*self.others, self.model_part]
        self.has_probs = any(part.has_probs for part in parts)
        self.needs_hidden = any(part.needs_hidden for part in parts)
        self.hidden_of_all = any(part.needs_hidden and part.hidden_of_all for part in parts)
        self.hidden_state_taps = next((part.hidden_state_taps for part in parts if part.needs_hidden), ())
        most = [part.max_candidates for part in self.timed if part.max_candidates is not None]
        self.max_candidates = max(most, default=None)
        if self.model_part is not None:
            self.model = self.model_part.model
            self.own_text = self.model_part.own_text
            self.matching = self.model_part.matching

    def check(self, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        for part in self.parts:
            part.check(vocab_size, tokenizer)

    def start(self, context: DraftContext) -> None:
        for part in self.parts:
            part.start(context)
        self.runner = None if self.model_part is None else self.model_part.runner
        self.number = context.number
        self.processors = context.processors
        self.independent_rows = context.independent_rows
        self.joins = context.forces and self.model_part is None  # else rows with forced tokens would not ask the model
        self.round_timer = RoundTimer(None) if self.independent_rows else context.round_timer
        # a row with a seed is the same after any other calls
        alpha = None if self.independent_rows else context.alpha
        self.prior = PRIOR_ALPHA if alpha is None else alpha
        self.acceptance = [self._estimates(len(context.batch.rows)) for _ in self.parts]  # of each part and row
        self.taken: list[int] = []  # [R], the number of the part that each row took in the last round

    def _estimates(self, rows: int) -> list[AcceptanceEstimate]:
        """The acceptance of a part in each row: one estimate for all of them, unless rows are independent."""
        if self.independent_rows:
            return [AcceptanceEstimate(self.prior) for _ in range(rows)]
        return [AcceptanceEstimate(self.prior)] * rows

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """Candidates of one part for each row: of the model up to `lengths`, of others too if a number was given."""
        drafts = self._drafts_of_others(batch, lengths)
        if len(self.parts) == 1:
            return drafts[0]
        estimates = [draft.estimate or self._expected(batch, part, draft.lengths) for part, draft in enumerate(drafts)]
        gains = [[sum(chances) for chances in of_rows] for of_rows in estimates]
        self.taken = [of_row.index(max(of_row)) for of_row in zip(*gains, strict=True)]
        model = len(drafts)  # the number of the model's part
        if self.model_part is None:
            return _joined(batch, drafts, self.taken, model)._replace(free=None)
        offered = [estimates[part][row] for row, part in enumerate(self.taken)]
        asks = self._asks_model(batch, offered, self._expected(batch, model, lengths))
        self.taken = [model if asks_model else part for part, asks_model in zip(self.taken, asks, strict=True)]
        if any(asks):
            wanted = [length if asks_model else 0 for length, asks_model in zip(lengths, asks, strict=True)]
            drafts.append(self.model_part.propose(batch, wanted))
        return _joined(batch, drafts, self.taken, model)

    def _drafts_of_others(self, batch: Batch, lengths: list[int]) -> list[Draft]:
        """What all parts but the model propose: under "auto" as much as has room, since it costs next to nothing."""
        limits = lengths
        if self.model_part is not None and self.number is None and any(batch.counts):
            limits = []
            for row in batch.rows:
                room = max(0, batch.remaining_tokens(row) - 1) if batch.counts[row] else 0
                limits.append(min(room, self.processors.max_rollback))
        drafts = [part.propose(batch, limits) for part in self.others]
        round_timer = None if self.independent_rows else self.round_timer
        return [within_masks(draft, self.processors, batch, round_timer, self.joins) for draft in drafts]

    def seat_rows(self, batch: Batch, before: torch.Tensor) -> None:
        for part in self.parts:
            part.seat_rows(batch, before)
        for estimates in self.acceptance:
            more = len(batch.counts) - len(estimates)
            estimates += self._estimates(more) if self.independent_rows else estimates[:1] * more

    def admit(self, batch: Batch, rows: list[int]) -> None:
        for part in self.parts:
            part.admit(batch, rows)
        if self.independent_rows:
            for acceptance in self.acceptance:
                for row in rows:
                    acceptance[row] = AcceptanceEstimate(self.prior)

    def observe(self, done: Round) -> None:
        """Learn from the candidates that were taken from each part."""
        for part in set(self.taken):
            judged = [row for row, taken in enumerate(self.taken) if taken == part and done.acceptance[row]]
            for rows in self._groups(judged):
                self.acceptance[part][done.rows[rows[0]]].update([done.acceptance[row] for row in rows])
        for drafter in self.parts:
            drafter.observe(done)

    def misread_reason(self, batch: Batch) -> str:
        return " ".join(filter(None, (part.misread_reason(batch) for part in self.parts)))

    def cost(self, batch: Batch) -> Callable[[int], object] | None:
        """That of the model; without one that of the first part that has any."""
        costs = (part.cost(batch) for part in self.timed)
        return next((cost for cost in costs if cost is not None), None)

    def size(self) -> ForwardSize | None:
        sizes = (part.size() for part in self.timed)
        return next((size for size in sizes if size is not None), None)

    def _expected(self, batch: Batch, part: int, lengths: list[int]) -> list[list[float]]:
        """For each row the chance that its first i candidates of a part are all kept, by what was kept so far."""
        return [self.acceptance[part][row].chances(most) for row, most in zip(batch.rows, lengths, strict=True)]

    def _groups(self, rows: Sequence[int]) -> list[Sequence[int]]:
        """Rows that are counted, and that choose, together."""
        if self.independent_rows:
            return [[row] for row in rows]
        return [rows] if rows else []

    def _asks_model(self, batch: Batch, offered: list[list[float]], of_model: list[list[float]]) -> list[bool]:
        """Whether each row takes the model's candidates, [R], by the chances of these and of what others offer."""
        asks = []
        for model_chances, other_chances in zip(of_model, offered, strict=True):
            asks.append(not other_chances or sum(model_chances) > sum(other_chances))
        for rows in self._groups(range(len(asks))):
            if not any(offered[row] for row in rows):
                continue  # then the schedule has decided
            mixed = [of_model[row] if asks[row] else offered[row] for row in rows]
            steps = max((len(of_model[row]) for row in rows if asks[row]), default=0)
            without = self._rate(batch, [offered[row] for row in rows], 0)
            if without >= self._rate(batch, mixed, steps):
                for row in rows:
                    asks[row] = False
        return asks

    def _rate(self, batch: Batch, chances: list[list[float]], steps: int) -> float:
        """Tokens a second of a round with so many steps of the model, by the chances of each row's candidates."""
        width = max(map(len, chances))
        seconds = self.round_timer.times(len(chances), width, steps=False)[width]
        if steps:
            with_steps = self.round_timer.times(len(chances), steps)[steps]
            without_steps = self.round_timer.times(len(chances), steps, steps=False)[steps]
            seconds += with_steps - without_steps
        if batch.lockstep:
            of_all = map(math.prod, zip(*chances, strict=False))  # as far as the row with the fewest goes
            return len(chances) * (1.0 + sum(of_all)) / seconds
        return (len(chances) + sum(map(sum, chances))) / seconds


def has_forwards(part: object) -> bool:
    """Whether a drafter draws candidates by forwards of a model."""
    return getattr(part, "has_probs", False) or getattr(part, "model", None) is not None


def _joined(batch: Batch, drafts: list[Draft], taken: list[int], model: int) -> Draft:
    """For each row its candidates in the draft that it takes; number `model` is the model's, if it made one."""
    model_ran = len(drafts) > model
    lengths = [drafts[part].lengths[row] for row, part in enumerate(taken)]
    longest = max(lengths)
    if not longest:
        return Draft(batch.index.new_zeros(len(lengths), 0), lengths)
    sources = [drafts[part].sources[row] for row, part in enumerate(taken)]
    free = [part != model and (length > 0 or not model_ran) for part, length in zip(taken, lengths, strict=True)]
    if model_ran and not any(free):
        return drafts[model]._replace(source=sources)
    of_parts = [torch.nn.functional.pad(draft.tokens.to(batch.ids), (0, longest))[:, :longest] for draft in drafts]
    parts = to_device_async(taken, batch.index.device)
    tokens = torch.stack(of_parts, 1)[torch.arange(len(taken), device=parts.device), parts]
    probs = drafts[model].probs if model_ran else None
    if probs is not None:
        probs = torch.nn.functional.pad(probs, (0, 0, 0, longest - probs.shape[1]))  # cut, if that is negative
        certain = torch.zeros_like(probs).scatter_(-1, tokens[..., None], 1)
        probs = torch.where(to_device_async(free, probs.device)[:, None, None], certain, probs)
    forced = None
    if any(drafts[part].forced for part in taken):
        forced = []
        for row, part in enumerate(taken):
            flags = drafts[part].forced
            forced.append([False] * lengths[row] if flags is None else flags[row])
    return Draft(tokens, lengths, probs, sources, forced, free=free)
