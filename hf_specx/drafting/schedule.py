"""How many candidates each round drafts: as "auto" finds best, or as the user says in transformers' own words.

These are a number, its schedule and a threshold, which transformers reads from the draft's own file alone.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import GenerationConfig

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round
from hf_specx.sampling.processors import Processors

from .costs import PROBE_SHARE, RoundTimer
from .draft_length import COMPILED, FIXED_DRAFT_TOKENS, MAX_DRAFT_TOKENS, PRIOR_ALPHA, AcceptanceEstimate, best_number


UNSET = {  # what `generate` fills in before it calls a strategy, whether or not the user gave these values
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}
TRIAL = 5  # rounds that try a draft, one of which may take the time to read what is missing


class Drafting(NamedTuple):
    """What was asked for: candidates of a round, None for "auto"; transformers' schedule; and a threshold.

    After a candidate that the draft gave less than the threshold a row drafts no further; 0 is off. It stays as given,
    where transformers adapts it by scikit-learn's ROC curve.
    """

    number: int | None = None
    schedule: str = "constant"
    threshold: float = 0.0


def given_drafting(*sources: Mapping[str, Any] | GenerationConfig | None) -> dict[str, Any]:
    """Those of transformers' three arguments that a user has set, each from the first source that has it.

    The sources are the call's keyword arguments, and configs that were not filled up with defaults yet.
    """
    found: dict[str, Any] = {}
    for source in reversed(sources):
        values = vars(source) if isinstance(source, GenerationConfig) else source or {}
        found |= {name: values[name] for name in UNSET if values.get(name) is not None}
    return found


def choose_drafting(
    num_draft_tokens: int | str, given: Mapping[str, Any] | None, filled: GenerationConfig, draft_model: Any
) -> Drafting:
    """What is used: the strategy's own number, else what the call says, else the draft's own file, else "auto".

    With the strategy's own number no schedule counts.
    If `num_draft_tokens` is a number, the draft's own file, a `generation_config`, is not read at all. Without
    `given_drafting` of the call all values count as given that `UNSET` does not have, in the config as it is `filled`.
    """
    if given is None:
        given = {name: value for name in UNSET if (value := getattr(filled, name, None)) != UNSET[name]}
    own = None if num_draft_tokens != "auto" else getattr(draft_model, "generation_config", None)
    found = dict(zip(UNSET, Drafting(), strict=True)) | given_drafting(given, own)
    number, schedule, threshold = found.values()
    if not isinstance(num_draft_tokens, str):
        number, schedule = num_draft_tokens, "constant"
    elif schedule in ("heuristic", "heuristic_transient"):
        number = None
    return Drafting(number, schedule, threshold)


class Schedule:
    """How many candidates each row drafts in the next round: the same number for all rows and rounds.

    Args:
        wanted: that number.
        round_timer: is told how long rounds take; None where no times are kept.
        alike: whether all rows and ranks must draft alike. Else a row that is nearly done drafts no more than it can
            emit together with the token that follows.
        processors: take back so many candidates of a row at most.
        agree: makes of the number of each rank the same one, in each round; None if that is the same by itself.
    """

    def __init__(
        self,
        wanted: int,
        round_timer: RoundTimer | None = None,
        alike: bool = False,
        processors: Processors | None = None,
        agree: Callable[[int], int] | None = None,
    ):
        self.wanted, self.alike, self.processors, self.agree = wanted, alike, processors, agree
        self.round_timer = round_timer or RoundTimer(None)

    def __call__(self, batch: Batch) -> list[int]:
        """Candidates for each of the R decoding rows."""
        wanted, most = [], sys.maxsize if self.processors is None else self.processors.max_rollback
        if self.agree is not None:
            self.wanted = self.agree(min(self.wanted, most))
        for row in batch.rows:
            state = batch.table[row]
            # as in a batch of one, whose first round has no candidates; others have some as soon as they have a place
            begins = not batch.counts[row] and (state.drafts_alone or not state.is_refill)
            room = most if self.alike else max(0, batch.room(row) - 1)
            wanted.append(0 if begins else min(self.number(batch, row), most, room))
        return wanted

    def number(self, batch: Batch, row: int) -> int:
        """Candidates of a row, if its text has room for them."""
        return self.wanted

    def observe(self, done: Round) -> None:
        """Count a round: one in which every candidate took a step of the draft, or none did."""
        if self.round_timer.costs is None or not any(done.before):
            return  # the prompts' own step has taken another time
        draft = done.draft
        if draft.free is None and draft.steps == max(draft.lengths):
            self.round_timer.observe(len(done.rows), draft.steps)
        else:
            self.round_timer.skip()

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """New prompts have the places of these rows."""
        self.round_timer.skip()

    def end(self) -> None:
        """The call is over; later ones go by what its rounds took."""
        if self.round_timer.costs is not None:
            self.round_timer.costs.remember_rounds(self.round_timer.seen)


class Auto(Schedule):
    """ "auto" for one call: each round the number with the most tokens per second, which may be 0.

    The longest draft of the batch decides what a forward costs, so all rows get the same number. While plain steps are
    faster the draft is not asked, and reads nothing; by trying it again at most a hundredth of their time is expected
    to be lost. A draft of which nothing is known is tried at first, unless reading the prompt takes it half as long as
    the text may take plainly; and so are plain steps whose time is not known.

    Attributes:
        trial: rounds for which a draft that does not pay is tried.
        unread: tokens of a row, at most, that the draft has not read.
        saved: plain steps' worth of time that may be lost by trying the draft; `price`: what it is expected to lose.
        seconds, best, gain: of rounds; the best number from 1 on; its speed compared with plain steps.
    """

    def __init__(self, round_timer: RoundTimer, verification: str, batch: Batch, compiled: bool = False, **given: Any):
        super().__init__(0, round_timer, **given)
        assert round_timer.costs is not None
        self.numbers = COMPILED if compiled else range(1, MAX_DRAFT_TOKENS + 1)
        self.costs, self.rows, self.room = round_timer.costs, len(batch.rows), max(row.limit for row in batch.table)
        alpha = self.costs.alpha.get(verification)
        assumed = PRIOR_ALPHA if alpha is None else alpha
        self.acceptance = AcceptanceEstimate(assumed ** (self.rows if batch.lockstep else 1), together=batch.lockstep)
        self.unread = self.prompt = max(row.prompt_length for row in batch.table)
        self.trial, self.saved = TRIAL if alpha is None else 0, self.costs.saved
        self.seconds: list[float] = []
        self.price = 0.0
        self.wanted = self._next(learned=True)

    def is_idle(self) -> bool:
        """Whether a call that begins will probably end before the draft is used or tried, as far as others tell."""
        if self.wanted or self.trial or not self.round_timer.has_seen_plain(self.rows):
            return False
        reading = self.round_timer.reading(self.rows, self.unread) / self.seconds[0]
        return self.saved + PROBE_SHARE * self.room < self.price + reading

    def number(self, batch: Batch, row: int) -> int:
        return FIXED_DRAFT_TOKENS if batch.table[row].drafts_alone else self.wanted

    def observe(self, done: Round) -> None:
        super().observe(done)
        self.rows = len(done.rows) if done.stay is None else len(done.stay)
        if not any(done.before):
            return  # the prompts' own step
        drafted = done.draft.steps
        self.trial -= self.trial > 0
        self.unread = 0 if drafted else self.unread + max(done.gained)
        self.saved += 0 if drafted else PROBE_SHARE
        acceptance = []
        if any(done.draft.lengths):
            # others were finished before, had nothing to draft after, or have candidates from elsewhere
            free = done.draft.free or [False] * len(done.rows)
            live = [n for n, gained in enumerate(done.gained) if gained and done.before[n] and not free[n]]
            acceptance = [chances for chances in map(done.chances.__getitem__, live) if chances]
        if acceptance:
            self.acceptance.update(acceptance)
        self.wanted = self._next(learned=bool(acceptance))

    def _next(self, learned: bool) -> int:
        """The number for the next round."""
        seconds, self.seconds = self.seconds, self.round_timer.times(self.rows, MAX_DRAFT_TOKENS)
        if learned or seconds is not self.seconds:
            self.best, self.gain = best_number(self.acceptance.chances(MAX_DRAFT_TOKENS), self.seconds, self.numbers)
        plain, reading = self.seconds[0], 0.0
        self.price = TRIAL * max(0.0, 1 - self.gain) * self.seconds[self.best] / plain
        if self.unread and (self.trial or self.gain > 1 or self.price <= self.saved):
            reading = self.round_timer.reading(self.rows, self.unread) / plain
        if self.trial and reading <= self.room / 2:  # else even a good draft would hardly save what it reads
            return self.best
        if self.room * (1 - 1 / self.gain) > reading:  # what it saves, and what it costs to begin
            return self.best if self.round_timer.has_seen_plain(self.rows) else 0
        if self.price + reading > self.saved:
            return 0
        self.saved -= self.price + reading
        self.trial = TRIAL
        return self.best

    def admit(self, batch: Batch, rows: list[int]) -> None:
        super().admit(batch, rows)
        self.unread = max(self.unread, self.prompt)

    def end(self) -> None:
        super().end()
        self.costs.saved = self.saved
