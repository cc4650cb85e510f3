"""How many candidates each row drafts, as the user says in transformers' own words; "auto" is in `auto.py`.

These words are a number, its schedule and a threshold, which transformers reads from the draft's own file alone.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import GenerationConfig

from hf_specx.common.batch import Batch
from hf_specx.common.round import Round
from hf_specx.sampling.processors import Processors


UNSET = {  # what `generate` fills in before it calls a strategy, whether or not the user gave these values
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}


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
    arguments: dict[str, Any] = {}
    for source in reversed(sources):
        values = vars(source) if isinstance(source, GenerationConfig) else source or {}
        arguments |= {name: values[name] for name in UNSET if values.get(name) is not None}
    return arguments


def choose_drafting(
    num_draft_tokens: int | str, given: Mapping[str, Any] | None, filled: GenerationConfig, draft_model: Any
) -> Drafting:
    """What is used: the strategy's own number, else what the call says, else the draft's own file, else "auto".

    With the strategy's own number no schedule counts.
    If `num_draft_tokens` is a number, the draft's own file, a `generation_config`, is not read at all. Without
    `given_drafting` of the call all values count as given that `UNSET` does not have, in the config as it is `filled`.
    """
    if given is None:
        values = {name: getattr(filled, name, None) for name in UNSET}
        given = {name: value for name, value in values.items() if value != UNSET[name]}
    of_draft = getattr(draft_model, "generation_config", None) if num_draft_tokens == "auto" else None
    defaults = dict(zip(UNSET, Drafting(), strict=True))
    number, schedule, threshold = (defaults | given_drafting(given, of_draft)).values()
    if not isinstance(num_draft_tokens, str):
        number, schedule = num_draft_tokens, "constant"
    elif schedule in ("heuristic", "heuristic_transient"):
        number = None
    return Drafting(number, schedule, threshold)


class Schedule:
    """How many candidates each row drafts in the next round: the same number for all rows and rounds.

    Args:
        wanted: that number.
        round_timer: a `RoundTimer`, which is told when rounds end; None where no times are kept.
        synced: whether all rows and ranks must draft equally many. Else a row that is nearly done drafts no more than
            it can emit together with the token that follows.
        processors: take back so many candidates of a row at most.
        agree: makes of the number of each rank the same one, in each round; None if that is the same by itself.
    """

    def __init__(
        self,
        wanted: int,
        round_timer: Any = None,
        synced: bool = False,
        processors: Processors | None = None,
        agree: Callable[[int], int] | None = None,
    ):
        self.wanted = wanted
        self.round_timer = round_timer
        self.synced = synced
        self.processors = processors or Processors([])
        self.agree = agree

    def __call__(self, batch: Batch) -> list[int]:
        """Candidates for each of the R decoding rows."""
        if self.agree is not None:
            self.wanted = self.agree(min(self.wanted, self.processors.max_rollback))
        return [self._of_row(batch, row) for row in batch.rows]

    def _of_row(self, batch: Batch, row: int) -> int:
        state = batch.row_states[row]
        # as in a batch of one, whose first round has no candidates; others have some as soon as they have a place
        if not batch.counts[row] and (state.independent_lengths or not state.is_refill):
            return 0
        number = min(self.number(batch, row), self.processors.max_rollback)
        if self.synced:
            return number
        return min(number, max(0, batch.remaining_tokens(row) - 1))

    def number(self, batch: Batch, row: int) -> int:
        """Candidates of a row, if its text has room for them."""
        return self.wanted

    def observe(self, done: Round) -> None:
        """Time a round in which every candidate took a step of the draft, or none did."""
        if self.round_timer is None or not any(done.emitted_before):
            return  # the prompts' own step has taken another time
        draft = done.draft
        if draft.model_free is None and draft.steps == max(draft.lengths):
            self.round_timer.observe(len(done.rows), draft.steps)
        else:
            self.round_timer.skip()

    def admit(self, batch: Batch, rows: list[int]) -> None:
        """New prompts have the places of these rows."""
        if self.round_timer is not None:
            self.round_timer.skip()

    def end(self) -> None:
        """The call is over; later ones go by what its rounds took."""
        if self.round_timer is not None:
            self.round_timer.end()
