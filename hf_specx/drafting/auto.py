"""`num_draft_tokens="auto"`: how many candidates give the most tokens a second, down to none.

Before each round `Auto` takes the number γ of candidates with the largest

    1 + S_1 + ... + S_γ                            tokens of a row, the one after the candidates among them
    ---------------------------------------
    overhead * (T_t(B, γ+1) + γ T_d(B, 1))         seconds of the round, which has B rows

- S_i is the chance that the first i candidates are all kept: `AcceptanceEstimate`. If each is kept with the same
  chance α, the upper line is Equation 1 of Leviathan et al. 2022, and the whole is their Theorem 3.8, without its
  assumption that a forward of γ+1 tokens takes as long as one of a token.
- T_t and T_d are bare forwards of target and draft, by `forward_times.py`. The overhead is how much longer whole
  rounds were seen to take. `Costs` keeps both from call to call, and a call reads them by its `RoundTimer`.

γ = 0 is plain decoding. A draft that does not pay is not asked; it is tried again once plain steps have saved up for
that.
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_specx.common.batch import Batch
from hf_specx.common.drafts import FIXED_DRAFT_TOKENS
from hf_specx.common.round import Round

from .forward_times import ForwardTimes, on_grid
from .schedule import Schedule


MAX_DRAFT_TOKENS = 20  # the largest number that is considered
COMPILED = (1, 2, 4, 7, 12, 20)  # of which torch compiles few forwards; the best of them loses 2 % at most
PRIOR_ALPHA = 0.7  # acceptance assumed before any was seen
WEIGHT = 4.0  # candidates that this is worth, and at each depth the mean of all
EARLIER = 10.0  # candidates that what earlier calls have seen is worth in a call, whose text may be another one
FORGET = 0.98  # factor on the weight of earlier rounds at each round
MEMORY = 100  # how many candidates the acceptance of earlier calls is worth when another call is added
RECENT = 15  # at most so many last rounds of a size count; their median is used
ENOUGH = 4  # rounds of a size to be seen before they are used
PROBE_SHARE = 0.01  # of the time of plain steps that may be lost by trying a draft that does not pay
TRIAL = 5  # rounds that try a draft, one of which may take the time to read what is missing
ASSUMED = 0.2  # what a candidate, or a step of a draft, adds to a round, as a part of it, where no times may be used


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Expected tokens of a round, (1 - α^(γ+1)) / (1 - α); Equation 1."""
    if alpha >= 1:
        return float(num_draft_tokens + 1)
    return (1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha)


def best_number(
    chances: Sequence[float], seconds: Sequence[float], among: Sequence[int] | None = None
) -> tuple[int, float]:
    """The number of candidates with the most expected tokens a second, and that rate compared with plain steps.

    `chances` are those that a row keeps its first i candidates, i = 1 to K, `seconds` of rounds with 0 to K
    candidates; only the numbers in `among` are considered, all for None.
    """
    tokens = 1.0
    rates = [1 / seconds[0]]
    for chance, taken in zip(chances, seconds[1:], strict=True):
        tokens += chance
        rates.append(tokens / taken)
    best = max(among or range(len(rates)), key=rates.__getitem__)
    return best, rates[best] / rates[0]


class AcceptanceEstimate:
    """The chance S_i that the first i candidates of a row are all kept, from the rounds so far; rows are pooled.

    It is the product of estimated ratios S_i / S_{i-1}. They come from the probabilities at all candidates, also after
    a rejection, so they have no bias. A depth i that was seldom seen is estimated by the mean of all; at first all are
    `alpha`. If rows advance `together`, S_i is the chance that all keep i candidates.
    """

    def __init__(self, alpha: float, together: bool = False):
        self.together = together
        self.all = [alpha * EARLIER, EARLIER]  # kept and tried at all depths
        self.depths: list[list[float]] = []  # the same at each depth

    def update(self, acceptance: Sequence[list[float]]) -> None:
        """Count a round: `Verdict.acceptance` of each row that took part, at its own candidates; one at least."""
        deepest = max(map(len, acceptance))
        self.depths += [[0.0, 0.0] for _ in range(deepest - len(self.depths))]
        for counts in (self.all, *self.depths):
            counts[:] = [count * FORGET for count in counts]
        if self.together:
            acceptance = [[math.prod(column) for column in zip(*acceptance, strict=False)]]
        for row in acceptance:
            for counts, before, chance in zip(self.depths, [1.0, *row], row, strict=False):
                for kept_and_tried in (self.all, counts):
                    kept_and_tried[0] += chance
                    kept_and_tried[1] += before

    def chances(self, count: int) -> list[float]:
        """S_i for i = 1 to `count`."""
        ratio = self.all[0] / self.all[1]
        chance = 1.0
        chances = []
        for depth in range(count):
            kept, tried = self.depths[depth] if depth < len(self.depths) else (0.0, 0.0)
            chance *= (kept + WEIGHT * ratio) / (tried + WEIGHT)
            chances.append(chance)
        return chances


@dataclass(eq=False, repr=False)
class Costs(ForwardTimes):
    """What the choice of a number of candidates depends on; a strategy keeps it as `strategy.costs`.

    With the same costs and seed, two processes draft the same numbers under token and block verification.

    Attributes:
        table, clock, measured, assumed, unspent: of bare forwards, as in `ForwardTimes`.
        alpha: by verification, the chance in the calls so far that a candidate is kept whose predecessors were: the
            `survival_rate` of reports.
        rounds: seconds of whole rounds in the calls so far, by batch size and number of candidates.
        saved: plain steps' worth of time that later calls may lose by trying a draft that does not pay.
    """

    alpha: dict[str, float] = field(default_factory=dict)
    rounds: dict[int, dict[int, float]] = field(default_factory=dict)
    saved: float = 0.0

    def __repr__(self) -> str:
        """Batch sizes that were timed, and acceptance so far."""
        alpha = ", ".join(f"{verification}: {value:.3f}" for verification, value in self.alpha.items())
        return f"Costs(batch sizes {sorted(self.table.keys() - self.assumed)}, acceptance {{{alpha}}})"

    def apart(self) -> "Costs":
        """A copy that from now on remembers other calls."""
        rounds = {batch: dict(seen) for batch, seen in self.rounds.copy().items()}  # another thread may add to it
        return Costs(
            dict(self.table),
            dict(self.alpha),
            rounds,
            saved=self.saved,
            clock=self.clock,
            assumed=set(self.assumed),
        )

    def remember(self, verification: str, alpha: float, judged: float, rounds: int = 0) -> None:
        """Add the acceptance of a call, as `judged` candidates have shown it, and how many `rounds` had candidates."""
        self.unspent += rounds
        if judged:
            old = self.alpha.get(verification, PRIOR_ALPHA)
            weight = MEMORY if verification in self.alpha else WEIGHT
            self.alpha[verification] = old + (alpha - old) * judged / (judged + weight)

    def remember_rounds(self, seen: Mapping[tuple[int, int], Sequence[float]]) -> None:
        """Add how long the rounds of a call took: seconds, by batch size and number of candidates.

        One that is known moves halfway, so that no call decides alone. Those of numbers of candidates that the call
        did not use are dropped if it used others.
        """
        medians: dict[int, dict[int, float]] = {}
        for (batch, drafted), seconds in seen.items():
            if len(seconds) >= ENOUGH:
                medians.setdefault(batch, {})[drafted] = statistics.median(seconds)
        for batch, times in medians.items():
            earlier = self.rounds.get(batch, {})
            has_drafted = any(times)
            remembered = {number: before for number, before in earlier.items() if number == 0 or not has_drafted}
            for number, median in times.items():
                remembered[number] = on_grid(math.sqrt(earlier.get(number, median) * median))
            self.rounds[batch] = remembered

    def forward_limited_speedup(self, batch: int, tokens_per_round: float, num_draft_tokens: int) -> float:
        """Ê T_t(B, 1) / (T_t(B, γ+1) + γ T_d(B, 1)): Theorem 3.8 without its assumption on the larger forward."""
        return tokens_per_round * self.target(batch, 1) / self.forwards(batch, num_draft_tokens)

    def best_num_draft_tokens(self, batch: int, verification: str, most: int | None = None) -> int:
        """The γ, from 1 to `most`, with the largest `forward_limited_speedup` for a whole call.

        "auto" chooses each round.
        """
        alpha = self.alpha.get(verification, PRIOR_ALPHA)
        numbers = range(1, min(MAX_DRAFT_TOKENS, most or MAX_DRAFT_TOKENS) + 1)
        return max(numbers, key=lambda g: self.forward_limited_speedup(batch, expected_tokens(alpha, g), g))

    def to_dict(self) -> dict[str, Any]:
        """Plain values with strings as keys, as JSON has them."""
        table = {batch: row for batch, row in self.table.items() if batch not in self.assumed}
        values = {"table": table, "alpha": self.alpha, "rounds": self.rounds}
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Costs":
        """The inverse of `to_dict`, with a clock of its own."""

        def numbered(times: dict[str, Any]) -> dict[int, float]:
            return {int(number): float(seconds) for number, seconds in times.items()}

        table = {}
        for batch, row in values["table"].items():
            table[int(batch)] = {"target": numbered(row["target"]), "draft": float(row["draft"])}
        rounds = {int(batch): numbered(times) for batch, times in values.get("rounds", {}).items()}
        return cls(table, dict(values["alpha"]), rounds)


NOT_TIMED = Costs({1: {"target": {1: 1.0, 2: 1 + ASSUMED}, "draft": ASSUMED}})


class RoundTimer:
    """Seconds of the rounds of one call: what forwards cost, times what rounds were seen to take beside these.

    Args:
        costs: of the strategy, as they are when they are first asked for. None, or without any times, takes `ASSUMED`.
        online: whether times of this call are used at once. If not, since they would change sampled text, they are
            kept for later calls.
    """

    def __init__(self, costs: Costs | None, online: bool = False):
        self.costs, self.online = costs, online
        self.snapshot: Costs | None = None  # that this call goes by
        self.seen: dict[tuple[int, int], deque[float]] = {}  # seconds of its rounds, by rows and candidates
        self.cached_times: dict[tuple[int, int, bool], list[float]] = {}
        self.last_end: float | None = None  # when the last round ended; None if the time since then does not count
        self.last_drafted = 0

    def times(self, rows: int, most: int, steps: bool = True) -> list[float]:
        """T(B, γ), γ = 0 to `most`; without `steps`, of candidates that take no step of a draft model."""
        key = rows, most, steps
        if key not in self.cached_times:
            costs, batch = self._costs_for(rows)
            plain, drafting = self._ratios(rows)
            step = costs.draft(batch) if steps else 0.0
            seconds = [plain * costs.target(batch, 1)]
            for number in range(1, most + 1):
                seconds.append(drafting * (costs.target(batch, 1 + number) + step * number))
            self.cached_times[key] = seconds
        return self.cached_times[key]

    def prefill_seconds(self, rows: int, tokens: int) -> float:
        """Seconds that a draft takes to read so many tokens of each row; they grow as those of the target."""
        if not tokens:
            return 0.0
        costs, batch = self._costs_for(rows)
        return costs.draft(batch) * costs.target(batch, tokens) / costs.target(batch, 1)

    def position_cost(self, rows: int) -> float:
        """What one more position of the target's forward costs, in plain steps."""
        costs, batch = self._costs_for(rows)
        plain = costs.target(batch, 1)
        return (costs.target(batch, 9) - plain) / 8 / plain

    def has_seen_plain(self, rows: int) -> bool:
        """Whether it is known how long plain steps take, of half to twice as many rows."""
        costs, _ = self._costs_for(rows)
        sizes = [size for size, seconds in costs.rounds.items() if 0 in seconds]
        sizes += [size for (size, drafted), seen in self.seen.items() if not drafted and len(seen) >= ENOUGH]
        return any(rows <= 2 * size and size <= 2 * rows for size in sizes)

    def skip(self) -> None:
        """A round of another kind has ended, or a prompt is read: the time up to the next `observe` does not count."""
        self.last_end = None

    def observe(self, rows: int, drafted: int) -> None:
        """Note that a round has ended. The first of a call, and those in which a draft catches up, do not count."""
        if self.costs is None:
            return
        now = self.costs.clock()
        catches_up = drafted > 0 and not self.last_drafted
        if self.last_end is not None and not catches_up:
            seen = self.seen.setdefault((rows, drafted), deque(maxlen=RECENT))
            seen.append(now - self.last_end)
            if self.online and len(seen) >= ENOUGH:
                self._use(rows, drafted, on_grid(statistics.median(seen)))
        self.last_end, self.last_drafted = now, drafted

    def end(self) -> None:
        """The call is over; later ones go by what its rounds took."""
        if self.costs is not None:
            self.costs.remember_rounds(self.seen)

    def _use(self, rows: int, drafted: int, seconds: float) -> None:
        """Go by these seconds of a round from now on."""
        costs, _ = self._costs_for(rows)
        if costs is NOT_TIMED:
            return
        times = costs.rounds.setdefault(rows, {})
        if times.get(drafted) != seconds:
            times[drafted] = seconds
            self.cached_times.clear()

    def _costs_for(self, rows: int) -> tuple[Costs, int]:
        """The costs as they were when they were first asked for, and the batch size in them that stands for `rows`."""
        if self.snapshot is None and self.costs is not None and self.costs.table:
            self.snapshot = self.costs.apart()
        return (NOT_TIMED, 1) if self.snapshot is None else (self.snapshot, rows)

    def _ratios(self, rows: int) -> tuple[float, float]:
        """What plain steps, and rounds with candidates, take compared with their forwards: at the nearest size.

        Where only those of one kind were seen, the others count as equally long.
        """
        plain = self._ratio(rows, drafting=False)
        drafting = self._ratio(rows, drafting=True)
        return plain or drafting or 1.0, drafting or plain or 1.0

    def _ratio(self, rows: int, drafting: bool) -> float | None:
        """The same for rounds of one kind; None where none were seen."""
        costs, batch = self._costs_for(rows)
        ratio = None
        nearest = math.inf
        for size, times in costs.rounds.items():
            ratios = [t / costs.forwards(size, number) for number, t in times.items() if (number > 0) is drafting]
            distance = abs(math.log(size / batch))
            if ratios and distance <= nearest:
                ratio = statistics.geometric_mean(ratios)
                nearest = distance
        return ratio


class Auto(Schedule):
    """ "auto" for one call: each round the number with the most tokens per second, which may be 0.

    The longest draft of the batch decides what a forward costs, so all rows get the same number. In this order:

    - A draft of which nothing is known is tried for `TRIAL` rounds, and so is one whose trial was saved up for.
    - One that pays is used, once it is known how long plain steps take; until then steps are plain.
    - One that does not pay is not asked, and reads nothing. Each plain step saves up a hundredth of its time, and when
      that covers what a trial is expected to lose, the draft is tried again.

    Attributes:
        trial: rounds for which the draft is still tried.
        unread: tokens of a row, at most, that the draft has not read.
        saved: plain steps' worth of time that may be lost by trying the draft.
        seconds, best, gain: of rounds; the best number from 1 on; its speed compared with plain steps.
    """

    def __init__(
        self, round_timer: RoundTimer, verification: str, batch: Batch, compiled: bool = False, **options: Any
    ):
        super().__init__(0, round_timer, **options)
        assert round_timer.costs is not None
        self.timer = round_timer
        self.costs = round_timer.costs
        self.numbers = COMPILED if compiled else range(1, MAX_DRAFT_TOKENS + 1)
        self.rows = len(batch.rows)
        self.room = max(row.limit for row in batch.table)
        self.prompt_length = self.unread = max(row.prompt_length for row in batch.table)
        alpha = self.costs.alpha.get(verification)
        prior = PRIOR_ALPHA if alpha is None else alpha
        self.acceptance = AcceptanceEstimate(prior ** (self.rows if batch.lockstep else 1), together=batch.lockstep)
        self.trial = TRIAL if alpha is None else 0
        self.saved = self.costs.saved
        self.wanted = self._choose()

    def is_idle(self) -> bool:
        """Whether a call that begins will probably end before the draft is used or tried, as far as others tell."""
        if self.wanted or self.trial or not self.timer.has_seen_plain(self.rows):
            return False
        return not self._covers_a_trial(self.saved + PROBE_SHARE * self.room)

    def number(self, batch: Batch, row: int) -> int:
        return FIXED_DRAFT_TOKENS if batch.table[row].drafts_alone else self.wanted

    def observe(self, done: Round) -> None:
        super().observe(done)
        self.rows = len(done.rows) if done.stay is None else len(done.stay)
        if not any(done.before):
            return  # the prompts' own step
        if done.draft.steps:
            self.unread = 0
        else:
            self.unread += max(done.gained)
            self.saved += PROBE_SHARE
        self.trial = max(0, self.trial - 1)
        acceptance = _judged(done)
        if acceptance:
            self.acceptance.update(acceptance)
        self.wanted = self._choose()

    def _choose(self) -> int:
        """The number for the next round."""
        self.seconds = self.timer.times(self.rows, MAX_DRAFT_TOKENS)
        self.best, self.gain = best_number(self.acceptance.chances(MAX_DRAFT_TOKENS), self.seconds, self.numbers)
        if self._is_on_trial():
            return self.best
        if self._pays():
            return self.best if self.timer.has_seen_plain(self.rows) else 0
        if self._covers_a_trial(self.saved):
            self.saved -= self._trial_cost() + self._prefill_cost()
            self.trial = TRIAL
            return self.best
        return 0

    def _is_on_trial(self) -> bool:
        """Whether a trial goes on; not where even a good draft would hardly save the time that it takes to read."""
        return self.trial > 0 and self._prefill_cost() <= self.room / 2

    def _pays(self) -> bool:
        """Whether the draft saves more, in as long a text as there may be, than it takes to read what is missing."""
        return self.gain > 1 and self.room * (1 - 1 / self.gain) > self._prefill_cost()

    def _covers_a_trial(self, saved: float) -> bool:
        """Whether so much is enough for a trial of the draft."""
        left = saved - self._trial_cost()
        return left >= 0 and left >= self._prefill_cost()

    def _trial_cost(self) -> float:
        """What a trial is expected to lose by what was accepted so far, in plain steps."""
        slower = max(0.0, 1 - self.gain)
        return TRIAL * slower * self.seconds[self.best] / self.seconds[0]

    def _prefill_cost(self) -> float:
        """What the draft takes to read what is missing, in plain steps."""
        return self.timer.prefill_seconds(self.rows, self.unread) / self.seconds[0]

    def admit(self, batch: Batch, rows: list[int]) -> None:
        super().admit(batch, rows)
        self.rows = len(batch.rows)
        self.unread = max(self.unread, self.prompt_length)

    def end(self) -> None:
        super().end()
        self.costs.saved = self.saved


def _judged(done: Round) -> list[list[float]]:
    """`Round.chances` of the rows that tell how good the draft is.

    Others were finished before, had nothing to draft after, or have candidates from elsewhere.
    """
    free = done.draft.free or [False] * len(done.rows)
    rows = zip(done.chances, done.before, done.gained, free, strict=True)
    return [chances for chances, before, gained, is_free in rows if chances and before and gained and not is_free]
