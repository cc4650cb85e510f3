"""How many candidates each round drafts: as "auto" finds best, or as the user says in transformers' own words.

These are a number, its schedule, and a threshold. transformers reads all three from the draft's own file alone. Here a
call may set them as well.
"""

import statistics
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from transformers import GenerationConfig

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round

from .costs import Costs, RoundTimes
from .draft_length import (
    FIXED_DRAFT_TOKENS,
    LEARNED_WEIGHT,
    MAX_DRAFT_TOKENS,
    PRIOR_ALPHA,
    PRIOR_WEIGHT,
    Chooser,
    Outcome,
    Survival,
)
from .resting import Resting


UNSET = {  # what `generate` fills in before it calls a strategy, whether or not the user gave these values
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}


class Drafting(NamedTuple):
    """What was asked for.

    Attributes:
        number: candidates of a round, at first; None is "auto".
        schedule: "constant", or "heuristic": for each row 2 more after a round that kept all of its candidates, else
            1 less; "heuristic_transient" is the same, from `number` again in each call.
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
    return Drafting(number, schedule or Drafting().schedule, threshold or Drafting().threshold)


class Schedule:
    """How many candidates each row drafts in the next round: a number, the same for all rows and rounds.

    Args:
        drafting: what was asked for.
        number: candidates of a round, at first.
        room: [B], the most tokens that each row may emit. A row that is nearly done drafts no more than it can emit
            together with the token that follows; None if all rows and ranks must draft alike.

    Attributes:
        next_call: the number that a call with the same drafting goes on with.
        most: candidates of a row, at most.
        late: rows whose prompt came in the place of another and may have candidates for its first token.
    """

    most = sys.maxsize

    def __init__(self, drafting: Drafting, number: int, room: list[int] | None):
        self.drafting, self.room, self.next_call = drafting, room, number
        self.late: set[int] = set()

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
        return self.next_call

    @property
    def usual(self) -> int:
        """Candidates of a row of which nothing else is known."""
        return self.next_call

    def idle(self, batch: Batch) -> list[int]:
        """Candidates for the rows of a text that is finished, while other ranks go on."""
        return [self.number(row) for row in batch.rows]

    def observe(self, done: Round) -> None:
        """Count a round."""

    def admit(self, row: int, room: int, alone: bool) -> None:
        """A new prompt has the place of a row.

        Args:
            row: its number.
            room: the most tokens that it may emit.
            alone: whether its numbers must be those of a batch of one, where the first token has no candidates.
        """
        (self.late.discard if alone else self.late.add)(row)
        if self.room is not None:
            self.room[row] = room

    def end(self) -> None:
        """The call is over."""


class Heuristic(Schedule):
    """As transformers does, but for each row: 2 more after a round that kept all of its candidates, else 1 less."""

    def __init__(self, drafting: Drafting, number: int, room: list[int] | None):
        super().__init__(drafting, number, room)
        self.first, self.numbers = number, dict[int, int]()

    def number(self, row: int) -> int:
        return self.numbers.get(row, self.first)

    def observe(self, done: Round) -> None:
        for row, drafted, accepted in zip(done.rows, done.draft.drafted, done.accepted, strict=True):
            if drafted:
                number = self.number(row)
                self.numbers[row] = number + 2 if accepted == drafted else max(1, number - 1)

    def admit(self, row: int, room: int, alone: bool) -> None:
        super().admit(row, room, alone)
        self.numbers.pop(row, None)

    def end(self) -> None:
        if self.numbers and self.drafting.schedule == "heuristic":
            self.next_call = round(statistics.mean(self.numbers.values()))


class Auto(Schedule):
    """ "auto" for one call: each round the number with the most tokens per second, which may be 0.

    The longest draft of the batch decides what a forward costs, so all rows get the same number. Only a row whose
    candidates are nearly all rejected rests while others go on.

    Args:
        costs: with times for at least one batch size; `end` adds those of this call.
        verification: of the call. Under "token" and "block" the number changes what is drawn, so only times known
            before the call are used there.
        room: [B], the most tokens that each row may emit.
        together: whether all rows advance by as many tokens as the slowest.
    """

    def __init__(self, costs: Costs, verification: str, room: list[int], together: bool):
        super().__init__(Drafting(), MAX_DRAFT_TOKENS, room)
        rows = len(room)
        self.costs, self.rows = costs, rows
        self.times = RoundTimes(costs, online=verification in ("greedy", "coupled"))
        known = verification in costs.alpha
        alpha, weight = (costs.alpha[verification], LEARNED_WEIGHT) if known else (PRIOR_ALPHA, PRIOR_WEIGHT)
        self.chooser = Chooser(Survival(alpha ** (rows if together else 1), weight, together), known)
        self.wanted = self.chooser.first(self.times(rows), max(room))
        self.resting = None if together else Resting()
        self.alone: set[int] = set()  # rows with the number of a batch of one with a seed

    def number(self, row: int) -> int:
        if row in self.alone:
            return FIXED_DRAFT_TOKENS
        return 0 if self.resting is not None and self.resting.rests(row) else self.wanted

    @property
    def usual(self) -> int:
        return self.wanted

    def observe(self, done: Round) -> None:
        drafted, before = done.draft.steps, self.rows
        self.rows = len(done.rows) if done.stay is None else len(done.stay)
        if not any(done.before):
            return  # the prompts' own step
        if done.draft.free is None:
            self.times.observe(before, drafted)
        else:
            self.times.skip()
        # others were finished before, had nothing to draft after, or have candidates from elsewhere
        free = done.draft.free or [False] * len(done.rows)
        live = [n for n, gained in enumerate(done.gained) if gained and done.before[n] and not free[n]]
        if not live:
            return
        if self.resting is not None:
            self.resting.observe(done)
        room = self.room or []
        left = [max(1, room[done.rows[number]] - done.before[number]) for number in live]
        # a row that rests is counted as one that keeps nothing
        chances = done.chances
        survival = [chances[number] or [0.0] * drafted for number in live]
        catch_up = partial(self.times.catch_up, self.rows)
        self.wanted = self.chooser.next(Outcome(drafted, survival, left), self.times(self.rows), catch_up)

    def admit(self, row: int, room: int, alone: bool) -> None:
        super().admit(row, room, alone)
        (self.alone.add if alone else self.alone.discard)(row)
        self.times.skip()
        if self.resting is not None:
            self.resting.admit(row)

    def end(self) -> None:
        self.costs.remember_rounds(self.times)


def make_schedule(
    drafting: Drafting,
    costs: Costs | None,
    verification: str,
    batch: Batch,
    room: list[int] | None,
    earlier: Schedule | None,
    most: int | None = None,
) -> Schedule:
    """The schedule of a call: how many candidates its rounds draft.

    Args:
        drafting: what was asked for.
        costs: with times for this batch size; None if "auto" must not use any.
        verification: of the call.
        batch: its prompts.
        room: as for `Schedule`.
        earlier: that of the call before, from which "heuristic" goes on.
        most: what "auto" means for a draft that finds its own number up to this one.
    """
    rows = len(batch.rows)
    if drafting.number is None and most is not None:
        drafting = drafting._replace(number=most)
    if drafting == Drafting() and costs is not None and room is not None:
        return Auto(costs, verification, room, batch.lockstep)
    number = drafting.number
    if number is None:
        number = FIXED_DRAFT_TOKENS if costs is None else costs.best_num_draft_tokens(rows, verification)
    if drafting.schedule == "constant":
        return Schedule(drafting, number, room)
    goes_on = earlier is not None and drafting == earlier.drafting and drafting.schedule == "heuristic"
    return Heuristic(drafting, earlier.next_call if goes_on and earlier is not None else number, room)
