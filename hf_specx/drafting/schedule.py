"""How many candidates each round drafts: as "auto" finds best, or as the user says in transformers' own words.

These are a number, its schedule, and a threshold. transformers reads all three from the draft's own file alone. Here a
call may set them as well.
"""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import GenerationConfig

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round

from .costs import Costs
from .draft_length import (
    FIXED_DRAFT_TOKENS,
    LEARNED_WEIGHT,
    MAX_DRAFT_TOKENS,
    PRIOR_ALPHA,
    PRIOR_WEIGHT,
    Survival,
    best_number,
)
from .pace import Pace


UNSET = {  # what `generate` fills in before it calls a strategy, whether or not the user gave these values
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}
TRIES = 4.0  # tokens to be expected of rounds before a draft of which nothing was known can be found not to pay
PROBE_SHARE = 0.01  # of the time of plain steps that may go into rounds that try a draft that does not pay
TOO_SLOW = 0.98  # speed compared with plain steps below which drafting ends
CLEAR = 1.5  # speed compared with plain steps from which it is not asked how long these take


class Drafting(NamedTuple):
    """What was asked for.

    Attributes:
        number: candidates of a round; None is "auto", as are transformers' schedules "heuristic" and
            "heuristic_transient", by which the number follows what is accepted.
        schedule: as it was given.
        threshold: after a candidate that the draft gave less than this probability a row drafts no further; 0 is off.
            It stays as given, where transformers adapts it by scikit-learn's ROC curve.
    """

    number: int | None = None
    schedule: str = "constant"
    threshold: float = 0.0


def given_drafting(*sources: Mapping[str, Any] | GenerationConfig | None) -> dict[str, Any]:
    """Those of transformers' three arguments that a user has set, each from the first source that has it.

    Args:
        *sources: the call's keyword arguments, and configs that were not filled up with defaults yet.
    """
    known = [vars(x) if isinstance(x, GenerationConfig) else x for x in sources if x is not None]
    found = {name: [x[name] for x in known if x.get(name) is not None] for name in UNSET}
    return {name: values[0] for name, values in found.items() if values}


def choose_drafting(
    num_draft_tokens: int | str, given: Mapping[str, Any] | None, filled: GenerationConfig, draft_model: Any
) -> Drafting:
    """What is used: the strategy's own number, else what the call says, else the draft's own file, else "auto".

    If `num_draft_tokens` is a number, the draft's own file is not read for schedule and threshold either.

    Args:
        num_draft_tokens: the strategy's option.
        given: `given_drafting` of the call; None if only `filled` is known.
        filled: the config that `generate` hands to a strategy; a value that is not in `UNSET` counts as set.
        draft_model: its `generation_config` is its own file; other drafts have none.
    """
    if given is None:
        given = {name: value for name in UNSET if (value := getattr(filled, name, None)) != UNSET[name]}
    own = None if num_draft_tokens != "auto" else getattr(draft_model, "generation_config", None)
    found = given_drafting(given, own)
    number, schedule, threshold = (found.get(name) for name in UNSET)
    if not isinstance(num_draft_tokens, str):
        number = num_draft_tokens
    schedule = schedule or Drafting().schedule
    if schedule in ("heuristic", "heuristic_transient"):
        number = None
    return Drafting(number, schedule, threshold or Drafting().threshold)


class Schedule:
    """How many candidates each row drafts in the next round: a number, the same for all rows and rounds.

    Args:
        wanted: that number.
        room: [B], the most tokens that each row may emit. A row that is nearly done drafts no more than it can emit
            together with the token that follows; None if all rows and ranks must draft alike.
        pace: is told how long rounds take; None where no times are kept.

    Attributes:
        most: candidates of a row, at most.
        late: rows whose prompt came in the place of another and may have candidates for its first token.
        alone: rows whose number must be that of a batch of one with a seed.
    """

    most = sys.maxsize

    def __init__(self, wanted: int, room: list[int] | None, pace: Pace | None = None):
        self.wanted, self.room, self.pace = wanted, room, pace
        self.late: set[int] = set()
        self.alone: set[int] = set()

    def __call__(self, batch: Batch) -> list[int]:
        """Candidates for each of the R decoding rows."""
        wanted = []
        for row in batch.rows:
            begins = not batch.counts[row] and row not in self.late
            room = sys.maxsize if self.room is None else max(0, self.room[row] - batch.counts[row] - 1)
            wanted.append(0 if begins else min(self.number(row), self.most, room))
        return wanted

    def number(self, row: int) -> int:
        """Candidates of a row, if its text has room for them."""
        return self.wanted

    def idle(self, batch: Batch) -> list[int]:
        """Candidates for the rows of a text that is finished, while other ranks go on."""
        return [self.number(row) for row in batch.rows]

    def observe(self, done: Round) -> None:
        """Count a round: one in which every candidate took a step of the draft, or none did."""
        if self.pace is None or not any(done.before):
            return  # the prompts' own step has taken another time
        if done.draft.free is None:
            self.pace.observe(len(done.rows), done.draft.steps)
        else:
            self.pace.skip()

    def admit(self, row: int, room: int, alone: bool) -> None:
        """A new prompt has the place of a row.

        Args:
            row: its number.
            room: the most tokens that it may emit.
            alone: whether its numbers must be those of a batch of one, where the first token has no candidates.
        """
        (self.late.discard if alone else self.late.add)(row)
        (self.alone.add if alone else self.alone.discard)(row)
        if self.room is not None:
            self.room[row] = room
        if self.pace is not None:
            self.pace.skip()

    def end(self) -> None:
        """The call is over; later ones go by what its rounds took."""
        if self.pace is not None and self.pace.costs is not None:
            self.pace.costs.remember_rounds(self.pace.seen)


class Auto(Schedule):
    """ "auto" for one call: each round the number with the most tokens per second, which may be 0.

    The longest draft of the batch decides what a forward costs, so all rows get the same number. While plain steps are
    faster the draft is not asked, and reads nothing; a hundredth of their time goes into rounds that try it again. A
    draft of which nothing is known is tried at first in any case. Where drafting is hardly faster than plain steps are
    assumed to be, some of these are timed.

    Args:
        pace: how long rounds take, by the costs of the strategy.
        verification: of the call.
        room: [B], the most tokens that each row may emit.
        prompt: tokens of the longest prompt, which the draft has not read.
        together: whether all rows advance by as many tokens as the slowest.

    Attributes:
        on: whether drafting pays, by what is known.
        tries: tokens that are still to be expected of rounds before a draft that was never seen can be judged.
        unread: tokens of a row, at most, that the draft has not read.
        saved: plain steps' worth of time that may go into trying the draft.
    """

    def __init__(self, pace: Pace, verification: str, room: list[int], prompt: int, together: bool):
        super().__init__(0, room, pace)
        assert pace.costs is not None
        self.times, self.costs, self.rows, self.prompt = pace, pace.costs, len(room), prompt
        known = verification in self.costs.alpha
        alpha, weight = (self.costs.alpha[verification], LEARNED_WEIGHT) if known else (PRIOR_ALPHA, PRIOR_WEIGHT)
        self.survival = Survival(alpha ** (self.rows if together else 1), weight, together)
        self.tries, self.unread, self.saved = 0.0 if known else TRIES, prompt, self.costs.saved
        seconds, best, gain = self._best()
        read = pace.reading(self.rows, prompt)
        self.on = max(room) * (1 - 1 / gain) * seconds[0] > read  # what it saves, and what it costs to begin
        self.wanted = self._next(seconds, best, gain)

    def number(self, row: int) -> int:
        return FIXED_DRAFT_TOKENS if row in self.alone else self.wanted

    def observe(self, done: Round) -> None:
        super().observe(done)
        self.rows = len(done.rows) if done.stay is None else len(done.stay)
        if not any(done.before):
            return  # the prompts' own step
        drafted = done.draft.steps
        self.unread = 0 if drafted else self.unread + max(done.gained)
        # others were finished before, had nothing to draft after, or have candidates from elsewhere
        free = done.draft.free or [False] * len(done.rows)
        live = [n for n, gained in enumerate(done.gained) if gained and done.before[n] and not free[n]]
        survival = [done.chances[n] for n in live if done.chances[n]]
        tokens = self.survival.take(survival) if survival else 1.0
        if survival:
            self.tries -= tokens * (1 if self.survival.together else len(survival))
        seconds, best, gain = self._best()
        paid = bool(survival) and tokens * seconds[0] > seconds[min(drafted, len(seconds) - 1)]
        self.on = gain >= (TOO_SLOW if self.on else 1.0) or (paid and not self.on and self.tries <= 0)
        self.saved += 0 if drafted else PROBE_SHARE
        self.wanted = self._next(seconds, best, gain)

    def _best(self) -> tuple[list[float], int, float]:
        """Seconds of rounds, the best number from 1 on, and its speed compared with plain steps."""
        seconds = self.times.times(self.rows, MAX_DRAFT_TOKENS)
        return seconds, *best_number(self.survival.chances(MAX_DRAFT_TOKENS), seconds, least=1)

    def _next(self, seconds: list[float], best: int, gain: float) -> int:
        """The number for the next round."""
        if self.tries > 0:
            return best
        if self.on:
            return best if gain > CLEAR or self.times.has_seen_plain(self.rows) else 0
        price = (seconds[best] - seconds[0] + self.times.reading(self.rows, self.unread)) / seconds[0]
        if price > self.saved:
            return 0
        self.saved -= price
        return best

    def admit(self, row: int, room: int, alone: bool) -> None:
        super().admit(row, room, alone)
        self.unread = max(self.unread, self.prompt)

    def end(self) -> None:
        super().end()
        self.costs.saved = self.saved


def make_schedule(
    number: int | None,
    pace: Pace | None,
    verification: str,
    batch: Batch,
    room: list[int] | None,
    most: int | None = None,
) -> Schedule:
    """The schedule of a call: how many candidates its rounds draft.

    Args:
        number: that was asked for; None is "auto".
        pace: with times for this batch size; None if "auto" must not use any.
        verification: of the call.
        batch: its prompts.
        room: as for `Schedule`.
        most: what "auto" means for a draft that finds its own number up to this one.
    """
    if number is None and most is None and pace is not None and room is not None:
        return Auto(pace, verification, room, max(batch.prompt_lengths), batch.lockstep)
    if number is None and most is None:
        costs: Costs | None = None if pace is None else pace.costs
        rows = len(batch.rows)
        number = FIXED_DRAFT_TOKENS if costs is None else costs.best_num_draft_tokens(rows, verification)
    return Schedule(number or most or FIXED_DRAFT_TOKENS, room, pace)
