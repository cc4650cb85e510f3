"""How many candidates each round drafts: as "auto" finds best, or as the user says in transformers' own words.

These are a number, its schedule, and a threshold. transformers reads all three from the draft's own file alone. Here a
call may set them as well.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from .costs import Costs, RoundTimes
from .draft_length import LEARNED_WEIGHT, MAX_DRAFT_TOKENS, PRIOR_ALPHA, PRIOR_WEIGHT, Chooser, Outcome, Survival


UNSET = {  # what `generate` fills in before it calls a strategy; there such a value is as good as none
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}


class Drafting(NamedTuple):
    """What was asked for.

    Attributes:
        number: candidates a round, at first; None is "auto".
        schedule: "constant", or "heuristic": 2 more after a round that kept every candidate of every row, else 1 less;
            "heuristic_transient" is the same, from `number` again in each call.
        threshold: a round drafts no further once each row had a candidate that the draft gave less than this
            probability; 0 is never. It stays as given, where stock adapts it by scikit-learn's ROC curve.
    """

    number: int | None = None
    schedule: str = "constant"
    threshold: float = 0.0


def given_drafting(*places: Mapping[str, Any] | GenerationConfig | None) -> dict[str, Any]:
    """Those of transformers' three arguments that a user has set, each from the first place that has it.

    Args:
        *places: the call's keyword arguments, and configs that nobody has filled up with defaults yet.
    """
    known = [vars(place) if isinstance(place, GenerationConfig) else place for place in places if place is not None]
    found = {name: [place[name] for place in known if place.get(name) is not None] for name in UNSET}
    return {name: values[0] for name, values in found.items() if values}


def choose_drafting(
    num_draft_tokens: int | str, given: Mapping[str, Any] | None, filled: GenerationConfig, draft_model: Any
) -> Drafting:
    """What counts: the strategy's own number, then the call, then the draft's own file, then "auto".

    A number in `num_draft_tokens` is meant as it stands, so then the draft's own file is not asked for anything.

    Args:
        num_draft_tokens: the strategy's option.
        given: `given_drafting` of the call; None where `filled` is all that is known of it.
        filled: the config that `generate` hands to a strategy; a value counts as set where it is not in `UNSET`.
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
    """How many candidates the next round drafts; a strategy keeps one, as "heuristic" goes on from call to call.

    Attributes:
        wanted: that number.
        most: the largest that is to be reckoned with.
        threshold: as in `Drafting`.
    """

    def __init__(self) -> None:
        self.drafting, self.wanted = Drafting(), 0

    @property
    def most(self) -> int:
        return self.wanted

    @property
    def threshold(self) -> float:
        return self.drafting.threshold

    def begin(self, drafting: Drafting, number: int) -> None:
        """Start a call with `number`, or where the last one left off if the same is asked for again."""
        if drafting != self.drafting or drafting.schedule != "heuristic":
            self.wanted = number
        self.drafting = drafting

    def update(self, outcome: Outcome, rows: int) -> None:
        """Take in a round, after which so many rows go on."""
        if outcome.drafted and self.drafting.schedule != "constant":
            self.wanted = self.wanted + 2 if outcome.all_accepted else max(1, self.wanted - 1)


class Auto(Schedule):
    """What "auto" drafts: the number with the most tokens a second, or none, chosen anew for each round of one call.

    Args:
        costs: with times for some batch size; what is learned here is put there by `end`.
        verification: of the call. Under "token" and "block" the number changes what is drawn, so there it goes by what
            was known of times before the call.
        rows: B.
        room: tokens that each of them may have emitted.
        together: whether they advance by the least of the batch.
    """

    most = MAX_DRAFT_TOKENS

    def __init__(self, costs: Costs, verification: str, rows: int, room: int, together: bool):
        super().__init__()
        self.costs = costs
        self.times = RoundTimes(costs, online=verification in ("greedy", "coupled"))
        known = verification in costs.alpha
        alpha, weight = (costs.alpha[verification], LEARNED_WEIGHT) if known else (PRIOR_ALPHA, PRIOR_WEIGHT)
        self.chooser = Chooser(Survival(alpha ** (rows if together else 1), weight, together), known)
        self.wanted, self.rows = self.chooser.first(self.times(rows), room), rows

    def update(self, outcome: Outcome, rows: int) -> None:
        self.times.observe(self.rows, outcome.drafted)
        self.rows = rows
        self.wanted = self.chooser.next(outcome, self.times(self.rows), partial(self.times.catch_up, self.rows))

    def end(self) -> None:
        """The call is over."""
        self.costs.remember_rounds(self.times)


class Confidence:
    """Whether a round should draft further; one for each round.

    The candidate that falls below the threshold is kept: whether one is judged then depends on those before it alone,
    and every verification stays exact.

    Args:
        threshold: as in `Drafting`.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.sure: torch.Tensor | None = None

    def is_lost(self, scores: torch.Tensor, tokens: torch.Tensor) -> bool:
        """Whether every row has drafted below the threshold by now.

        Args:
            scores: [R, V], the draft's, processed.
            tokens: [R] int64, the candidates chosen by them.
        """
        if not self.threshold:
            return False
        probs = scores.softmax(-1).gather(-1, tokens[:, None])[:, 0]
        sure = probs >= self.threshold
        self.sure = sure if self.sure is None else self.sure & sure
        return not bool(self.sure.any())
