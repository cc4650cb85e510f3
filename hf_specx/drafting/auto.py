"""`num_draft_tokens="auto"`: how many candidates give the most tokens a second, down to none.

Before each round `AutoDraftLength` chooses the number γ of candidates with the largest

    1 + S_1 + ... + S_γ                            expected tokens of a row, the one after the candidates among them
    ---------------------------------------
    overhead * (T_t(B, γ+1) + γ T_d(B, 1))         seconds of the round, which has B rows; a head that drafts a block
                                                   finds all candidates in one step, so there T_d counts once

- The choice: `best_num_candidates` computes the fraction for each γ.
- Acceptance: S_i is the probability that the first i candidates are all accepted, by `AcceptanceEstimate`
  (`acceptance.py`). If each is accepted with the same probability α, the numerator is Equation 1 of Leviathan et al.
  2022, and the fraction their Theorem 3.8, without its assumption that a forward of γ+1 tokens takes as long as one of
  a token.
- Time: T_t and T_d are seconds of bare forwards of target and draft, and the overhead is how much longer whole rounds
  were seen to take. `Costs` (`costs.py`) remembers both from call to call; a call reads them by its `RoundTimer`
  (`round_timer.py`).
- The retry: with γ = 0, plain decoding, nothing is learned of the draft. So `AutoDraftLength` sets a small part of the
  time of plain steps aside, its budget for trials, and tries the draft again once that pays for what a trial may lose.
"""

from collections.abc import Sequence
from typing import Any

from hf_specx.common.batch import Batch
from hf_specx.common.drafts import FIXED_DRAFT_TOKENS
from hf_specx.common.round import Round

from .acceptance import AcceptanceEstimate
from .costs import MAX_DRAFT_TOKENS, PRIOR_ALPHA
from .round_timer import RoundTimer
from .schedule import DraftLengthSchedule


COMPILED_NUMBERS = (1, 2, 4, 7, 12, 20)  # considered where forwards are compiled: few; the best loses 2 % at most
TRIAL_SHARE = 0.01  # part of the time of plain steps that trials of a draft may lose
TRIAL_ROUNDS = 5  # rounds of a trial; one of them may take the time to read what the draft has missed


def best_num_candidates(
    acceptance: Sequence[float], seconds: Sequence[float], among: Sequence[int] | None = None
) -> tuple[int, float]:
    """The number of candidates with the most expected tokens a second, and its speed-up over plain steps.

    Args:
        acceptance: [K], S_1 to S_K.
        seconds: [K + 1], of rounds with 0 to K candidates.
        among: the numbers that are considered; None is all.
    """
    tokens = 1.0
    rates = [1 / seconds[0]]
    for accepted, round_seconds in zip(acceptance, seconds[1:], strict=True):
        tokens += accepted
        rates.append(tokens / round_seconds)
    best = max(among or range(len(rates)), key=rates.__getitem__)
    return best, rates[best] / rates[0]


class AutoDraftLength(DraftLengthSchedule):
    """ "auto" for one call: in each round the number of candidates with the most tokens a second, which may be 0.

    The longest draft of the batch decides what a forward costs, so all rows get the same number. A draft is asked

    - on trial, for `TRIAL_ROUNDS`: at first if nothing is known of it, and again whenever the budget pays for a trial;
    - if it pays, once plain steps were timed, so that the two can be compared.

    Else steps are plain; each adds `TRIAL_SHARE` of its time to the budget. All costs are in plain steps.

    Attributes:
        num_draft_tokens: the number for the next round.
        trial_rounds_left: rounds for which the draft is still on trial.
        trial_budget: what trials may lose.
        num_unread: the most tokens of a row that the draft has not read.
        max_candidates: the largest number that is considered.
        seconds: of rounds with 0 to `max_candidates` candidates.
        best, speedup: the best number from 1 on, and its speed over that of plain steps.
    """

    round_timer: RoundTimer

    def __init__(
        self,
        round_timer: RoundTimer,
        verification: str,
        batch: Batch,
        compiled: bool = False,
        max_candidates: int | None = None,
        **options: Any,
    ):
        """`max_candidates` is how many the draft can find in a round; None is `MAX_DRAFT_TOKENS`."""
        super().__init__(0, round_timer, **options)
        assert round_timer.costs is not None
        self.costs = round_timer.costs
        self.max_candidates = max_candidates or MAX_DRAFT_TOKENS
        self.independent_length = max_candidates or FIXED_DRAFT_TOKENS  # of seeded rows under rejection, as alone
        fewer = COMPILED_NUMBERS if compiled else range(1, self.max_candidates)
        self.considered = [*(number for number in fewer if number < self.max_candidates), self.max_candidates]
        self.num_rows = len(batch.rows)
        self.max_new_tokens = max(row_state.limit for row_state in batch.row_states)
        self.num_unread = max(row_state.prompt_length for row_state in batch.row_states)
        earlier_alpha = self.costs.alpha.get(verification)
        alpha = PRIOR_ALPHA if earlier_alpha is None else earlier_alpha
        if batch.lockstep:
            alpha = alpha**self.num_rows  # that all rows accept
        self.estimate = AcceptanceEstimate(alpha, together=batch.lockstep)
        self.trial_rounds_left = TRIAL_ROUNDS if earlier_alpha is None else 0
        self.trial_budget = self.costs.trial_budget
        self._prepare_round()

    def is_idle(self) -> bool:
        """Whether a call that begins will probably end before its draft is used or tried."""
        if self.num_draft_tokens or self.trial_rounds_left or not self.round_timer.has_seen_plain(self.num_rows):
            return False
        return not self._pays_for_trial(self.trial_budget + TRIAL_SHARE * self.max_new_tokens)

    def wanted_length(self, batch: Batch, row: int) -> int:
        return self.independent_length if batch.row_states[row].independent_lengths else self.num_draft_tokens

    def observe(self, round_: Round) -> None:
        super().observe(round_)
        self.num_rows = len(round_.rows) if round_.keep_indices is None else len(round_.keep_indices)
        if not any(round_.emitted_before):
            return  # the first step, with the prompts
        if round_.draft.steps:
            self.num_unread = 0
        else:
            self.num_unread += max(round_.num_new_tokens)
            self.trial_budget += TRIAL_SHARE
        self.trial_rounds_left = max(0, self.trial_rounds_left - 1)
        acceptance = _acceptance_of_draft(round_)
        if acceptance:
            self.estimate.update(acceptance)
        self._prepare_round()

    def _prepare_round(self) -> None:
        """Choose the number for the next round, which may begin a trial."""
        acceptance = self.estimate.acceptance(self.max_candidates)
        self.seconds = self.round_timer.times(self.num_rows, self.max_candidates)
        self.best, self.speedup = best_num_candidates(acceptance, self.seconds, self.considered)
        if self._is_on_trial():
            asks_draft = True
        elif self._pays():
            asks_draft = self.round_timer.has_seen_plain(self.num_rows)
        else:
            asks_draft = self._pays_for_trial(self.trial_budget)
            if asks_draft:
                self._begin_trial()
        self.num_draft_tokens = self.best if asks_draft else 0

    def _begin_trial(self) -> None:
        """Take a trial from the budget."""
        self.trial_budget -= self._trial_cost() + self._prefill_cost()
        self.trial_rounds_left = TRIAL_ROUNDS

    def _is_on_trial(self) -> bool:
        """Whether a trial goes on; not where even a good draft would hardly save the time that it takes to read."""
        return self.trial_rounds_left > 0 and self._prefill_cost() <= self.max_new_tokens / 2

    def _pays(self) -> bool:
        """Whether the draft saves more, in the longest text that may come, than it takes to read what is missing."""
        if self.speedup <= 1:
            return False
        return self.max_new_tokens * (1 - 1 / self.speedup) > self._prefill_cost()

    def _pays_for_trial(self, budget: float) -> bool:
        """Whether a budget covers what a trial is expected to lose."""
        left = budget - self._trial_cost()
        return left >= 0 and left >= self._prefill_cost()

    def _trial_cost(self) -> float:
        """What the rounds of a trial are expected to lose by what was accepted so far."""
        lost_share = max(0.0, 1 - self.speedup)
        return TRIAL_ROUNDS * lost_share * self.seconds[self.best] / self.seconds[0]

    def _prefill_cost(self) -> float:
        """What the draft takes to read what it has not read."""
        return self.round_timer.prefill_seconds(self.num_rows, self.num_unread) / self.seconds[0]

    def admit(self, batch: Batch, rows: list[int]) -> None:
        super().admit(batch, rows)
        self.num_rows = len(batch.rows)
        self.max_new_tokens = max(batch.row_states[row].limit for row in batch.rows)
        self.num_unread = max(self.num_unread, *(batch.row_states[row].prompt_length for row in rows))

    def end(self) -> None:
        super().end()
        self.costs.trial_budget = self.trial_budget


def _acceptance_of_draft(round_: Round) -> list[list[float]]:
    """`Round.draft_acceptance` of the rows that tell how good the draft is, [R'].

    Others have no candidates, have candidates from elsewhere, took their first step, or were finished before.
    """
    model_free = round_.draft.model_free or [False] * len(round_.rows)
    acceptance = []
    for index, of_row in enumerate(round_.draft_acceptance):
        goes_on = round_.emitted_before[index] and round_.num_new_tokens[index]
        if of_row and goes_on and not model_free[index]:
            acceptance.append(of_row)
    return acceptance
