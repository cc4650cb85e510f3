"""`num_draft_tokens="auto"`: how many candidates give the most tokens a second, down to none.

Before each round `AutoDraftLength` chooses the number γ of candidates with the largest

    1 + S_1 + ... + S_γ                            expected tokens of a row, the one after the candidates among them
    ---------------------------------------
    overhead * (T_t(B, γ+1) + γ T_d(B, 1))         seconds of the round, which has B rows; a head that drafts a block
                                                   finds all candidates in one step, so there T_d counts once

This file has, in this order,

- the choice: `most_tokens_per_second` computes the fraction for each γ;
- acceptance: S_i is the probability that the first i candidates are all accepted, estimated by `AcceptanceEstimate`.
  If each is accepted with the same probability α, the numerator is Equation 1 of Leviathan et al. 2022, and the
  fraction their Theorem 3.8, without its assumption that a forward of γ+1 tokens takes as long as one of a token;
- time: T_t and T_d are seconds of bare forwards of target and draft, and the overhead is how much longer whole rounds
  were seen to take. `Costs` (`costs.py`) remembers both from call to call, and a call reads them by its `RoundTimer`;
- the retry: with γ = 0, plain decoding, nothing is learned of the draft. So `AutoDraftLength` sets a small part of the
  time of plain steps aside, its budget for trials, and tries the draft again once that pays for what a trial may lose.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_specx.common.batch import Batch
from hf_specx.common.drafts import FIXED_DRAFT_TOKENS
from hf_specx.common.round import Round

from .costs import MAX_DRAFT_TOKENS, MIN_SAMPLES, PRIOR_ALPHA, PRIOR_WEIGHT, Costs
from .forward_times import on_grid
from .schedule import DraftLengthSchedule


COMPILED_NUMBERS = (1, 2, 4, 7, 12, 20)  # considered where forwards are compiled: few; the best loses 2 % at most
EARLIER_WEIGHT = 10.0  # candidates that the acceptance of earlier calls counts for in a call: its text may be another
DECAY = 0.98  # factor on the weight of earlier rounds at each round
MAX_SAMPLES = 15  # last rounds of a size whose median is its time
TRIAL_SHARE = 0.01  # part of the time of plain steps that trials of a draft may lose
TRIAL_ROUNDS = 5  # rounds of a trial; one of them may take the time to read what the draft has missed
LEAST_OVERHEAD = 0.5  # of trees; less is no time that a round can take
ASSUMED_STEP = 0.2  # time that a candidate, or a step of a draft, adds to a round of 1, where no times may be used
ASSUMED_COSTS = Costs({1: {"target": {1: 1.0, 2: 1 + ASSUMED_STEP}, "draft": ASSUMED_STEP}})


def most_tokens_per_second(
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


@dataclass
class Tally:
    """Sums over candidates, weighted so that later rounds count for more.

    `tried` sums the probability that all candidates before one are accepted, `accepted` that it is accepted as well.
    """

    accepted: float = 0.0
    tried: float = 0.0

    def decay(self) -> None:
        """Have what was counted so far count for less."""
        self.accepted *= DECAY
        self.tried *= DECAY

    def add(self, accepted: float, tried: float) -> None:
        """Count one more candidate."""
        self.accepted += accepted
        self.tried += tried


class AcceptanceEstimate:
    """The probability S_i that the first i candidates of a row are all accepted, from the rounds so far of all rows.

    It is the product of the ratios S_j / S_{j-1}, j = 1 to i. A ratio is estimated by the probabilities at all
    candidates of that depth j, also after a rejection, so that it has no bias; where few were seen, by the mean of all
    depths.

    Args:
        alpha: each ratio before any round.
        together: whether all rows advance by the number that all accept, as in lockstep; S_i is then the probability
            that all rows accept i candidates.
    """

    def __init__(self, alpha: float, together: bool = False):
        self.together = together
        self.all_depths = Tally(alpha * EARLIER_WEIGHT, EARLIER_WEIGHT)
        self.depths: list[Tally] = []

    def update(self, acceptance: Sequence[list[float]]) -> None:
        """Count a round.

        Args:
            acceptance: for each row that took part `Verdict.prefix_acceptance` at its own candidates, of which there
                is one.
        """
        deepest = max(map(len, acceptance))
        self.depths += [Tally() for _ in range(deepest - len(self.depths))]
        for tally in (self.all_depths, *self.depths):
            tally.decay()
        if self.together:
            acceptance = [[math.prod(column) for column in zip(*acceptance, strict=False)]]
        for row in acceptance:
            for tally, before, accepted in zip(self.depths, [1.0, *row], row, strict=False):
                self.all_depths.add(accepted, before)
                tally.add(accepted, before)

    def acceptance(self, count: int) -> list[float]:
        """S_i for i = 1 to `count`."""
        mean_ratio = self.all_depths.accepted / self.all_depths.tried
        accepted = 1.0
        acceptance = []
        for depth in range(count):
            tally = self.depths[depth] if depth < len(self.depths) else Tally()
            accepted *= (tally.accepted + PRIOR_WEIGHT * mean_ratio) / (tally.tried + PRIOR_WEIGHT)
            acceptance.append(accepted)
        return acceptance


class RoundTimer:
    """Expected seconds of the rounds of one call: those of their forwards, times the overhead that rounds have shown.

    Args:
        costs: of the strategy; this goes by a copy that is taken when times are first asked for. None, or without any
            times, is `ASSUMED_COSTS`.
        online: whether times of this call's rounds are used at once. Where these would change sampled text, they are
            only kept for later calls.
    """

    def __init__(self, costs: Costs | None, online: bool = False):
        self.costs = costs
        self.online = online
        self.costs_at_start: Costs | None = None
        self.samples: dict[tuple[int, int], deque[float]] = {}  # seconds of this call's rounds, by rows and candidates
        self.cached_times: dict[tuple[int, int, bool], list[float]] = {}
        # seconds of this call's rounds with trees, by rows, draft steps and nodes
        self.tree_samples: dict[tuple[int, int, int], deque[float]] = {}
        self.may_have_trees = False
        self.last_end: float | None = None  # when the last round ended; None if the time since then does not count
        self.last_drafted = 0  # candidates of the last round

    def times(self, rows: int, max_candidates: int, steps: bool = True) -> list[float]:
        """Seconds of rounds with 0 to `max_candidates` candidates; without `steps` these take no draft steps."""
        key = rows, max_candidates, steps
        if key not in self.cached_times:
            costs, batch = self._costs_for(rows)
            plain_ratio, drafting_ratio = self._ratios(rows)
            seconds = [plain_ratio * costs.target(batch, 1)]
            for number in range(1, max_candidates + 1):
                drafting = costs.drafting(batch, number) if steps else 0.0
                seconds.append(drafting_ratio * (costs.target(batch, 1 + number) + drafting))
            self.cached_times[key] = seconds
        return self.cached_times[key]

    def tree_times(self, rows: int, steps: int, most: int) -> list[float]:
        """Seconds of rounds with so many draft steps and 0 to `most` candidates, which branch."""
        self.may_have_trees = True
        costs, batch = self._costs_for(rows)
        _, drafting_ratio = self._ratios(rows)
        drafting, overheads = costs.drafting(batch, steps), self._tree_overheads(rows)
        seconds = []
        for nodes in range(most + 1):
            nearest = min(overheads, key=lambda seen: abs(math.log(seen / max(nodes, 1))), default=0)
            seconds.append(drafting_ratio * overheads.get(nearest, 1.0) * (costs.target(batch, 1 + nodes) + drafting))
        return seconds

    def _tree_overheads(self, rows: int) -> dict[int, float]:
        """How much longer rounds with trees took than was expected, by number of nodes: in this call or before."""
        costs, batch = self._costs_for(rows)
        overheads = dict(costs.tree_overheads.get(batch, {}))
        return overheads | self._seen_overheads(rows) if self.online else overheads

    def _seen_overheads(self, rows: int) -> dict[int, float]:
        """The same in this call alone; none where no rounds of chains tell what to expect."""
        costs, batch = self._costs_for(rows)
        if all(self._overhead(rows, with_candidates=each) is None for each in (True, False)):
            return {}
        _, drafting_ratio = self._ratios(rows)
        ratios: dict[int, list[float]] = {}
        for (seen_rows, steps, nodes), samples in self.tree_samples.items():
            if seen_rows == rows and len(samples) >= MIN_SAMPLES:
                expected = drafting_ratio * (costs.target(batch, 1 + nodes) + costs.drafting(batch, steps))
                ratios.setdefault(nodes, []).append(statistics.median(samples) / expected)
        return {nodes: max(LEAST_OVERHEAD, statistics.mean(each)) for nodes, each in ratios.items()}

    def prefill_seconds(self, rows: int, tokens: int) -> float:
        """Seconds that a draft takes to read so many tokens of each row; they grow as those of the target.

        A step over a block is one over as many tokens.
        """
        if not tokens:
            return 0.0
        costs, batch = self._costs_for(rows)
        seconds_per_token = costs.draft(batch) / costs.candidates_per_step
        return seconds_per_token * costs.target(batch, tokens) / costs.target(batch, 1)

    def position_cost(self, rows: int) -> float:
        """What one more position of the target's forward costs, in plain steps."""
        costs, batch = self._costs_for(rows)
        plain = costs.target(batch, 1)
        return (costs.target(batch, 9) - plain) / 8 / plain

    def has_seen_plain(self, rows: int) -> bool:
        """Whether plain steps of half to twice as many rows have been timed, in this call or before."""
        costs, _ = self._costs_for(rows)
        sizes = [size for size, seconds in costs.rounds.items() if 0 in seconds]
        for (size, drafted), samples in self.samples.items():
            if drafted == 0 and len(samples) >= MIN_SAMPLES:
                sizes.append(size)
        return any(rows <= 2 * size and size <= 2 * rows for size in sizes)

    def skip(self) -> None:
        """Do not count the time up to the next `observe`: a round of another kind has ended, or a prompt is read."""
        self.last_end = None

    def observe(self, rows: int, drafted: int) -> None:
        """Note that a round with so many candidates has ended.

        The first of a call does not count, nor one in which a draft reads what it has missed.
        """
        if self.costs is None:
            return
        now = self.costs.clock()
        catches_up = drafted > 0 and self.last_drafted == 0
        if self.last_end is not None and not catches_up:
            samples = self.samples.setdefault((rows, drafted), deque(maxlen=MAX_SAMPLES))
            samples.append(now - self.last_end)
            if self.online and len(samples) >= MIN_SAMPLES:
                self._use(rows, drafted, on_grid(statistics.median(samples)))
        self.last_end = now
        self.last_drafted = drafted

    def observe_tree(self, rows: int, steps: int, nodes: int) -> None:
        """Note that a round with a tree has ended."""
        if self.costs is None:
            return
        now = self.costs.clock()
        if self.last_end is not None and not (steps > 0 and self.last_drafted == 0):
            samples = self.tree_samples.setdefault((rows, steps, nodes), deque(maxlen=MAX_SAMPLES))
            samples.append(now - self.last_end)
        self.last_end = now
        self.last_drafted = steps

    def end(self) -> None:
        """End the call: later ones go by what its rounds took."""
        if self.costs is not None:
            self.costs.remember_rounds(self.samples)
            if self.may_have_trees:
                sizes = {rows for rows, _, _ in self.tree_samples}
                self.costs.remember_trees({rows: self._seen_overheads(rows) for rows in sizes})

    def _use(self, rows: int, drafted: int, seconds: float) -> None:
        """Go by these seconds of a round from now on."""
        costs, _ = self._costs_for(rows)
        if costs is ASSUMED_COSTS:
            return
        times = costs.rounds.setdefault(rows, {})
        if times.get(drafted) != seconds:
            times[drafted] = seconds
            self.cached_times.clear()

    def _costs_for(self, rows: int) -> tuple[Costs, int]:
        """The costs that this call goes by, and the batch size to look up in them."""
        if self.costs_at_start is None and self.costs is not None and self.costs.table:
            self.costs_at_start = self.costs.apart()
        return (ASSUMED_COSTS, 1) if self.costs_at_start is None else (self.costs_at_start, rows)

    def _ratios(self, rows: int) -> tuple[float, float]:
        """The overhead of plain steps, and of rounds with candidates; one that was not seen is that of the other."""
        plain = self._overhead(rows, with_candidates=False)
        drafting = self._overhead(rows, with_candidates=True)
        return plain or drafting or 1.0, drafting or plain or 1.0

    def _overhead(self, rows: int, with_candidates: bool) -> float | None:
        """Seconds of rounds over those of their forwards, at the nearest batch size; None if none were seen."""
        costs, batch = self._costs_for(rows)
        overhead = None
        nearest = math.inf
        for size, times in costs.rounds.items():
            ratios = []
            for number, seconds in times.items():
                if (number > 0) is with_candidates:
                    ratios.append(seconds / costs.forwards(size, number))
            distance = abs(math.log(size / batch))
            if ratios and distance <= nearest:
                overhead = statistics.geometric_mean(ratios)
                nearest = distance
        return overhead


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
        most: the largest number that is considered.
        seconds: of rounds with 0 to `most` candidates.
        best, speedup: the best number from 1 on, and its speed over that of plain steps.
    """

    def __init__(
        self,
        round_timer: RoundTimer,
        verification: str,
        batch: Batch,
        compiled: bool = False,
        most: int | None = None,
        **options: Any,
    ):
        """`most` is how many a head that drafts a block can find; None is `MAX_DRAFT_TOKENS`."""
        super().__init__(0, round_timer, **options)
        assert round_timer.costs is not None
        self.timer = round_timer
        self.costs = round_timer.costs
        self.most = most or MAX_DRAFT_TOKENS
        fewer = COMPILED_NUMBERS if compiled else range(1, self.most)
        self.considered = [*(number for number in fewer if number < self.most), self.most]
        self.num_rows = len(batch.rows)
        self.max_new_tokens = max(row.limit for row in batch.row_states)
        self.num_unread = max(row.prompt_length for row in batch.row_states)
        earlier_alpha = self.costs.alpha.get(verification)
        alpha = PRIOR_ALPHA if earlier_alpha is None else earlier_alpha
        if batch.lockstep:
            alpha = alpha**self.num_rows  # that all rows accept
        self.estimate = AcceptanceEstimate(alpha, together=batch.lockstep)
        self.trial_rounds_left = TRIAL_ROUNDS if earlier_alpha is None else 0
        self.trial_budget = self.costs.trial_budget
        self.num_draft_tokens = self._choose()

    def is_idle(self) -> bool:
        """Whether a call that begins will probably end before its draft is used or tried."""
        if self.num_draft_tokens or self.trial_rounds_left or not self.timer.has_seen_plain(self.num_rows):
            return False
        return not self._pays_for_trial(self.trial_budget + TRIAL_SHARE * self.max_new_tokens)

    def wanted_length(self, batch: Batch, row: int) -> int:
        return FIXED_DRAFT_TOKENS if batch.row_states[row].independent_lengths else self.num_draft_tokens

    def observe(self, done: Round) -> None:
        super().observe(done)
        self.num_rows = len(done.rows) if done.keep_indices is None else len(done.keep_indices)
        if not any(done.emitted_before):
            return  # the first step, with the prompts
        if done.draft.steps:
            self.num_unread = 0
        else:
            self.num_unread += max(done.num_new_tokens)
            self.trial_budget += TRIAL_SHARE
        self.trial_rounds_left = max(0, self.trial_rounds_left - 1)
        acceptance = _acceptance_of_draft(done)
        if acceptance:
            self.estimate.update(acceptance)
        self.num_draft_tokens = self._choose()

    def _choose(self) -> int:
        """The number for the next round; a trial that begins is taken from the budget."""
        acceptance = self.estimate.acceptance(self.most)
        self.seconds = self.timer.times(self.num_rows, self.most)
        self.best, self.speedup = most_tokens_per_second(acceptance, self.seconds, self.considered)
        if self._is_on_trial():
            return self.best
        if self._pays():
            return self.best if self.timer.has_seen_plain(self.num_rows) else 0
        if self._pays_for_trial(self.trial_budget):
            self.trial_budget -= self._trial_cost() + self._prefill_cost()
            self.trial_rounds_left = TRIAL_ROUNDS
            return self.best
        return 0

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
        return self.timer.prefill_seconds(self.num_rows, self.num_unread) / self.seconds[0]

    def admit(self, batch: Batch, rows: list[int]) -> None:
        super().admit(batch, rows)
        self.num_rows = len(batch.rows)
        self.max_new_tokens = max(batch.row_states[row].limit for row in batch.rows)
        self.num_unread = max(self.num_unread, *(batch.row_states[row].prompt_length for row in rows))

    def end(self) -> None:
        super().end()
        self.costs.trial_budget = self.trial_budget


def _acceptance_of_draft(done: Round) -> list[list[float]]:
    """`Round.draft_acceptance` of the rows that tell how good the draft is, [R'].

    Others have no candidates, have candidates from elsewhere, took their first step, or were finished before.
    """
    model_free = done.draft.model_free or [False] * len(done.rows)
    acceptance = []
    for index, of_row in enumerate(done.draft_acceptance):
        goes_on = done.emitted_before[index] and done.num_new_tokens[index]
        if of_row and goes_on and not model_free[index]:
            acceptance.append(of_row)
    return acceptance
