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
from hf_specx.common.tree import Parents

from .acceptance import AcceptanceEstimate
from .costs import PRIOR_ALPHA
from .drafter import DraftContext, Drafter
from .forced import apply_masks
from .forward_times import ForwardSize
from .round_timer import RoundTimer


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
        # "auto" goes by the costs of these
        self.timed = self.others if self.model_part is None else [self.model_part]
        self.parts = self.others if self.model_part is None else [*self.others, self.model_part]
        self.has_probs = any(part.has_probs for part in parts)
        self.proposes_trees = any(part.proposes_trees for part in parts)
        self.needs_hidden = any(part.needs_hidden for part in parts)
        self.all_prompt_hidden = any(part.needs_hidden and part.all_prompt_hidden for part in parts)
        self.hidden_state_taps = next((part.hidden_state_taps for part in parts if part.needs_hidden), ())
        limits = [part.max_candidates for part in self.timed if part.max_candidates is not None]
        self.max_candidates = max(limits, default=None)
        self.drafts_blocks = any(part.drafts_blocks for part in self.timed)
        if self.model_part is not None:
            self.model = self.model_part.model
            self.has_other_tokenizer = self.model_part.has_other_tokenizer
            self.tokenizer_match = self.model_part.tokenizer_match

    @property
    def finds_own_number(self) -> bool:
        return any(part.finds_own_number for part in self.timed)

    def check(self, vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        for part in self.parts:
            part.check(vocab_size, tokenizer)

    def start(self, context: DraftContext) -> None:
        for part in self.parts:
            part.start(context)
        self.runner = None if self.model_part is None else self.model_part.runner
        self.num_draft_tokens = context.num_draft_tokens
        self.processors = context.processors
        self.independent_rows = context.independent_rows
        # beside a model, rows with forced tokens would not ask it
        self.adds_forced_tokens = context.allow_forced_tokens and self.model_part is None
        self.round_timer = RoundTimer(None) if self.independent_rows else context.round_timer
        # a row with a seed is the same after any other calls
        alpha = None if self.independent_rows else context.alpha
        self.prior = PRIOR_ALPHA if alpha is None else alpha
        self.estimates = [self._new_estimates(len(context.batch.rows)) for _ in self.parts]  # of each part and row
        self.chosen: list[int] = []  # [R], the number of the part whose candidates each row has in this round

    def _new_estimates(self, rows: int) -> list[AcceptanceEstimate]:
        """Estimates of the acceptance of a part in each row: the same one for all, unless rows are independent."""
        if self.independent_rows:
            return [AcceptanceEstimate(self.prior) for _ in range(rows)]
        return [AcceptanceEstimate(self.prior)] * rows

    def propose(self, batch: Batch, lengths: list[int]) -> Draft:
        """For each row the candidates of the part that is expected to have most accepted.

        Args:
            batch: the text so far.
            lengths: [R], the most candidates of a row by the model, and by the others where a number was asked for.
        """
        drafts = self._drafts_of_others(batch, lengths)
        if len(self.parts) == 1:
            return drafts[0]
        acceptance = []  # that is expected of each other part and row
        for part, draft in enumerate(drafts):
            acceptance.append(draft.prefix_acceptance or self._expected_acceptance(batch, part, draft.lengths))
        num_accepted = [[sum(of_row) for of_row in of_part] for of_part in acceptance]
        self.chosen = [of_row.index(max(of_row)) for of_row in zip(*num_accepted, strict=True)]
        model = len(drafts)  # the number of the model's part
        if self.model_part is None:
            return self._join(batch, drafts, model)._replace(model_free=None)
        of_others = [acceptance[part][index] for index, part in enumerate(self.chosen)]
        asks_model = self._asks_model(batch, of_others, self._expected_acceptance(batch, model, lengths))
        self.chosen = [model if asks else part for part, asks in zip(self.chosen, asks_model, strict=True)]
        if any(asks_model):
            wanted = [length if asks else 0 for length, asks in zip(lengths, asks_model, strict=True)]
            drafts.append(self.model_part.propose(batch, wanted))
        return self._join(batch, drafts, model)

    def _join(self, batch: Batch, drafts: list[Draft], model: int) -> Draft:
        """One draft of those of the parts; their chains of first choices where the call takes no trees."""
        if not batch.max_nodes:
            drafts = [draft.first_choices() for draft in drafts]
        return _joined(batch, drafts, self.chosen, model)

    def _drafts_of_others(self, batch: Batch, lengths: list[int]) -> list[Draft]:
        """What all parts but the model propose: under "auto" as much as has room, since it costs next to nothing."""
        limits = lengths
        if self.model_part is not None and self.num_draft_tokens is None and any(batch.counts):
            limits = []
            for row in batch.rows:
                room = max(0, batch.remaining_tokens(row) - 1) if batch.counts[row] else 0
                limits.append(min(room, self.processors.max_rollback_of(row)))
        drafts = [part.propose(batch, limits) for part in self.others]
        round_timer = None if self.independent_rows else self.round_timer
        return [apply_masks(draft, self.processors, batch, round_timer, self.adds_forced_tokens) for draft in drafts]

    def add_rows(self, batch: Batch, previous_indices: torch.Tensor) -> None:
        for part in self.parts:
            part.add_rows(batch, previous_indices)
        for estimates in self.estimates:
            more = len(batch.counts) - len(estimates)
            estimates += self._new_estimates(more) if self.independent_rows else estimates[:1] * more

    def admit(self, batch: Batch, rows: list[int]) -> None:
        for part in self.parts:
            part.admit(batch, rows)
        if self.independent_rows:
            for estimates in self.estimates:
                for row in rows:
                    estimates[row] = AcceptanceEstimate(self.prior)

    def observe(self, round_: Round) -> None:
        """Learn from the candidates that were taken from each part."""
        for part in set(self.chosen):
            acceptance = round_.unforced_acceptance
            indices = [index for index, chosen in enumerate(self.chosen) if chosen == part and acceptance[index]]
            for group in self._groups(indices):
                estimate = self.estimates[part][round_.rows[group[0]]]
                estimate.update([acceptance[index] for index in group])
        for drafter in self.parts:
            drafter.observe(round_)

    def misread_reason(self, batch: Batch) -> str:
        return " ".join(filter(None, (part.misread_reason(batch) for part in self.parts)))

    def cost(self, batch: Batch) -> Callable[[int], object] | None:
        """That of the model; without one that of the first part that has any."""
        costs = (part.cost(batch) for part in self.timed)
        return next((cost for cost in costs if cost is not None), None)

    def size(self) -> ForwardSize | None:
        sizes = (part.size() for part in self.timed)
        return next((size for size in sizes if size is not None), None)

    def _expected_acceptance(self, batch: Batch, part: int, lengths: list[int]) -> list[list[float]]:
        """For each row the probability that its first i candidates of a part are all accepted, i = 1 to its length."""
        return [self.estimates[part][row].acceptance(length) for row, length in zip(batch.rows, lengths, strict=True)]

    def _groups(self, indices: Sequence[int]) -> list[Sequence[int]]:
        """Rows that are counted, and that choose, together: all of these, or each alone if rows are independent."""
        if self.independent_rows:
            return [[index] for index in indices]
        return [indices] if indices else []

    def _asks_model(self, batch: Batch, of_others: list[list[float]], of_model: list[list[float]]) -> list[bool]:
        """Whether each row takes the model's candidates, [R], by the acceptance expected of these and of others.

        A row asks the model if it expects more of it; but the model is asked by no row of a group if a round without
        it gives more tokens a second. Where no row of a group has candidates of others, the schedule has decided.
        """
        asks = []
        for model_acceptance, other_acceptance in zip(of_model, of_others, strict=True):
            asks.append(not other_acceptance or sum(model_acceptance) > sum(other_acceptance))
        for group in self._groups(range(len(asks))):
            if not any(of_others[index] for index in group):
                continue
            mixed = [of_model[index] if asks[index] else of_others[index] for index in group]
            num_steps = max((len(of_model[index]) for index in group if asks[index]), default=0)
            rate_without_model = self._rate(batch, [of_others[index] for index in group], 0)
            if rate_without_model >= self._rate(batch, mixed, num_steps):
                for index in group:
                    asks[index] = False
        return asks

    def _rate(self, batch: Batch, acceptance: list[list[float]], num_steps: int) -> float:
        """Tokens a second of a round with so many steps of the model, by the acceptance expected of each row."""
        num_rows, longest = len(acceptance), max(map(len, acceptance))
        seconds = self.round_timer.times(num_rows, longest, steps=False)[longest]
        if num_steps:
            with_steps = self.round_timer.times(num_rows, num_steps)[num_steps]
            without_steps = self.round_timer.times(num_rows, num_steps, steps=False)[num_steps]
            seconds += with_steps - without_steps
        if batch.lockstep:
            of_all = map(math.prod, zip(*acceptance, strict=False))  # as far as the row with the fewest goes
            return num_rows * (1.0 + sum(of_all)) / seconds
        return (num_rows + sum(map(sum, acceptance))) / seconds


def has_forwards(part: object) -> bool:
    """Whether a drafter draws candidates by forwards of a model."""
    return getattr(part, "has_probs", False) or getattr(part, "model", None) is not None


def _joined(batch: Batch, drafts: list[Draft], chosen: list[int], model: int) -> Draft:
    """One draft of several: for each row its candidates in the draft that is `chosen` [R] for it.

    Number `model` is the draft of the model, which is missing if no row asked it.
    """
    model_ran = len(drafts) > model
    of_rows = [drafts[part] for part in chosen]  # the draft that each row takes
    lengths = [draft.lengths[index] for index, draft in enumerate(of_rows)]
    longest = max(lengths)
    if not longest:
        return Draft(batch.index.new_zeros(len(lengths), 0), lengths)
    sources = [draft.sources[index] for index, draft in enumerate(of_rows)]
    model_free = []
    for part, length in zip(chosen, lengths, strict=True):
        model_free.append(part != model and (length > 0 or not model_ran))
    if model_ran and not any(model_free):
        return drafts[model]._replace(source=sources)
    padded = [torch.nn.functional.pad(draft.tokens.to(batch.ids), (0, longest))[:, :longest] for draft in drafts]
    parts = to_device_async(chosen, batch.index.device)
    tokens = torch.stack(padded, 1)[torch.arange(len(chosen), device=parts.device), parts]
    joined = Draft(tokens, lengths, None, sources, model_free=model_free)
    if any(draft.forced for draft in of_rows):
        joined = joined._replace(forced=[_forced_flags(draft, index) for index, draft in enumerate(of_rows)])
    if any(draft.parents for draft in of_rows):
        joined = joined._replace(parents=[_parents(draft, index) for index, draft in enumerate(of_rows)])
    probs = drafts[model].probs if model_ran else None
    return joined if probs is None else joined._replace(probs=_joined_probs(joined, probs))


def _forced_flags(draft: Draft, index: int) -> list[bool]:
    """Which candidates of a row, by its row index, are forced; none if the draft does not say."""
    return [False] * draft.lengths[index] if draft.forced is None else draft.forced[index]


def _parents(draft: Draft, index: int) -> Parents:
    """The candidate that each candidate of a row, by its row index, follows."""
    return tuple(range(-1, draft.lengths[index] - 1)) if draft.parents is None else draft.parents[index]


def _joined_probs(joined: Draft, probs: torch.Tensor) -> torch.Tensor:
    """[R, K, V], q of a joined draft: `probs` of the model's rows; candidates of others are certain."""
    chain = joined.first_choices().tokens  # which q is of
    probs = torch.nn.functional.pad(probs, (0, 0, 0, chain.shape[1] - probs.shape[1]))  # cut, if that is negative
    certain = torch.zeros_like(probs).scatter_(-1, chain[..., None], 1)
    is_certain = to_device_async(joined.model_free, probs.device)[:, None, None]
    return torch.where(is_certain, certain, probs)
